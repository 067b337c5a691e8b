import pytest
import torch
from trainers import TOLERANCE

from ctcdraft.train import zero
from ctcdraft.train.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.slow


def state_of(trainer):
    return zero.whole_state(trainer.step.engine)


def stepped(trainer, steps):
    for _ in range(steps):
        trainer._one_step()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        ["zero=0"],
        ["zero=1"],
        ["zero=2"],
        ["zero=3"],
        ["zero=3", "head=mlp", "objective=cross_entropy"],
        ["zero=3", "head=glide", "objective=cross_entropy"],
        ["zero=2", "train.precision=bf16"],
        ["zero=2", "zero.offload=true"],
        ["zero=3", "zero.offload=true"],
    ],
)
def test_what_is_restored_is_what_was_saved_and_the_next_steps_are_the_same_bits(small, tmp_path, options):
    trainer = stepped(small(tmp_path, *options), 3)
    save_checkpoint(trainer.step.engine, trainer.checkpoints, trainer.state)
    again = small(tmp_path, *options)
    before, after = state_of(trainer), state_of(again)
    assert before.keys() == after.keys() == zero.shapes_of(again.step.engine).keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert before["updates"] == 3
    assert all(before[f"exp_avg/{name}"].any() for name, _ in trainer.step.task.named_parameters())
    stepped(trainer, 2)
    stepped(again, 2)
    assert again.step.engine.get_lr() == trainer.step.engine.get_lr()
    assert all(torch.equal(value, state_of(again)[name]) for name, value in state_of(trainer).items())


@pytest.mark.parametrize(("old", "new"), [(0, 3), (3, 0), (1, 2), (2, 3)])
def test_another_zero_stage_goes_on_with_the_same_state(small, tmp_path, old, new):
    trainer = stepped(small(tmp_path, f"zero={old}"), 3)
    save_checkpoint(trainer.step.engine, trainer.checkpoints, trainer.state)
    again = small(tmp_path, f"zero={new}")
    assert all(torch.equal(value, state_of(again)[name]) for name, value in state_of(trainer).items())
    stepped(trainer, 2)
    stepped(again, 2)
    for name, value in state_of(trainer).items():
        assert torch.allclose(value, state_of(again)[name], atol=1e-6), name


def test_without_its_moments_a_run_goes_on_elsewhere(small, tmp_path):
    """The control of the tests above, and of those over ranks: weights alone are not the state."""
    trainer = stepped(small(tmp_path, "optim.lr=0.02"), 3)
    save_checkpoint(trainer.step.engine, trainer.checkpoints, trainer.state)
    again = small(tmp_path, "optim.lr=0.02")
    for state in zero.optimizer_of(again.step.engine).state.values():
        for name in state.keys() - {"step"}:
            state[name].zero_()
    rows = [(trainer._one_step(), again._one_step()) for _ in range(2)]
    assert rows[0][0]["train/loss"] == rows[0][1]["train/loss"], "the same weights"
    want, found = (row["train/loss"] for row in rows[1])
    assert abs(found - want) > 100 * TOLERANCE * want


def test_a_skipped_first_step_leaves_state_that_can_be_saved(small, tmp_path):
    for stage in (0, 1, 3):
        trainer = small(tmp_path / str(stage), f"zero={stage}")
        save_checkpoint(trainer.step.engine, trainer.checkpoints, trainer.state)
        assert load_checkpoint(small(tmp_path / "fresh", f"zero={stage}").step.engine, trainer.checkpoints)[0].step == 0
