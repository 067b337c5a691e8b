import json
import os
import resource
import shutil

import pytest
import torch

from ctcdraft.train import checkpoint, engine, files, loop


class Rows(list):
    """A log that keeps what is written to it."""

    write = list.append
    __bool__ = lambda self: True  # noqa: E731

    def sync(self):
        """Nothing is on a disk here."""


def trained(make, folder, *options):
    """A run's trainer after its last step, and its logged rows."""
    trainer, rows = make(folder, *options), Rows()
    trainer.run(rows)
    return trainer, rows


def head_of(trainer):
    return engine.head_state(trainer.engine, trainer.task.head)


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, *trained(small, folder)


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "run")


def test_a_checkpoint_lists_the_checksums_of_all_its_files(whole):
    step = whole[0] / "checkpoints" / "step_000006"
    facts = json.loads((step / "manifest.json").read_text())
    there = {str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(facts["files"]) == there
    assert facts["ranks"] == 1
    assert facts["state"]["step"] == 6
    assert files.unsealed(step) is None


def test_only_the_newest_are_kept(small, whole, tmp_path):
    assert sorted(p.name for p in (whole[0] / "checkpoints").glob("step_*")) == ["step_000004", "step_000006"]
    trained(small, tmp_path, "train.keep=1")
    assert [p.name for p in (tmp_path / "checkpoints").glob("step_*")] == ["step_000006"]
    assert (tmp_path / "checkpoints" / "best.safetensors").is_file()


DAMAGE = {
    "a changed byte": lambda p: p.write_bytes(p.read_bytes()[:-9] + b"x" + p.read_bytes()[-8:]),
    "half a file": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "a missing file": lambda p: p.unlink(),
    "no manifest": lambda p: (p.parent / "manifest.json").unlink(),
    "half a manifest": lambda p: (p.parent / "manifest.json").write_text('{"files": {'),
    "a file too many": lambda p: (p.parent / "evil.pt").write_bytes(b"x"),
    "a link to elsewhere": lambda p: (p.rename(p.parent.parent / "moved.pt"), p.symlink_to("../moved.pt")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_gives_the_same_run(
    small, whole, copy, damage, capsys, monkeypatch
):
    DAMAGE[damage](next((copy / "checkpoints" / "step_000006").glob("*.pt")))
    opened = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda path, *a, **k: (opened.append(str(path)), load(path, *a, **k))[1])
    trainer, rows = trained(small, copy)
    assert "warning: checkpoint" in capsys.readouterr().err
    assert opened
    assert all("step_000004" in path for path in opened), "a pickle was opened whose checksum is wrong"
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in whole[2][4:]]
    for name, weight in head_of(trainer).items():
        assert torch.equal(weight, head_of(whole[1])[name])
    assert files.unsealed(copy / "checkpoints" / "step_000006") is None


def test_a_run_whose_checkpoints_are_all_damaged_is_one_sentence(small, copy):
    for manifest in copy.glob("checkpoints/step_*/manifest.json"):
        manifest.unlink()
    with pytest.raises(ValueError, match="holds no checkpoint that is whole: delete the run's folder"):
        small(copy)


def test_a_save_that_was_killed_leaves_nothing_that_counts(small, whole, copy):
    shutil.copytree(copy / "checkpoints" / "step_000006", copy / "checkpoints" / "tmp_step_000008")
    assert small(copy).state.step == 6


def test_a_full_disk_is_reported_before_the_old_checkpoint_is_touched(small, copy, monkeypatch):
    trainer = small(copy, "train.keep=1")
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*")}
    monkeypatch.setattr(checkpoint, "free_bytes", lambda folder: 1000)
    with pytest.raises(ValueError, match=r"GB left: make room .* checkpoint before, step_000006, is untouched"):
        checkpoint.save_checkpoint(trainer.engine, trainer.checkpoints, trainer.state, keep=1)
    assert {p: p.stat().st_mtime_ns for p in copy.rglob("*")} == before


def test_a_disk_that_fills_up_during_a_save_leaves_the_old_checkpoint(small, copy):
    trainer = small(copy, "train.keep=1")
    later = checkpoint.TrainState(step=8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ValueError, match=r"step_000008 could not be written .* step_000006, is untouched"):
            checkpoint.save_checkpoint(trainer.engine, trainer.checkpoints, later, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(trainer.checkpoints.glob("tmp_*"))
    assert small(copy).state.step == 6


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_weights_never_enter_a_checkpoint(small, tmp_path, stage):
    trainer, _ = trained(small, tmp_path, f"zero={stage}", "train.steps=1", "train.save_every=1", "train.eval_every=1")
    step = tmp_path / "checkpoints" / "step_000001"
    names, trained_numbers = set(), sum(w.numel() for w in head_of(trainer).values())
    for path in step.glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        names |= set(state["module"])
        assert not state.get("frozen_param_fragments")
    assert names == {f"head.{name}" for name in head_of(trainer)}
    assert files.size_of(step) < 4 * trained_numbers * 4.5 + 60_000  # weights, two moments, a master; never the base


def test_the_best_heads_file_has_a_checksum(copy):
    path = copy / "checkpoints" / "best.safetensors"
    assert checkpoint.load_best(path.parent)
    blob = bytearray(path.read_bytes())
    blob[-3] ^= 1
    path.write_bytes(blob)
    with pytest.raises(ValueError, match=r"best.safetensors is damaged"):
        checkpoint.load_best(path.parent)


def test_without_zero_another_number_of_ranks_goes_on_and_says_so(small, copy, capsys):
    manifest = copy / "checkpoints" / "step_000006" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"ranks": 1', '"ranks": 2'))
    assert small(copy).state.step == 6
    assert "was saved by 2 ranks, 1 go on; train.batch stays what it is" in capsys.readouterr().out


def test_a_checkpoint_of_another_number_of_ranks_is_one_sentence(small, tmp_path, monkeypatch):
    trained(small, tmp_path, "zero=1", "train.steps=2")
    manifest = next(tmp_path.glob("checkpoints/step_*/manifest.json"))
    manifest.write_text(manifest.read_text().replace('"ranks": 1', '"ranks": 2'))
    with pytest.raises(ValueError, match="was saved by 2 ranks with zero=1, and this is a run of 1: start it with 2"):
        small(tmp_path, "zero=1")


class Killed(BaseException):
    """No handler of errors sees it, as none sees a SIGKILL."""


def killed_at(monkeypatch, moment):
    """From now on, the process 'dies' at its n-th touch of the disk: before a file or folder is written, forced out,
    renamed or removed."""
    left = [moment]

    def dying(true):
        def call(*given, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return true(*given, **options)

        return call

    for owner, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (torch, "save")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_kill_at_any_moment_of_a_save_loses_no_whole_checkpoint(small, tmp_path, monkeypatch, stage):
    start = tmp_path / "start"
    trainer, _ = trained(small, start, f"zero={stage}", "train.keep=1")
    seen = []
    for moment in range(100):
        folder = shutil.copytree(start, tmp_path / f"killed-{moment}")
        with monkeypatch.context() as fault:
            killed_at(fault, moment)
            try:
                later = checkpoint.TrainState(step=8)
                checkpoint.save_checkpoint(trainer.engine, folder / "checkpoints", later, keep=1)
                done = True
            except Killed:
                done = False
        again = small(folder, f"zero={stage}")
        seen.append(again.state.step)
        assert all(torch.equal(w, head_of(trainer)[name]) for name, w in head_of(again).items())
        if done:
            break
    assert seen == sorted(seen), "the old one until the new one is whole, then the new one"
    assert set(seen) == {6, 8}
    assert len(seen) > 8, seen


def test_training_draws_from_no_random_state_that_a_resumed_run_would_not_have(small, tmp_path):
    rolls = []
    for name in ("a", "b"):
        trainer = small(tmp_path / name)
        torch.rand(len(rolls))  # another state each time
        trainer._one_step()
        rolls.append(torch.get_rng_state())
    assert torch.equal(*rolls)


def test_a_row_is_logged_before_the_checkpoint_that_would_skip_it_on_resume(small, tmp_path, monkeypatch):
    trainer, rows, logged = small(tmp_path), Rows(), []
    save = loop.save_checkpoint
    monkeypatch.setattr(loop, "save_checkpoint", lambda *given: (logged.append(rows[-1]["step"]), save(*given))[1])
    trainer.run(rows)
    assert logged == [2, 4, 6]
