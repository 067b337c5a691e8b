import subprocess
import sys
from unittest.mock import Mock

import psutil
import pytest
import torch


@pytest.mark.parametrize("zero", [["zero=1"], ["zero=2"], ["zero=3"], ["zero=3", "zero.offload=true"]])
def test_an_engine_reserves_no_more_than_a_small_head_needs(small, tmp_path, zero):
    small(tmp_path / "first", *zero)._one_step()  # what DeepSpeed loads once
    before = psutil.Process().memory_info().vms
    trainer = small(tmp_path / "again", *zero)
    trainer._one_step()
    assert psutil.Process().memory_info().vms - before < 200e6  # DeepSpeed's own bucket is 2 GB


def test_muon_is_not_compiled_for_an_engine_that_does_without(small, tmp_path, monkeypatch):
    for name in ("muon_optimizer", "original_muon"):  # which DeepSpeed imports where it shares anything out
        monkeypatch.delitem(sys.modules, f"deepspeed.runtime.zero.muon.{name}", raising=False)
    monkeypatch.setattr(torch, "compile", Mock(side_effect=lambda function: function))
    small(tmp_path, "zero=1")
    assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules
    assert not torch.compile.called


@pytest.mark.slow
def test_peak_memory_is_that_of_this_process_and_not_of_the_one_that_started_it():
    held = bytearray(2 << 30)  # of this one, which starts the other
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    script = "from ctcdraft.train.engine import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 1 << 27 < int(done.stdout) < 1 << 31
