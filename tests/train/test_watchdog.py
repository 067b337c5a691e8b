"""Two hosts, as two torchrun nodes over loopback: they train as one process does, and fail together, with the cause."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import free_port, run
from safetensors.torch import load_file
from trainers import OPTIONS, write_inputs

from ctcdraft.train import watchdog

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TRAIN = ROOT / "launch" / "train.py"
SHARDS = ["data.shard_rows=8", "draft.budget=fixed"]  # a measured budget is what a clock decides

# Plants a fault on rank 1 at the third step, then runs the entry, with shorter waits of the watchdog.
FAULTY = """
import os, runpy, signal, sys, time
from ctcdraft.train import watchdog
from ctcdraft.train.task import DraftTask

watchdog.TICK, watchdog.LOST_SECONDS = 0.5, 3.0
forward, calls, fault = DraftTask.forward, [0], sys.argv[1]

def faulty(self, *given):
    calls[0] += 1
    if calls[0] == 3 and os.environ["RANK"] == "1":
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            time.sleep(10**6)
        raise {"refuses": ValueError, "breaks": RuntimeError}[fault]("the planted fault")
    return forward(self, *given)

DraftTask.forward = faulty
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    write_inputs(folder)
    rows = json.loads((folder / "rows.json").read_text())
    (folder / "rows.json").write_text(json.dumps([{"messages": []}, *rows]))
    (folder / "faulty.py").write_text(FAULTY)
    return folder


def start(work, words):
    """A process whose output goes to files: W&B's own process outlives ours a little, and would hold a pipe open."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PATH": f"{BIN}:{os.environ['PATH']}"}
    streams = [tempfile.TemporaryFile("w+", dir=work) for _ in range(2)]  # noqa: SIM115
    output = {"stdout": streams[0], "stderr": streams[1]}
    process = subprocess.Popen([*map(str, words)], cwd=work, env=env, start_new_session=True, **output)
    process.said = lambda: [stream.seek(0) or stream.read() for stream in streams]
    return process


def nodes(work, words):
    """(exit code, stdout, stderr) of a script and its options on each of two nodes with one rank each."""
    master = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    commands = [[BIN / "torchrun", *master, f"--node-rank={node}", *words, *OPTIONS, *SHARDS] for node in range(2)]
    both = [start(work, command) for command in commands]
    try:
        return [(process.wait(timeout=110), *process.said()) for process in both]
    finally:
        for process in both:
            gone(process)


def gone(process):
    for child in [*children(process), process]:
        with suppress(psutil.Error, ProcessLookupError):
            child.kill()


def children(process):
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def last_error(text, none=None):
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return errors[-1] if errors or none is None else none


def test_two_nodes_prepare_train_log_and_evaluate_as_one_process_does(work):
    one = run([TRAIN, *OPTIONS, *SHARDS, "name=one", "cache_dir=alone"], cwd=work)
    assert one.returncode == 0, one.stderr
    (zero, out, error), (other, quiet, other_error) = nodes(work, [TRAIN, "name=two", "zero=2", "logger=offline"])
    assert (zero, other) == (0, 0), (error, other_error)
    assert "read 24 = used 23 + rejected 1 (1 of them: " in out
    assert "identical to plain decoding" in out
    assert quiet == "", "the second host says nothing that the first one says"
    runs = [work / "runs" / name for name in ("one", "two")]
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    assert [row["step"] for row in rows[1]] == [1, 2, 3, 4, 5, 6]
    for row, want in zip(rows[1], rows[0], strict=True):
        assert row["perf/ranks"] == 2
        assert row["train/tokens"] == want["train/tokens"]
        assert abs(row["train/loss"] - want["train/loss"]) < 1e-5 * want["train/loss"]
        assert row.get("dev/tokens_per_step") == want.get("dev/tokens_per_step")
    heads = [load_file(run / "head" / "model.safetensors") for run in runs]
    apart = {name: (weight - heads[1][name]).abs() for name, weight in heads[0].items()}
    # Adam divides by the gradient's size: where, for one step, that is rounding alone, so is the step's direction.
    odd = sum(int((values > 1e-5).sum()) for values in apart.values())
    assert odd <= sum(values.numel() for values in apart.values()) // 1000
    assert {name for name, values in apart.items() if values.max() >= 1e-4} == set()
    assert len(list((runs[1] / "wandb").glob("offline-run-*"))) == 1
    found = [json.loads((run / "eval" / "heldout" / "results.json").read_text()) for run in runs]
    assert found[0]["tokens_per_step"] == found[1]["tokens_per_step"]


CAUSES = {
    "killed": "ended without a word (killed, or its machine is gone)",
    "hangs": "hangs: it has not got beyond head of step 3 for 0.1 minutes (train.hang_minutes)",
    "refuses": "the planted fault",
    "breaks": "RuntimeError: the planted fault",
}


@pytest.mark.parametrize("fault", CAUSES)
def test_what_happens_to_one_rank_ends_the_run_on_both_hosts_and_is_said_last(work, fault):
    minutes = 0.1 if fault == "hangs" else 30
    words = [work / "faulty.py", fault, TRAIN, f"name={fault}", "logger=none", f"train.hang_minutes={minutes}"]
    found = nodes(work, words)
    assert all(code != 0 for code, _, _ in found)
    (_, _, first), (_, _, second) = found
    assert CAUSES[fault] in last_error(first)
    if fault != "refuses":
        assert last_error(first).startswith("error: rank 1 on ")
    for said in (first, second):
        if last_error(said, none=""):  # where the rank itself is gone, its host has torchrun's word for it
            assert CAUSES[fault] in last_error(said)
            assert CAUSES[fault] in said.split("Root Cause")[-1], "torchrun's report ends with the cause as well"
    assert not (work / "runs" / fault / "head").exists()


LAUNCHERS = {
    "torchrun": lambda: (BIN / "torchrun", "--standalone", "--nproc-per-node", 2),
    "deepspeed": lambda: (BIN / "deepspeed", "--num_gpus", 2, "--master_port", free_port()),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_killed_leaves_no_orphans_and_a_checkpoint(work, launcher, number):
    name = f"{launcher}-{number}"
    many = [f"name={name}", "train.steps=100000", "train.eval_every=100000", "train.save_every=100000", "logger=none"]
    process = start(work, [*LAUNCHERS[launcher](), TRAIN, *OPTIONS, *SHARDS, *many])
    ranks = []
    try:
        metrics = work / "runs" / name / "metrics.jsonl"
        until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 2, process)
        ranks = [child for child in children(process) if "train.py" in " ".join(child.cmdline())]
        assert len(ranks) >= 2
        process.send_signal(number)
        process.wait()
        until(lambda: not any(psutil.pid_exists(child.pid) for child in ranks))
    finally:  # what fails here would train on for hours
        for child in [process, *ranks]:
            gone(child)
    latest = (work / "runs" / name / "checkpoints" / "latest").read_text()
    assert int(latest.removeprefix("step_")) > 2


class Store(dict):
    """What the ranks share, without a network between them."""

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)

    def multi_get(self, keys):
        return [self[key] for key in keys]

    def add(self, key, count):
        self[key] = self.get(key, 0) + count
        return self[key]

    def compare_set(self, key, expected, wanted):
        return self.setdefault(key, wanted).encode()


def three_ranks(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    store = Store()
    ranks = [watchdog.Watchdog(number, 3, f"host{number}", store) for number in range(3)]
    for rank in ranks:
        rank.publish()
    return clock, ranks


def test_a_rank_that_says_nothing_new_for_a_minute_is_dead_and_one_that_works_long_is_not(monkeypatch):
    clock, ranks = three_ranks(monkeypatch)
    ranks[2].moved("head of step 9")
    ranks[2].publish()
    last = watchdog.DEAD_SECONDS
    found = None
    while found is None:
        clock[0] += 1
        assert ranks[1].cause() is None
        found = ranks[0].cause()
    assert last < clock[0] <= last + 2
    assert found == "rank 2 on host2 ended without a word (killed, or its machine is gone), in head of step 9"


def test_of_ranks_that_wait_for_each_other_the_one_that_got_least_far_hangs(monkeypatch):
    clock, ranks = three_ranks(monkeypatch)
    for rank in ranks:
        rank.moved("data of step 4", 60.0)
    for rank in (ranks[0], ranks[2]):
        rank.moved("backward of step 4", 60.0)
        rank.publish()
    clock[0] = 59.0
    assert [rank.cause() for rank in ranks] == [None, None, None]
    clock[0] = 61.0
    said = "rank 1 on host1 hangs: it has not got beyond data of step 4 for 1 minutes (train.hang_minutes)"
    assert {rank.cause() for rank in ranks} == {said}


def test_the_first_failure_is_every_ranks(monkeypatch, capsys):
    _, ranks = three_ranks(monkeypatch)
    waited, exits = [], []
    monkeypatch.setattr(watchdog.time, "sleep", waited.append)
    monkeypatch.setattr(watchdog.os, "_exit", exits.append)
    monkeypatch.setattr(watchdog.signal, "signal", lambda *_: None)
    assert ranks[1]._first("the disk is full") == "the disk is full"
    assert ranks[0]._first("a connection broke") == "the disk is full"
    assert ranks[2].cause() == "the disk is full"
    ranks[2].failed(RuntimeError("Connection closed by peer"))
    assert capsys.readouterr().err.splitlines()[-1] == "error: the disk is full"
    assert waited == [pytest.approx(watchdog.LOST_SECONDS, abs=10)], "the thread has time to find who was lost"
    assert exits == [1]


def until(so, process=None):
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.said()[1][-2000:]
        time.sleep(0.1)
