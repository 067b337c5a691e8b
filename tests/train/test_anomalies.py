import math

import pytest
import torch
from safetensors.torch import load_file
from trainers import Rows, head_weights

from ctcdraft.data.batches import Batch
from ctcdraft.model import folders
from ctcdraft.train import engine
from ctcdraft.train.anomalies import AnomalyChecks
from ctcdraft.train.task import DraftTask, base_features

pytestmark = pytest.mark.slow


def weights_and_moments(trainer):
    """Everything that a step may change, in whatever form the ZeRO stage keeps it."""
    return held([trainer.step.engine.optimizer.state_dict(), head_weights(trainer)])


def held(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: held(item) for key, item in value.items()}
    return [held(item) for item in value] if isinstance(value, list | tuple) else value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in ("overflow", "param_groups"))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or a is b or type(a) is type(b)


def poisoned(monkeypatch, where, value=math.nan, times=1):
    """From the next forward on, `times` of them give a loss or a gradient that is not finite."""
    forward, left = DraftTask.forward, [times]

    def spoilt(self, hidden, roots, batch):
        loss, metrics = forward(self, hidden, roots, batch)
        left[0] -= 1
        if left[0] < 0:
            return loss, metrics
        if where == "loss":
            return loss + value, metrics._replace(loss=metrics.loss + value)
        loss.register_hook(lambda gradient: gradient * value)
        return loss, metrics

    monkeypatch.setattr(DraftTask, "forward", spoilt)


STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (2, "bf16"), (3, "bf16")]


@pytest.fixture(scope="module")
def rate(small, tmp_path_factory):
    """The learning rate behind three sound steps, of whatever stage."""
    trainer = small(tmp_path_factory.mktemp("good"))
    for _ in range(3):
        trainer._one_step()
    return trainer.step.engine.get_lr()


@pytest.mark.parametrize(("stage", "precision"), STAGES)
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_but_the_learning_rate(
    small, rate, tmp_path, monkeypatch, stage, precision, where
):
    trainer = small(tmp_path, f"zero={stage}", f"train.precision={precision}", "train.max_skips=3")
    for _ in range(2):
        trainer._one_step()
    before = weights_and_moments(trainer)
    poisoned(monkeypatch, where)
    row = trainer._one_step()
    assert same(before, weights_and_moments(trainer))
    assert trainer.step.engine.get_lr() == rate
    assert (trainer.state.skipped, trainer.state.in_a_row, row["train/skipped"]) == (1, 1, 1)
    assert ("train/loss" in row) == (where == "gradient")
    assert "optim/grad_norm" not in row
    row = trainer._one_step()
    assert not same(before, weights_and_moments(trainer)), "the step after trains again"
    assert math.isfinite(row["train/loss"])
    assert (trainer.state.skipped, trainer.state.in_a_row) == (1, 0)


def test_accumulation_with_one_bad_micro_batch_skips_the_whole_step(small, tmp_path, monkeypatch):
    trainer = small(tmp_path, "train.micro_batch=1")
    trainer._one_step()
    before = weights_and_moments(trainer)
    poisoned(monkeypatch, "loss")
    trainer._one_step()
    assert same(before, weights_and_moments(trainer))
    assert len(load_skipped(next((tmp_path / "skipped").iterdir()))) == trainer.step.accumulate == 4


def load_skipped(path):
    """The micro-batches of a skipped step."""
    tensors = load_file(path)
    turns = sorted({int(name.split(".")[0]) for name in tensors})
    return [Batch(*(tensors.get(f"{turn}.{name}") for name in Batch._fields)) for turn in turns]


def test_the_batch_of_a_skipped_step_can_be_replayed(small, tmp_path, monkeypatch):
    trainer = small(tmp_path)
    with monkeypatch.context() as spoilt:
        poisoned(spoilt, "loss")
        trainer._one_step()
    (batch,) = load_skipped(tmp_path / "skipped" / "step_000001_rank0.safetensors")
    want = trainer.step.sampler.collate(0, slice(0, 4))
    pairs = list(zip(batch, want, strict=True))
    assert all(a is b if b is None else torch.equal(a, b) for a, b in pairs)
    assert any(b is not None for _, b in pairs)
    loss, _ = trainer.step.task(*base_features(trainer.base, batch, torch.float32, trainer.step.task.head), batch)
    assert torch.isfinite(loss)


def test_too_many_in_a_row_end_the_run_with_a_sentence(small, tmp_path, monkeypatch):
    trainer, rows = small(tmp_path, "train.max_skips=3"), Rows()
    poisoned(monkeypatch, "loss", times=99)
    with pytest.raises(ValueError, match=r"3 steps in a row, up to step 3, .* lower optim.lr \(now 0.001\)"):
        trainer.run(rows)
    assert [sentence.split(":")[0] for sentence in rows.alerts] == [f"step {n} is skipped" for n in (1, 2, 3)]
    assert [row["step"] for row in rows] == [1, 2]


def test_a_batch_for_which_the_disk_has_no_room_is_one_sentence(small, tmp_path, monkeypatch):
    def fill(*_):
        raise OSError("No space left on device")

    poisoned(monkeypatch, "loss", times=1)
    monkeypatch.setattr(folders, "sync", fill)
    with pytest.raises(OSError, match=r"skipped/.* could not be written \(No space left on device\): make room"):
        small(tmp_path).run(None)


def test_skips_that_are_not_in_a_row_do_not(small, tmp_path, monkeypatch):
    forward, calls = DraftTask.forward, [0]

    def every_other(self, *given):
        loss, metrics = forward(self, *given)
        calls[0] += 1
        return (loss * math.nan if calls[0] % 2 else loss), metrics

    monkeypatch.setattr(DraftTask, "forward", every_other)
    trainer = small(tmp_path, "train.max_skips=2")
    trainer.run(None)
    assert (trainer.state.step, trainer.state.skipped) == (6, 3)


def row(step, loss, blank=0.3):
    return {"step": step, "train/loss": loss, "draft/blank_rate/slot_1": blank, "draft/blank_rate/slot_2": blank}


def test_a_loss_spike_is_told_once_with_advice():
    checks = AnomalyChecks()
    losses = [7.0, 6.0, 5.0, 4.0, 3.5, 3.4, 3.3, 9.0, 9.5, 9.2, 9.4, 3.2, 3.3]
    told = [checks.warnings(row(i + 1, loss)) for i, loss in enumerate(losses)]
    assert [i + 1 for i, sentences in enumerate(told) if sentences] == [10]
    assert told[9][0].startswith("the loss jumped to 9.000 and stayed there for 3 logged steps, up to step 10")
    assert "(before: about 4.000): lower optim.lr" in told[9][0]


def test_a_falling_or_noisy_loss_is_no_spike():
    checks, generator = AnomalyChecks(), torch.Generator().manual_seed(0)
    noise = torch.randn(300, generator=generator).tolist()
    assert not any(checks.warnings(row(i, 7 / (1 + i / 30) + 0.1 * n + 1)) for i, n in enumerate(noise))


def test_the_losses_of_unlike_batches_are_no_spike():
    checks = AnomalyChecks()
    seen = [5.22, 3.84, 6.51, 4.96, 3.96, 5.32, 6.48, 3.5, 2.11, 2.37, 4.07, 4.52, 3.1, 2.38, 3.09, 5.2, 1.55, 5.04]
    seen += [3.92, 3.57, 2.36, 2.89, 4.94, 1.01, 2.41, 2.27, 3.09, 2.89, 2.64, 3.07, 0.65, 7.13, 1.71, 6.0, 3.11, 1.77]
    assert not any(checks.warnings(row(i, loss)) for i, loss in enumerate(seen))


def test_a_head_that_collapses_to_blanks_is_told_once_with_advice():
    checks = AnomalyChecks()
    told = [checks.warnings(row(i, 3.0, b)) for i, b in enumerate([0.5, 0.9, 0.96, 0.99, 0.94, 0.97, 0.5, 0.98])]
    assert [bool(t) for t in told] == [False, False, True, False, False, False, False, True]
    assert "the head writes blanks into 96% of its slots" in told[2][0]
    assert not AnomalyChecks(blanks=False).warnings(row(1, 3.0, 0.99))  # a band has the other slots write


def test_warnings_reach_the_screen(small, tmp_path, capsys):
    trainer = small(tmp_path, "train.steps=2", "head.band=null")
    with torch.no_grad():
        trainer.step.task.head.blank.bias.fill_(50.0)
    trainer.run(None)
    assert "warning: the head writes blanks into 100% of its slots at step 1" in capsys.readouterr().err


def test_two_deterministic_runs_are_the_same_bits_and_say_so_to_torch(small, tmp_path):
    was = torch.are_deterministic_algorithms_enabled()
    try:
        runs = []
        for name in ("a", "b"):
            engine.make_deterministic(0)
            torch.rand(3)  # what came before must not matter
            trainer, rows = small(tmp_path / name, "train.deterministic=true"), Rows()
            trainer.run(rows)
            figures = [{k: v for k, v in r.items() if not k.startswith(("perf/", "time/"))} for r in rows]
            runs.append((figures, head_weights(trainer)))
        assert torch.are_deterministic_algorithms_enabled()
        assert runs[0][0] == runs[1][0]
        assert all(torch.equal(weight, runs[1][1][name]) for name, weight in runs[0][1].items())
        other, rows = small(tmp_path / "c", "seed=1"), Rows()
        other.run(rows)
        assert rows[0]["train/loss"] != runs[0][0][0]["train/loss"]
    finally:
        torch.use_deterministic_algorithms(was)
