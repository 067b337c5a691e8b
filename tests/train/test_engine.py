import gc
import subprocess
import sys
import weakref
from unittest.mock import Mock

import psutil
import pytest
import torch
from commands import run

TWICE = """
import deepspeed
import torch
from ctcdraft.train.engine import together

for _ in range(2):
    with together():
        model = torch.nn.Linear(1, 1, bias=False)
        options = {"optimizer": torch.optim.SGD(model.parameters()), "config": {"train_micro_batch_size_per_gpu": 1}}
        engine, *_ = deepspeed.initialize(model=model, **options)
        engine.backward(engine(torch.ones(1, 1)).sum())
        print(model.weight.grad.item())
"""

SWEEP = """
import time
import torch.distributed as dist
from ctcdraft.train.engine import rank, together

for _ in range(2):
    with together():
        met = dist.distributed_c10d._get_default_store().add("ranks", 1)
        print(f"{met}\\n", end="")  # in one piece: ranks share the stream
    if rank() == 0:
        time.sleep(2)  # it exports and evaluates; the others are at the next job
"""


@pytest.mark.parametrize("zero", [["zero=1"], ["zero=2"], ["zero=3"], ["zero=3", "zero.offload=true"]])
def test_an_engine_reserves_no_more_than_a_small_head_needs(small, tmp_path, zero):
    small(tmp_path / "first", *zero)._one_step()  # what DeepSpeed loads once
    before = psutil.Process().memory_info().vms
    trainer = small(tmp_path / "again", *zero)
    trainer._one_step()
    assert psutil.Process().memory_info().vms - before < 200e6  # DeepSpeed's own bucket is 2 GB


@pytest.mark.parametrize("zero", ["zero=0", "zero=1", "zero=2"])
def test_a_trainer_that_is_closed_leaves_nothing_for_the_next_job_of_a_sweep_to_make_room_for(small, tmp_path, zero):
    trainer = small(tmp_path, zero)
    trainer._one_step()
    task = weakref.ref(trainer.step.task)
    trainer.close()
    del trainer
    gc.collect()
    assert task() is None


def test_muon_is_not_compiled_for_an_engine_that_does_without(small, tmp_path, monkeypatch):
    for name in ("muon_optimizer", "original_muon"):  # which DeepSpeed imports where it shares anything out
        monkeypatch.delitem(sys.modules, f"deepspeed.runtime.zero.muon.{name}", raising=False)
    monkeypatch.setattr(torch, "compile", Mock(side_effect=lambda function: function))
    small(tmp_path, "zero=1")
    assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules
    assert not torch.compile.called


@pytest.mark.slow
def test_one_process_trains_again_and_again(tmp_path):
    """As Hydra's --multirun does."""
    (tmp_path / "twice.py").write_text(TWICE)
    done = run([tmp_path / "twice.py"], cwd=tmp_path)
    assert done.stdout.split() == ["1.0", "1.0"], done.stderr


@pytest.mark.slow
def test_ranks_of_a_sweep_meet_for_each_job_where_nothing_is_left_of_the_one_before(tmp_path):
    (tmp_path / "sweep.py").write_text(SWEEP)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "sweep.py"]
    done = subprocess.run(words, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == ["1", "1", "2", "2"], done.stderr


@pytest.mark.slow
def test_peak_memory_is_that_of_this_process_and_not_of_the_one_that_started_it():
    held = bytearray(2 << 30)  # of this one, which starts the other
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    script = "from ctcdraft.train.engine import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 1 << 27 < int(done.stdout) < 1 << 31
