"""The GPU's hour on a CPU: every part runs at a tiny size, and what is late or lacks something holds nobody up."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import run

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import gpu

pytestmark = pytest.mark.slow

# A process that begins another one and waits for it.
WAITING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
print(child.pid, flush=True)
child.wait()
"""


def start(options):
    return run([gpu.__file__, *options], cwd=gpu.ROOT, PYTHONPATH=str(gpu.ROOT))


def parts_of(folder):
    return json.loads((folder / "gpu.json").read_text())["parts"]


def forked(words, seconds, log, environment):
    """`gpu.run` of a part that begins with its libraries."""
    done = run(words[1:], cwd=gpu.ROOT, timeout=seconds, PYTHONPATH=str(gpu.ROOT))
    log.write_text(done.stdout + done.stderr)
    return "done" if done.returncode == 0 else done.stderr, ""


def test_a_dry_run_does_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run", forked)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "--out", str(tmp_path)])
    assert gpu.main() == 0
    without = "done" if importlib.util.find_spec("vllm") else "skipped: vllm is not installed"
    wanted = {part.name: without if "vllm" in part.modules else "done" for part in gpu.PARTS}
    assert {row["part"]: row["outcome"] for row in parts_of(tmp_path)} == wanted
    table = (tmp_path / "gpu.md").read_text()
    assert all(f"| {part.name} " in table for part in gpu.PARTS)
    for name, batch, count in (("decode", 1, 2), ("batches", 2, 1)):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert [(row["batch"], row["identical"]) for row in rows] == [(batch, True)] * count
    assert json.loads((tmp_path / "errors" / "fused_ctc.json").read_text())["error"]
    assert json.loads((tmp_path / "loss" / "fused_ctc.json").read_text())["compared"]
    assert json.loads((tmp_path / "step.json").read_text())["rows"]
    assert json.loads((tmp_path / "gpu.json").read_text())["training"]["time/head"] > 0


def test_what_is_missing_and_what_has_no_time_left_is_skipped_with_the_reason(tmp_path):
    done = start(["--only", "train", "mt_bench", "--smollm2", tmp_path / "none", "--out", tmp_path])
    assert done.returncode == 0
    reasons = [f"skipped: {tmp_path}/none is not there", "skipped: --mt-bench is not given"]
    assert [row["outcome"] for row in parts_of(tmp_path)] == reasons
    assert start(["--dry", "--only", "decode", "--minutes", "0", "--out", tmp_path]).returncode == 0
    assert [row["outcome"] for row in parts_of(tmp_path)] == ["skipped: no time is left"]
    assert start(["--only", "drafts"]).returncode == 2
    assert start(["--with", "drafts --rounds 3"]).returncode == 2


def test_a_part_takes_more_options(tmp_path):
    environment, command = {**os.environ, "PYTHON": sys.executable}, [gpu.ROOT / "bench" / "gpu.sh", "--dry"]
    options = ["--only", "errors", "--with", "errors --rounds x", "--out", tmp_path]
    assert subprocess.run([*command, *options], env=environment, timeout=100).returncode == 1
    (row,) = parts_of(tmp_path)
    assert "invalid int value: 'x'" in row["last words"]


def test_a_part_that_is_late_is_ended_with_all_that_it_began(tmp_path):
    outcome, pid = gpu.run([sys.executable, "-c", WAITING], 3, tmp_path / "log", os.environ)
    assert outcome == "ended after 3 s"
    end = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end


def test_how_a_part_ends_is_told_with_its_last_words(tmp_path):
    words = [sys.executable, "-c", "print('an error of 1e-3')"]
    assert gpu.run(words, 30, tmp_path / "log", os.environ) == ("done", "an error of 1e-3")
    words = [sys.executable, "-c", "print('out of memory'); raise SystemExit(3)"]
    assert gpu.run(words, 30, tmp_path / "log", os.environ) == ("failed with 3", "out of memory")
