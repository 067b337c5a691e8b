import json
import time
import timeit

import pytest
import torch
from bases import write_base

from ctcdraft.launch import pipeline, runs
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model import load_base
from ctcdraft.model.load import precision
from ctcdraft.model.load.precision import resolve_dtype


@pytest.fixture
def machine(monkeypatch):
    """make(has bf16 units, measured speedup) -> how often it was measured."""
    measured = []

    def make(units, speedup):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda: units)
        monkeypatch.setattr(precision, "bf16_speedup", lambda: measured.append(speedup) or speedup)
        return measured

    return make


@pytest.mark.parametrize(
    ("units", "speedup", "dtype"), [(True, 2.4, "bf16"), (True, 1.3, "bf16"), (True, 1.29, "fp32"), (False, 9, "fp32")]
)
def test_auto_is_bf16_where_the_cpu_has_it_and_is_faster_in_it(machine, tmp_path, units, speedup, dtype):
    machine(units, speedup)
    assert resolve_dtype("auto", tmp_path) == dtype


def test_a_name_is_taken_as_it_is_and_nothing_is_measured(machine, tmp_path):
    measured = machine(True, 9)
    assert [resolve_dtype(name, tmp_path) for name in ("fp32", "bf16", "fp64")] == ["fp32", "bf16", "fp64"]
    assert measured == []


def test_it_is_measured_once_for_all_processes_that_share_a_cache(machine, tmp_path):
    measured = machine(True, 2.0)
    assert resolve_dtype("auto", tmp_path) == "bf16"
    machine(True, 1.0)  # a busy moment later
    assert resolve_dtype("auto", tmp_path) == "bf16"
    assert measured == [2.0]
    record = next(tmp_path.glob("bf16-*.json"))
    assert json.loads(record.read_text())["speedup"] == 2.0
    for damaged in ("{", '{"bf16_speedup": 2.0}'):  # as it was before it was measured for a second
        record.write_text(damaged)
        assert resolve_dtype("auto", tmp_path) == "fp32"


def test_cuda_is_bf16_where_it_has_it(machine, tmp_path, monkeypatch):
    measured = machine(True, 1.0)
    for has, dtype in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has: has)
        assert resolve_dtype("auto", tmp_path, "cuda:0") == dtype
    assert measured == []


def test_the_measurement_is_a_ratio():
    assert 0.01 < precision.bf16_speedup() < 100


@pytest.mark.skipif(not precision.cpu_has_bf16(), reason="this CPU has no units for bfloat16, and emulates it slowly")
def test_a_busy_moment_does_not_decide(monkeypatch):
    begun, product = time.perf_counter(), torch.mm

    def interrupted(*factors):
        if factors[0].dtype == torch.bfloat16 and time.perf_counter() - begun < precision.SECONDS / 2:
            time.sleep(0.05)
        return product(*factors)

    monkeypatch.setattr(torch, "mm", interrupted)
    seconds = min(timeit.repeat(lambda: product(torch.ones(128, 576), torch.ones(576, 1536)), number=1, repeat=20))
    begun, threads = time.perf_counter(), torch.get_num_threads()
    assert precision.bf16_speedup() > 2 * seconds / 0.05
    assert torch.get_num_threads() == threads


def test_a_run_is_named_and_recorded_with_the_dtype_that_auto_came_to(machine, tmp_path):
    write_base(tmp_path / "base")
    common = [f"base.path={tmp_path}/base", f"runs_dir={tmp_path}/runs", f"cache_dir={tmp_path}/cache"]
    machine(True, 2.0)
    auto, bf16, fp32 = (
        pipeline.with_resolved_dtype(typed(compose("train", ["base=local", *common, *words]), TrainEntry))
        for words in ([], ["base.dtype=bf16"], ["base.dtype=fp32"])
    )
    assert auto == bf16
    assert runs.check_inputs(auto) == runs.check_inputs(bf16) != runs.check_inputs(fp32)
    base = pipeline.get_base(auto)
    runs.open_run(tmp_path / "run", auto, base, tmp_path / "data")
    assert base.dtype == torch.bfloat16
    assert runs.run_paths(tmp_path / "run")["dtype"] == "bf16"
    assert load_base(base.path, "auto", cache=tmp_path / "cache").dtype == torch.bfloat16
