"""Serving as a user meets it, with a stand-in for the engine: a small server under the engine's command line."""

import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from bases import write_base
from commands import free_port
from drafting import HEADS, random_head

from ctcdraft.launch import serve
from ctcdraft.launch.schema import BasePath, HeadPath, ServeEntry
from ctcdraft.model import load_base
from ctcdraft.model.export import export_head
from ctcdraft.model.heads import EagleConfig

TRAINING = {"objective": "ctc", "step": 1, "tokens": 1, "tokens_per_step": 1.0}
ENGINE = '''#!{python}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if sys.argv[1] == "-c":
    sys.exit(0)
port = int(next(word for word in sys.argv if word.startswith("--port=")).split("=")[1])
{before}
METRICS = """vllm:spec_decode_num_drafts_total{{engine="0"}} 10.0
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} 40.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} 25.0
"""
class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode() if self.path == "/metrics" else b"")
HTTPServer(("127.0.0.1", port), Engine).serve_forever()
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("served")
    base = load_base(str(write_base(work / "base")))
    export_head(random_head(HEADS[1], base), base, work / "run" / "head", TRAINING)
    export_head(random_head(EagleConfig(slots=3, width=32), base), base, work / "eagle", TRAINING)
    return work


def engine(work, name, before=""):
    python = work / name / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(ENGINE.format(python=sys.executable, before=before))
    python.chmod(0o755)
    return work / name


def options(work, env, **changed):
    chosen = {"head": HeadPath(str(work / "run" / "head")), "base": BasePath(path=str(work / "base"))}
    return ServeEntry(**chosen | {"env": str(env), "port": free_port(), "wait": 20} | changed)


@pytest.mark.slow
def test_it_waits_prints_a_curl_line_and_says_what_drafting_was_worth(work, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")  # which is for other hosts
    monkeypatch.delenv("no_proxy", raising=False)
    env = engine(work, "good")
    words = [f"head.path={work}/run/head", f"base.path={work}/base", f"env={env}", f"port={free_port()}"]
    command = [sys.executable, "-m", "ctcdraft.launch.serve", *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = []
    for line in running.stdout:
        seen.append(line)
        if "Ctrl-C" in line:
            running.send_signal(signal.SIGINT)
    assert running.wait(30) == 0, "".join(seen)
    text = "".join(seen)
    assert "curl http://127.0.0.1:" in text
    assert "10 drafts, 25 of 40 tokens accepted: 3.50 tokens per step" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ("sys.exit('ValueError: --enable-lora: a head drafts for one base')", "did not start: --enable-lora"),
        ("sys.exit('RuntimeError: [enforce fail] out of memory: you tried')", "not enough memory"),
        ("sys.exit('some words\\nand others')", "did not start: some words"),
        ("import time; time.sleep(60)", "did not answer within wait=2 seconds"),
    ],
)
def test_what_the_engine_says_becomes_one_sentence(work, before, sentence):
    env = engine(work, "bad", before)
    with pytest.raises(ValueError, match=sentence) as told:
        serve.main(options(work, env, wait=2 if "sleep" in before else 20))
    assert "\n" not in str(told.value)


def test_a_port_that_is_taken_is_refused_before_anything_starts(work):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port} of host=127.0.0.1: Address already in use"):
            serve.main(options(work, work / "none", port=port))


def test_heads_that_no_engine_serves_are_refused(work):
    with pytest.raises(ValueError, match="kind eagle"):
        serve.main(options(work, work / "none", head=HeadPath(str(work / "eagle"))))
    with pytest.raises(ValueError, match=r"needs base\.path"):
        serve.main(options(work, work / "none", base=BasePath()))
    with pytest.raises(ValueError, match=r"base\.eos is for our own decoder"):
        serve.main(options(work, work / "none", base=BasePath(path=str(work / "base"), eos=3)))
    with pytest.raises(ValueError, match=r"name and head\.path each say which head"):
        options(work, work / "none", name="run")
    with pytest.raises(ValueError, match="no run in"):
        serve.main(options(work, work / "none", head=HeadPath(), runs_dir=str(work / "runs")))


@pytest.mark.parametrize(("base", "sentence"), [("nowhere", "no such folder"), ("run", "no model with a tokenizer")])
def test_a_base_that_is_none_is_refused_before_an_environment_is_made(work, monkeypatch, base, sentence):
    made = []
    monkeypatch.setattr(serve, "engine_python", made.append)
    with pytest.raises(ValueError, match=f"base.path={work / base}: {sentence}"):
        serve.main(options(work, work / "none", base=BasePath(path=str(work / base))))
    assert not made


def test_the_model_is_called_by_its_folder_wherever_the_command_is_run(work, monkeypatch):
    monkeypatch.chdir(work / "base")
    config = options(work, work / "none", base=BasePath(path="."))
    assert "--served-model-name=base" in serve.command(config, *serve.served(config))
    assert '"model": "base"' in serve.curl_line("http://127.0.0.1:1", ".")


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_is_one_sentence(work, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"pip --quiet .* failed \(ERROR: No matching distribution"):
        serve.engine_python(work / "env")


def test_the_engine_gets_the_base_the_head_and_what_training_knew(work):
    config = options(work, work / "none", args=["--max-model-len", 64], nodes=7)
    known = {"dtype": "bf16", "template": "vicuna", "template_args": {"enable_thinking": False}}
    words = serve.command(config, "models/some-base", work / "run" / "head", known)
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert given["--model"] == "models/some-base"
    assert (given["--host"], given["--dtype"]) == ("127.0.0.1", "bfloat16")
    assert json.loads(given["--speculative-config"])["num_speculative_tokens"] == 7
    assert json.loads(given["--additional-config"]) == {"ctcdraft": {"head": str(work / "run" / "head")}}
    assert given["--chat-template"].endswith("vicuna.jinja")
    assert os.path.isfile(given["--chat-template"])
    assert json.loads(given["--default-chat-template-kwargs"]) == {"enable_thinking": False}
    assert words[-2:] == ["--max-model-len", "64"]


def test_ends_that_a_run_chose_and_the_engine_does_not_know_are_said(work):
    (work / "run" / "config.yaml").touch()
    paths = {"base": str(work / "base"), "data": "d", "dtype": "fp32", "identity": {}, "eos": "<a>"}
    (work / "run" / "paths.json").write_text(json.dumps(paths))
    config = options(work, work / "none", head=HeadPath(), base=BasePath(), name="run", runs_dir=str(work))
    with pytest.warns(UserWarning, match="trained with base.eos=<a>, and vLLM ends answers where the model's folder"):
        assert serve.served(config)[0] == str(work / "base")


def test_a_base_in_the_home_folder_is_found_there(work, monkeypatch):
    """Training takes `~` too, and a run's record keeps it."""
    monkeypatch.setenv("HOME", str(work))
    config = options(work, work / "none", base=BasePath(path="~/base"))
    assert f"--model={work / 'base'}" in serve.command(config, *serve.served(config))


def test_an_engine_without_drafts_says_so(monkeypatch):
    monkeypatch.setattr(serve.httpx, "get", lambda *_, **__: SimpleNamespace(text="other:metric 1.0\n"))
    assert serve.acceptance("http://localhost:1") == "nothing was drafted"
