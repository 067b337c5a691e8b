"""The trainer as users start it: whole processes, each a few seconds."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from bases import write_base
from commands import free_port, run
from safetensors.torch import load_file
from wandb_file import history

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FIGURES = {  # that a run logs
    *("train/loss", "train/infeasible", "train/skipped", "optim/grad_norm", "optim/lr"),
    *("dev/tokens_per_step", "draft/psi_sum"),
    *("draft/blank_rate/slot_1", "draft/blank_rate/slot_2", "draft/blank_rate/slot_3"),
    *("perf/tokens_per_second", "perf/step_seconds", "perf/peak_memory_gb"),
    *("time/data", "time/base", "time/head", "time/backward", "time/optimizer"),
}
SIZES = ["bench.questions=2"]
SMALL = ["experiment=smoke", "base=local", "logger=none", "train.steps=6", "train.save_every=2", *SIZES]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_base(folder / "base", eos_token_id=1, initializer_range=0.05)
    rows = [
        {"conversations": [{"from": "human", "value": f"question {i}"}, {"from": "gpt", "value": "x"}]}
        for i in range(24)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


def command(workplace, *options):
    paths = [f"base.path={workplace}/base", "data=sharegpt", f"data.path={workplace}/rows.json"]
    return [str(ROOT / "launch" / "train.py"), *SMALL, *paths, *options]


def start(workplace, *options, **env):
    done = run(command(workplace, *options), cwd=workplace, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(workplace, name):
    rows = [json.loads(line) for line in (workplace / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["train/loss"], row["optim/lr"]) for row in rows}


def weights(workplace, name):
    return load_file(workplace / "runs" / name / "head" / "model.safetensors")


@pytest.fixture(scope="module")
def one_process(workplace):
    out = start(workplace, "name=one")
    return out, losses(workplace, "one")


def test_a_run_leaves_everything_that_the_design_names(workplace, one_process):
    out, found = one_process
    run = workplace / "runs" / "one"
    for path in ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints/latest", "checkpoints/step_000006"):
        assert (run / path).exists(), path
    for path in ("config.json", "model.safetensors", "README.md"):
        assert (run / "head" / path).is_file()
    for path in ("results.json", "report.md", "answers.jsonl", "accepted_by_depth.png", "calibration.png"):
        assert (run / "eval" / "heldout" / path).is_file()
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["train"]["batch"] == 4
    assert "identical to plain decoding" in out
    assert "parameters; the base has" in out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for key in ("optim/grad_norm", "draft/psi_sum", "draft/blank_rate/slot_1", "time/base"):
        assert rows[0][key] is not None
    assert rows[-1]["dev/tokens_per_step"] >= 1.0


def test_the_same_command_again_reuses_everything(workplace, one_process):
    before = (workplace / "runs" / "one" / "head" / "model.safetensors").stat().st_mtime_ns
    out = start(workplace, "name=one")
    assert "(reused; 6 steps" in out
    assert "prepared" not in out
    assert losses(workplace, "one") == one_process[1]
    assert (workplace / "runs" / "one" / "head" / "model.safetensors").stat().st_mtime_ns >= before


def test_a_killed_run_resumes_to_the_same_weights_bit_for_bit(workplace, one_process):
    words = [sys.executable, *command(workplace, "name=killed", "train.steps=6")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=workplace, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = workplace / "runs" / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    start(workplace, "name=killed")
    assert losses(workplace, "killed") == one_process[1]
    rows = metrics.read_text().splitlines()
    assert len(rows) == 6
    for name, weight in weights(workplace, "killed").items():
        assert torch.equal(weight, weights(workplace, "one")[name])


def test_sigterm_saves_and_the_same_command_goes_on(workplace):
    words = command(workplace, "name=asked,never", "train.steps=400", "train.eval_every=400", "train.save_every=400")
    words = [sys.executable, *words, "--multirun"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=workplace, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = workplace / "runs" / "asked" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    step = int(re.search(r"stopped at step (\d+)", out)[1])
    assert (workplace / "runs" / "asked" / "checkpoints" / "latest").read_text() == f"step_{step:06d}"
    assert not (workplace / "runs" / "asked" / "head").exists()
    assert not (workplace / "runs" / "never").exists()  # the sweep ends with it


def test_a_time_limit_ends_with_an_evaluated_head(workplace):
    out = start(workplace, "name=timed", "train.steps=100000", "train.max_minutes=0.02", "train.eval_every=100000")
    assert "identical to plain decoding" in out


def test_the_deepspeed_launcher_starts_it(workplace, one_process):
    programs = Path(sys.executable).parent
    words = [programs / "deepspeed", "--num_gpus", "1", "--master_port", str(free_port())]
    words += command(workplace, "name=launched")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=workplace, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(workplace, "launched") == one_process[1]


def test_wandb_offline_holds_the_same_rows(workplace):
    out = start(workplace, "name=logged", "logger=wandb", WANDB_API_KEY="", WANDB_MODE="offline")
    assert "logging offline" in out
    (file,) = (workplace / "runs" / "logged" / "wandb").glob("offline-run-*/run-*.wandb")
    rows = [row for row in history(file) if "train/loss" in row]
    want = [json.loads(line) for line in (workplace / "runs" / "logged" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in want]
    assert [row["_step"] for row in rows] == [row["step"] for row in want]
    assert {"draft/psi_sum", "optim/lr", "perf/tokens_per_second", "time/head"} <= set(rows[0])
    assert {key for row in rows for key in row} >= FIGURES
    tail = [row for row in history(file) if any(key.startswith("eval/table") for key in row)]
    assert len(tail) == 1
    assert any(key.startswith("plots/calibration") for key in tail[0])


def test_another_configuration_under_the_same_name_is_refused(workplace, one_process):
    done = refused(workplace, "name=one", "optim.lr=0.5")
    assert done.returncode != 0
    assert "runs/one is a run with optim.lr=0.001, this one is with optim.lr=0.5" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def entry(workplace, script, options):
    return run([ROOT / "launch" / script, *options], cwd=workplace)


def test_a_run_is_evaluated_by_name_on_other_questions(workplace, one_process):
    questions = workplace / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "x", "turns": ["hello", "again"]}))
    bench = ["bench=mt_bench", f"bench.path={questions}", "bench.max_new_tokens=8", "logger=none"]
    done = entry(workplace, "eval.py", ["name=one", *bench, "draft=chain"])
    assert done.returncode == 0, done.stderr
    results = json.loads((workplace / "runs" / "one" / "eval" / "mt_bench" / "results.json").read_text())
    assert results["decoder"]["kind"] == "chain"
    assert results["identical"]["identical"] == results["identical"]["compared"] == 2


def test_export_writes_the_head_elsewhere_and_it_evaluates_there(workplace, one_process):
    (workplace / "renamed").symlink_to(workplace / "base")  # a base goes by what it is, not by its name
    done = entry(workplace, "export.py", ["name=one", "base.path=renamed", "output=shipped/head"])
    assert done.returncode == 0, done.stderr
    shipped = load_file(workplace / "shipped" / "head" / "model.safetensors")
    assert all(torch.equal(weight, shipped[name]) for name, weight in weights(workplace, "one").items())
    bench = ["bench=toy", "bench.questions=1", "bench.max_new_tokens=4", "logger=none"]
    done = entry(workplace, "eval.py", ["head.path=shipped/head", f"base.path={workplace}/base", *bench])
    assert done.returncode == 0, done.stderr
    assert (workplace / "shipped" / "eval" / "toy" / "results.json").is_file()


def test_a_truncated_head_is_one_sentence_and_writes_nothing(workplace, one_process):
    entry(workplace, "export.py", ["name=one", "output=cut/head"])
    path = workplace / "cut" / "head" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    done = entry(workplace, "eval.py", ["head.path=cut/head", f"base.path={workplace}/base", "bench=toy"])
    assert done.returncode == 1
    assert done.stderr == "error: cut/head/model.safetensors is damaged (checksum differs): export the head again\n"
    assert not (workplace / "cut" / "eval").exists()


def test_bad_data_leaves_no_run_behind(workplace):
    (workplace / "bad.json").write_text('[{"conversations": [{"from": "gpt", "value": "me first"}]}]')
    done = refused(workplace, "name=bad", "data.path=bad.json")
    assert done.returncode == 1
    assert "of 1 rows none gave a train sequence; 1 rejected (1 of them: starts with the assistant" in done.stderr
    assert not (workplace / "runs" / "bad").exists()


def refused(workplace, *options):
    return run(command(workplace, *options), cwd=workplace)


def test_a_base_whose_content_changed_is_refused(workplace, one_process, tmp_path):
    (workplace / "base").rename(tmp_path / "base")
    write_base(workplace / "base", seed=7, eos_token_id=1, initializer_range=0.05)
    done = refused(workplace, "name=one")
    shutil.rmtree(workplace / "base")
    (tmp_path / "base").rename(workplace / "base")
    assert done.returncode == 1
    assert "whose content has changed since" in done.stderr


def test_a_diverging_run_stops_with_advice(workplace):
    done = refused(workplace, "name=wild", "optim.lr=1e30", "train.max_skips=3")
    assert done.returncode == 1
    assert re.search(r"error: 3 steps in a row, up to step \d, gave .* not finite: lower optim.lr", done.stderr)
    assert len(list((workplace / "runs" / "wild" / "skipped").glob("step_*_rank0.safetensors"))) == 3
    assert not (workplace / "runs" / "wild" / "head").exists()


POISON = """
import os, runpy, sys
from ctcdraft.train.task import DraftTask

forward, calls = DraftTask.forward, [0]

def spoilt(self, *given):
    loss, metrics = forward(self, *given)
    calls[0] += 1
    return (loss * float("nan") if calls[0] == 3 and os.environ["RANK"] == "1" else loss), metrics

DraftTask.forward = spoilt
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("stage", [0, 3])
def test_a_nan_on_one_rank_skips_the_step_on_all(workplace, stage):
    (workplace / "poison.py").write_text(POISON)
    words = [workplace / "poison.py", *command(workplace, f"name=nan{stage}", f"zero={stage}")]
    done = run(words, cwd=workplace, ranks=2)
    assert done.returncode == 0, done.stderr
    folder = workplace / "runs" / f"nan{stage}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/skipped"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert "train/loss" in rows[3]
    names = sorted(path.name for path in (folder / "skipped").iterdir())
    assert names == ["step_000003_rank0.safetensors", "step_000003_rank1.safetensors"]


DAMAGE = {
    "config.yaml": "run: [",
    "paths.json": "{}",
    "checkpoints/latest": "rubbish",
    "checkpoints/step_000006/manifest.json": '{"foo": 6}',
    "checkpoints/step_000006/state.safetensors": "x",
    "head/config.json": '{"format": 1}',
    "eval/heldout/results.json": "[]",
    "metrics.jsonl": "rubbish\n",
}


@pytest.mark.parametrize("path", DAMAGE)
def test_a_damaged_run_folder_is_mended_or_one_sentence(workplace, one_process, path):
    run = workplace / "runs" / f"damaged-{path.replace('/', '-')}"
    shutil.copytree(workplace / "runs" / "one", run)
    (run / path).write_text(DAMAGE[path])
    done = refused(workplace, f"name={run.name}")
    assert "Traceback" not in done.stderr
    if done.returncode:
        (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert path in error
    else:
        assert "identical to plain decoding" in done.stdout
