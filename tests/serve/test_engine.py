"""In vLLM itself, on a small trained base: tokens are plain decoding's own, and steps those of our chain.

`make test-serve` makes the engine's environment and runs these; elsewhere they are skipped.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from overfitted import overfit_head

from ctcdraft.data.template import prompt_ids
from ctcdraft.model import Decoder, DraftConfig, load_base, load_head

ROOT = Path(__file__).parents[2]
ENV = Path(os.environ.get("CTCDRAFT_ENGINE", ROOT / ".venv-vllm"))
NODES, LIMIT = 12, 48
ASKED = [
    "Pretend that you are a gardener in London. Mia asks you about your day.",
    "Tell me a story about a cat and a dog.",
    "Pretend that you are a baker in Paris. Tom asks you about your day.",
    "Why is the sky blue?",
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ENV / "bin" / "python").exists(), reason=f"no engine in {ENV}: make test-serve makes it"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Base and head, and what our own decoder makes of the questions."""
    work = tmp_path_factory.mktemp("served")
    base = load_base(str(overfit_head(work, ASKED[0])))
    prompts = [prompt_ids(base.tokenizer, [{"role": "user", "content": text}], None) for text in ASKED]
    prompts += [prompts[0] + prompts[2] + ids for ids in prompts]  # a beginning that pages can be shared of
    chain = DraftConfig("chain", NODES, budget="fixed")
    ours = Decoder(base, load_head(work / "head", base), chain).generate(prompts, LIMIT)
    assert [out.tokens for out in ours] == [out.tokens for out in Decoder(base).generate(prompts, LIMIT)]
    return {"base": base.path, "head": str(work / "head"), "prompts": prompts, "ours": ours}


def in_engine(served, batch=8, head=True, **options):
    asked = {"base": served["base"], "head": served["head"] if head else None, "nodes": NODES, "limit": LIMIT}
    asked |= {"prompts": served["prompts"], "batch": batch} | options
    words = [ENV / "bin" / "python", ROOT / "tests" / "helpers" / "engine_run.py", json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 1},
        {},
        {"engine": {"max_num_batched_tokens": 8 * (NODES + 1) + 8}},  # less would cut drafts short
        {"engine": {"enable_prefix_caching": True, "block_size": 32}},
        {"engine": {"enforce_eager": False}},
    ],
    ids=["one", "eight", "chunked", "cached", "compiled"],
)
def test_tokens_and_steps_are_our_chains(served, options):
    found = in_engine(served, **options)
    assert found["tokens"] == [out.tokens for out in served["ours"]]
    assert found["steps"] == [out.steps for out in served["ours"]]
    assert bool(found["cached"]) == options.get("engine", {}).get("enable_prefix_caching", False)


def test_preempted_requests_get_the_same_tokens(served):
    found = in_engine(served, engine={"num_gpu_blocks_override": 12, "block_size": 32, "max_model_len": 256})
    assert found["preemptions"] > 0
    assert found["tokens"] == [out.tokens for out in served["ours"]]


def test_samples_are_as_likely_as_those_without_drafts(served):
    """vLLM's CPU build draws at other temperatures with any drafter, unless that is mended."""
    sampling = {"sampling": {"temperature": 0.7, "seed": 1, "logprobs": 0}}
    plain, drafted = (sum(in_engine(served, head=head, **sampling)["log_p"]) for head in (False, True))
    assert drafted > 1.5 * plain - 10  # -3.4 for -0.3 per token where it is broken


def test_the_command_serves_streams_and_counts(served):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, ROOT / "launch" / "serve.py", f"head.path={served['head']}", f"base.path={served['base']}"]
    words += [f"port={port}", f"env={ENV}", "base.dtype=fp32", "args=[--max-model-len,512,--enforce-eager]"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    seen = []
    for line in running.stdout:
        seen.append(line)
        if "Ctrl-C" in line:
            break
    try:
        assert "curl" in "".join(seen), "".join(seen)
        asked = {"model": Path(served["base"]).name, "temperature": 0, "max_tokens": LIMIT, "stream": True}
        for text, out in zip(ASKED[:2], served["ours"], strict=False):
            said = ""
            chat = asked | {"messages": [{"role": "user", "content": text}]}
            address = f"http://127.0.0.1:{port}/v1/chat/completions"
            with httpx.stream("POST", address, json=chat, timeout=300) as reply:
                for event in reply.iter_lines():
                    if event.startswith("data: {"):
                        said += json.loads(event[6:])["choices"][0]["delta"].get("content") or ""
            assert said == out.text
    finally:
        running.send_signal(signal.SIGINT)
        rest = running.communicate(timeout=60)[0]
    assert "tokens per step" in rest
    assert running.returncode == 0
