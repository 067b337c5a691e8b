import psutil
import pytest
import torch

from ctcdraft.model import load_base
from ctcdraft.model.base.context import Anchors
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.heads import CtcConfig, build_head, head_on
from ctcdraft.train.engine import OptimConfig, ZeroConfig
from ctcdraft.train.loop import Plan, TrainConfig
from ctcdraft.train.memory import memory_per_rank
from ctcdraft.train.task import ObjectiveConfig


@pytest.fixture(scope="module")
def fp32_base(base_folder):
    return load_base(str(base_folder))


def estimate(base, head, stage=0, ranks=1, precision="fp32"):
    train = TrainConfig(batch=2 * ranks, anchors=40, max_length=200, precision=precision)
    plan = Plan(head.config, ObjectiveConfig(labels=12), OptimConfig(), ZeroConfig(stage), train, DraftConfig(), seed=0)
    return memory_per_rank(base, head, plan, ranks)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"layers": 1}, {"slots": 16}, {"slots": 3, "transition": "full"}])
def test_what_the_backward_keeps_is_what_was_estimated(fp32_base, sizes, copied):
    config = CtcConfig(**sizes)
    head = head_on(fp32_base, config) if copied else build_head(config, fp32_base.hidden_size)
    behind = 0 if head.attended is None else head.attended.size
    hidden = torch.randn(2, 200, fp32_base.hidden_size + behind)
    root = torch.randn(2, 200, fp32_base.hidden_size)
    rows, at = torch.arange(80) // 40, torch.arange(80) % 40
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head(hidden, root, Anchors.of(rows, at, 2))
    ours = {p.untyped_storage().data_ptr() for p in [*head.parameters(), *fp32_base.model.parameters()]}
    measured = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in ours)
    parts = estimate(fp32_base, head)
    guess = parts["slots"] + parts["features"]
    assert measured <= guess <= 2 * measured, (measured, parts)


def test_zero_shares_what_it_says_among_ranks(fp32_base):
    head = head_on(fp32_base, CtcConfig())
    one = estimate(fp32_base, head)
    parts = ["optimizer", "gradients", "head weights"]
    for stage, shared in ((1, set(parts[:1])), (2, set(parts[:2])), (3, set(parts))):
        four = estimate(fp32_base, head, stage, 4)
        assert {part for part in one if four[part] == one[part] // 4 != one[part]} == shared
    count = sum(p.numel() for p in head.parameters())
    assert (one["head weights"], one["optimizer"]) == (4 * count, 8 * count)
    half = estimate(fp32_base, head, precision="bf16")
    assert (half["head weights"], half["optimizer"]) == (2 * count, 12 * count)


def test_the_optimizer_holds_what_is_said(small, tmp_path):
    trainer = small(tmp_path)
    held = sum(v.nbytes for state in trainer.engine.optimizer.state.values() for v in state.values() if v.dim())
    assert memory_per_rank(trainer.base, trainer.task.head, trainer.plan, 1)["optimizer"] == held


@pytest.mark.parametrize("zero", [["zero=1"], ["zero=2"], ["zero=3"], ["zero=3", "zero.offload=true"]])
def test_an_engine_reserves_no_more_than_a_small_head_needs(small, tmp_path, zero):
    small(tmp_path / "first", *zero)._one_step()  # what DeepSpeed loads once
    before = psutil.Process().memory_info().vms
    trainer = small(tmp_path / "again", *zero)
    trainer._one_step()
    assert psutil.Process().memory_info().vms - before < 200e6  # DeepSpeed's own bucket is 2 GB
