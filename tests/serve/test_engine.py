"""In vLLM itself, on a small trained base: tokens are plain decoding's own, and steps those of our chain.

`make test-serve` makes the engine's environment and runs these; elsewhere they are skipped.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from overfitted import overfit_head

from ctcdraft.data.template import prompt_ids
from ctcdraft.model import Decoder, DraftConfig, load_base, load_head

ROOT = Path(__file__).parents[2]
ENV = Path(os.environ.get("CTCDRAFT_ENGINE", ROOT / ".venv-vllm"))
HELPER = ROOT / "tests" / "helpers" / "engine_run.py"
ENGINE = [
    "--dtype=float32",
    "--max-model-len=512",
    "--max-num-seqs=16",
    "--enforce-eager",
    "--enable-prefix-caching",
    "--block-size=32",
]
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
def served(common_cache, tmp_path_factory):
    """Base and head, and what our own decoder makes of the questions."""
    work = tmp_path_factory.mktemp("served")
    base = load_base(str(overfit_head(common_cache, work, ASKED[0])))
    prompts = [prompt_ids(base.tokenizer, [{"role": "user", "content": text}], None) for text in ASKED]
    prompts += [prompts[0] + prompts[2] + ids for ids in prompts]  # a beginning that pages can be shared of
    chain = DraftConfig("chain", NODES, budget="fixed")
    ours = Decoder(base, load_head(work / "head", base), chain).generate(prompts, LIMIT)
    assert [out.tokens for out in ours] == [out.tokens for out in Decoder(base).generate(prompts, LIMIT)]
    return {"base": base.path, "head": str(work / "head"), "prompts": prompts, "ours": ours}


@pytest.fixture(scope="module")
def engine(served):
    """What an engine of these options, with the head or without, makes of the prompts. A start takes most of a test's
    time, so the one that runs goes on as long as it is asked for, and `cached` is not an option of the engine."""
    running = []

    def stop():
        for process, _ in running:
            process.communicate(timeout=60)
        running.clear()

    def decoded(*options, head=True, batch=8, cached=False, **sampling):
        words = [ENV / "bin" / "python", HELPER, f"--model={served['base']}", *ENGINE, *options]
        if head:
            drafter = {"method": "custom_class", "model": "ctcdraft.serve.vllm.Proposer"}
            words += [f"--speculative-config={json.dumps(drafter | {'num_speculative_tokens': NODES})}"]
            words += [f"--additional-config={json.dumps({'ctcdraft': {'head': served['head'], 'length': 'fixed'}})}"]
        if not running or running[0][1] != words:
            stop()
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            running.append((subprocess.Popen(words, **pipes, text=True, env=environment), words))
            assert running[0][0].stdout.readline(), "the engine did not start: see above"
        sampling |= {"max_tokens": LIMIT, "skip_reading_prefix_cache": not cached}
        asked = {"prompts": served["prompts"], "batch": batch, "sampling": sampling}
        print(json.dumps(asked), file=running[0][0].stdin, flush=True)
        return json.loads(running[0][0].stdout.readline())

    yield decoded
    stop()


def test_samples_are_as_likely_as_those_without_drafts(engine):
    """vLLM's CPU build draws at other temperatures with any drafter, unless that is mended."""
    sampling = {"temperature": 0.7, "seed": 1, "logprobs": 0}
    plain, drafted = (sum(engine(head=head, **sampling)["log_p"]) for head in (False, True))
    assert drafted > 1.5 * plain - 10  # -3.4 for -0.3 per token where it is broken


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], {"batch": 1}),
        ([], {}),
        ([], {"cached": True}),
        ([f"--max-num-batched-tokens={8 * (NODES + 1) + 8}"], {}),  # less would cut drafts short
        (["--no-enforce-eager"], {}),
    ],
    ids=["one", "eight", "cached", "chunked", "compiled"],
)
def test_tokens_and_steps_are_our_chains(served, engine, options, asked):
    found = engine(*options, **asked)
    assert found["tokens"] == [out.tokens for out in served["ours"]]
    assert found["steps"] == [out.steps for out in served["ours"]]
    assert bool(found["counted"]["prefix_cache_hits"]) == asked.get("cached", False)


def test_preempted_requests_get_the_same_tokens(served, engine):
    found = engine("--num-gpu-blocks-override=12", "--max-model-len=256")
    assert found["counted"]["num_preemptions"] > 0
    assert found["tokens"] == [out.tokens for out in served["ours"]]


def test_the_command_serves_streams_and_counts(served):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, ROOT / "launch" / "serve.py", f"head.path={served['head']}", f"base.path={served['base']}"]
    words += [f"port={port}", f"env={ENV}", "base.dtype=fp32"]
    # So few rows a step that some requests are left out of it, drafts and all.
    words += ["args=[--max-model-len,512,--enforce-eager,--max-num-seqs,16,--max-num-batched-tokens,48]"]
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

        def answer(text):
            chat = asked | {"messages": [{"role": "user", "content": text}], "stream": False}
            return httpx.post(address, json=chat, timeout=300).json()["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(16) as many:
            told = [*many.map(answer, ASKED * 8)]
        assert told == [out.text for out in served["ours"][: len(ASKED)]] * 8
    finally:
        running.send_signal(signal.SIGINT)
        rest = running.communicate(timeout=60)[0]
    assert "tokens per step" in rest
    assert running.returncode == 0
