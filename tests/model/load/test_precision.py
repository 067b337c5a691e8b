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
    """make(has bf16 units): without a GPU."""

    def make(units):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda: units)

    return make


@pytest.mark.parametrize(("units", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_cpu_has_units_for_it(machine, units, dtype):
    machine(units)
    assert resolve_dtype("auto") == resolve_dtype("auto", "cpu") == dtype


def test_a_name_is_taken_as_it_is(machine):
    machine(True)
    assert [resolve_dtype(name) for name in ("fp32", "bf16", "fp64")] == ["fp32", "bf16", "fp64"]


def test_cuda_is_bf16_where_it_has_it(machine, monkeypatch):
    machine(True)
    for has, dtype in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has: has)
        assert resolve_dtype("auto", "cuda:0") == dtype


def test_a_run_is_named_and_recorded_with_the_dtype_that_auto_came_to(machine, tmp_path):
    write_base(tmp_path / "base")
    common = [f"base.path={tmp_path}/base", f"runs_dir={tmp_path}/runs", f"cache_dir={tmp_path}/cache"]
    machine(True)
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
