"""The launcher of several ranks: what a rank says is all that is said."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import run

from ctcdraft.launch import ranks
from ctcdraft.train.watchdog import LAST_SECONDS

pytestmark = pytest.mark.slow

RANKS = Path(__file__).parents[2] / "launch" / "ranks.py"
SCRIPT = """
import json, os, signal, sys, time

rank, fault = os.environ["RANK"], sys.argv[1]
if fault == "none":
    os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']}\\n".encode())  # whole, beside the other's
elif rank == "1" and fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif rank == "0" and fault == "fails":
    print("error: why it fails", file=sys.stderr, flush=True)
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as report:  # as train/watchdog.py does
        json.dump({"message": "why it fails", "timestamp": "1"}, report)
    sys.exit(3)
else:
    time.sleep(30)
"""


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("none", 0, ""),
        ("fails", 3, "error: why it fails\n"),
        ("killed", 137, "error: rank 1 was ended by SIGKILL, as where memory runs out\n"),
    ],
)
def test_what_ranks_come_to(tmp_path, fault, code, said):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(RANKS), "2", str(script), fault]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (code, said)
    assert sorted(done.stdout.split("\n")) == (["", "rank 0 of 2", "rank 1 of 2"] if fault == "none" else [""])


def test_what_all_ranks_find_is_said_once(tmp_path):
    words = [sys.executable, str(RANKS), "2", str(RANKS.with_name("train.py")), "head.slotz=3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: head.slotz: there is no such option; did you mean head.slots?\n"


ALONE = """
from ctcdraft.train import engine as ds

with ds.together():
    if ds.rank() == 0:
        raise ValueError("what rank 0 alone finds")
    ds.barrier()
"""


def test_what_rank_0_alone_finds_is_all_that_is_said(tmp_path):
    (tmp_path / "script.py").write_text(ALONE)
    words = [sys.executable, str(RANKS), "2", str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "error: what rank 0 alone finds\n")


@pytest.mark.parametrize(("given", "seconds"), [({}, LAST_SECONDS), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 7)])
def test_ranks_have_as_long_to_save_as_without_a_launcher(monkeypatch, given, seconds):
    found = []
    monkeypatch.setattr(run, "run", lambda args: found.append(run.config_from_args(args)[0].shutdown_timeout))
    monkeypatch.setattr(ranks.logging, "disable", lambda: None)
    with mock.patch.dict(os.environ, given):
        assert ranks.main(["2", "script.py"]) == 0
    assert found == [seconds]


def test_the_slurm_script_leaves_them_as_long():
    script = RANKS.with_name("slurm.sbatch").read_text()
    assert f"export HEAD_NODE OMP_NUM_THREADS=8 TORCH_ELASTIC_SHUTDOWN_TIMEOUT={LAST_SECONDS:.0f}\n" in script


def test_a_host_of_the_slurm_script_has_all_its_cpus_and_every_option(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, does in {
        "scontrol": "echo host-a",
        "srun": 'echo "$1 $2"; shift 2; SLURM_NODEID=1 "$@"',
        ".venv/bin/torchrun": 'printf "%s\\n" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    job = {
        "SUBMIT_DIR": str(tmp_path),
        "JOB_NODELIST": "host-[a-b]",
        "JOB_ID": "7",
        "NNODES": "2",
        "CPUS_PER_TASK": "32",
    }
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **{f"SLURM_{name}": value for name, value in job.items()}}
    words = ["bash", RANKS.with_name("slurm.sbatch"), "data.path=[a b.jsonl, c.jsonl]", "name=x"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    srun, *torchrun = done.stdout.splitlines()
    assert srun == "--kill-on-bad-exit=1 --cpus-per-task=32", done.stderr
    places = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "gpu",
        "--node-rank",
        "1",
        "--master-addr",
        "host-a",
        "--master-port",
    ]
    assert torchrun == [*places, "20007", "launch/train.py", "data.path=[a b.jsonl, c.jsonl]", "name=x"]


@pytest.mark.parametrize(
    ("visible", "command"), [("2,3", "launch/ranks.py 2 launch/train.py"), ("3", "launch/train.py")]
)
def test_make_train_takes_the_gpus_that_it_may_see(tmp_path, visible, command):
    (tmp_path / "torch.py").write_text(
        "import os\nclass cuda:\n    device_count = lambda: len(os.environ['CUDA_VISIBLE_DEVICES'].split(','))"
    )
    (tmp_path / "python").write_text(
        f'#!/bin/bash\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$CUDA_VISIBLE_DEVICES: $@"'
    )
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "deepspeed").symlink_to(tmp_path / "python")
    (tmp_path / "stamp").touch()
    env = os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": visible}
    words = ["make", "--no-print-directory", "train", f"BIN={tmp_path}", f"STAMP={tmp_path}/stamp", "ARGS=seed=1"]
    done = subprocess.run(words, cwd=RANKS.parents[1], env=env, capture_output=True, text=True)
    assert done.stdout == f"{visible}: {command} seed=1\n", done.stderr
