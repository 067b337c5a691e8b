"""Runs that go on with another number of ranks: whole processes, a sitting each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainers import TOLERANCE, write_inputs

pytestmark = pytest.mark.slow

HELPERS = Path(__file__).parents[1] / "helpers"
RUNS = {f"zero{stage}": f"zero={stage}" for stage in (1, 2, 3)} | {"offload": "zero=2,zero.offload=true"}


def sitting(work, ranks, last, runs):
    words = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", str(ranks), "--standalone"]
    words += [
        str(HELPERS / "trainers.py"),
        str(work),
        str(last),
        *(f"{name}={options}" for name, options in runs.items()),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rows(work, name):
    return [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_inputs(folder)
    sitting(folder, 1, 6, {"calm": "zero=0"})
    return folder


def test_one_two_and_one_rank_continue_each_other_under_every_zero_stage(work):
    said = [sitting(work, ranks, last, RUNS) for ranks, last in ((1, 2), (2, 4), (1, 6))]
    assert said[1].count("step_000002 was saved by 1 ranks, 2 go on with the same batches") == len(RUNS)
    assert said[2].count("step_000004 was saved by 2 ranks, 1 go on with the same batches") == len(RUNS)
    for name in RUNS:
        found = rows(work, name)
        assert [row["perf/ranks"] for row in found] == [1, 1, 2, 2, 1, 1]
        for row, calm in zip(found, rows(work, "calm"), strict=True):
            for same in ("step", "train/tokens", "optim/lr", "train/infeasible"):
                assert row[same] == calm[same]
            for near in ("train/loss", "optim/grad_norm"):
                assert abs(row[near] - calm[near]) < TOLERANCE * abs(calm[near]), (name, row["step"], near)
