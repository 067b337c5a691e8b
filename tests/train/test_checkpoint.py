import json
import os
import pickle
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file
from trainers import Rows, head_weights

from ctcdraft.model import folders
from ctcdraft.train import checkpoint, loop

pytestmark = pytest.mark.slow


def trained(make, folder, options=()):
    """A run's trainer after its last step, and its logged rows."""
    trainer, rows = make(folder, *options), Rows()
    trainer.run(rows)
    return trainer, rows


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
    assert folders.sealed_facts(step) == {k: v for k, v in facts.items() if k != "sha256"}


def test_only_the_newest_are_kept(small, whole, tmp_path):
    assert sorted(p.name for p in (whole[0] / "checkpoints").glob("step_*")) == ["step_000004", "step_000006"]
    trained(small, tmp_path, ["train.keep=1"])
    assert [p.name for p in (tmp_path / "checkpoints").glob("step_*")] == ["step_000006"]
    assert checkpoint.read_checkpoint(tmp_path / "checkpoints").best


def test_reading_writes_nothing(whole, tmp_path):
    folder = shutil.copytree(whole[0] / "checkpoints", tmp_path / "checkpoints")
    (folder / "latest").write_text("rubbish")
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    assert checkpoint.read_checkpoint(folder).state.step == 6
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))} == before


DAMAGE = {
    "a changed byte": lambda p: p.write_bytes(p.read_bytes()[:-9] + b"x" + p.read_bytes()[-8:]),
    "half a file": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "a missing file": lambda p: p.unlink(),
    "no manifest": lambda p: (p.parent / "manifest.json").unlink(),
    "a manifest with another step": lambda p: (m := p.parent / "manifest.json").write_text(
        m.read_text().replace('"step": 6', '"step": 5')
    ),
    "half a manifest": lambda p: (p.parent / "manifest.json").write_text('{"files": {'),
    "a file too many": lambda p: (p.parent / "evil.safetensors").write_bytes(b"x"),
    "a link to elsewhere": lambda p: (p.rename(p.parent.parent / "moved"), p.symlink_to("../moved")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_gives_the_same_run(
    small, whole, copy, damage, capsys, monkeypatch
):
    DAMAGE[damage](copy / "checkpoints" / "step_000006" / checkpoint.STATE)
    opened = []
    load = checkpoint.load_file
    monkeypatch.setattr(checkpoint, "load_file", lambda path: (opened.append(path.parent.name), load(path))[1])
    trainer, rows = trained(small, copy)
    assert "warning: checkpoint" in capsys.readouterr().err
    assert opened == ["step_000004"], "a file was read whose checksum is wrong"
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in whole[2][4:]]
    for name, weight in head_weights(trainer).items():
        assert torch.equal(weight, head_weights(whole[1])[name])
    assert folders.sealed_facts(copy / "checkpoints" / "step_000006")["state"]["step"] == 6


def test_one_that_was_passed_over_takes_the_place_of_none_that_is_kept(small, copy, capsys):
    DAMAGE["half a file"](copy / "checkpoints" / "step_000006" / checkpoint.STATE)
    trainer = small(copy, "train.keep=1")
    trainer._one_step()
    trainer._save()
    assert checkpoint.read_checkpoint(copy / "checkpoints").state.step == 5
    assert sorted(p.name for p in (copy / "checkpoints").glob("step_*")) == ["step_000005", "step_000006"]


def test_a_run_whose_checkpoints_are_all_damaged_is_one_sentence(small, copy):
    for manifest in copy.glob("checkpoints/step_*/manifest.json"):
        manifest.unlink()
    with pytest.raises(ValueError, match="holds no checkpoint that is whole: delete the run's folder"):
        small(copy)


def test_a_save_that_was_killed_leaves_nothing_that_counts(small, whole, copy):
    shutil.copytree(copy / "checkpoints" / "step_000006", copy / "checkpoints" / "unfinished-step_000008-x")
    assert small(copy).state.step == 6


def test_a_disk_that_fills_up_during_a_save_leaves_the_old_checkpoint(small, copy):
    trainer = small(copy, "train.keep=1")
    later = checkpoint.TrainState(step=8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ValueError, match=r"step_000008 could not be written .* step_000006, is untouched"):
            checkpoint.save_checkpoint(trainer.step.engine, trainer.checkpoints, later, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(trainer.checkpoints.glob("unfinished-*"))
    assert small(copy).state.step == 6


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_holds_weights_and_moments_of_the_head_and_nothing_of_the_base_or_of_pickle(
    small, tmp_path, stage
):
    each_step = "train.steps=1", "train.save_every=1", "train.eval_every=1"
    trainer, _ = trained(small, tmp_path, [f"zero={stage}", *each_step])
    step = tmp_path / "checkpoints" / "step_000001"
    assert sorted(path.name for path in step.iterdir()) == ["manifest.json", "state.safetensors"]
    every = {f"head.{name}" for name, _ in trainer.step.task.head.named_parameters()}
    names = {f"{kind}/{name}" for name in every for kind in ("weight", "exp_avg", "exp_avg_sq")}
    best = {f"best/{name}" for name in trainer.step.task.head.state_dict()}
    assert load_file(step / checkpoint.STATE).keys() == names | best | {"updates"}


def test_no_pickle_is_read_or_written(small, tmp_path, monkeypatch):
    for owner, name in ((torch, "load"), (torch, "save"), (pickle, "load"), (pickle, "dump")):
        monkeypatch.setattr(owner, name, lambda *given, **options: pytest.fail("a pickle was touched"))
    trained(small, tmp_path, ["train.steps=2"])
    assert small(tmp_path, "train.steps=2").state.step == 2


def test_the_best_head_is_part_of_every_checkpoint_after_it(small, tmp_path):
    trainer, _ = trained(small, tmp_path, ["train.eval_every=4"])
    assert trainer.state.best_step in (4, 6)
    best = checkpoint.read_checkpoint(trainer.checkpoints).best
    assert best.keys() == trainer.step.task.head.state_dict().keys()
    again = small(tmp_path, "train.eval_every=4")
    assert all(torch.equal(best[name], weight) for name, weight in again.best.items())
    shutil.rmtree(trainer.checkpoints / "step_000006")
    best = checkpoint.read_checkpoint(trainer.checkpoints).best
    again = small(tmp_path, "train.eval_every=4")
    assert again.state.best_step == again.state.step == 4
    assert all(torch.equal(weight, best[name]) for name, weight in head_weights(again).items())


STRANGE = {
    "another format": (lambda facts: facts | {"format": 1}, f"format 1, not {checkpoint.FORMAT}"),
    "no format": (lambda facts: {k: v for k, v in facts.items() if k != "format"}, "'format'"),
    "an unknown state": (lambda facts: facts | {"state": {"steps": 3}}, "unexpected keyword argument 'steps'"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_whole_checkpoint_that_is_not_ours_is_one_sentence(small, copy, what):
    change, reason = STRANGE[what]
    manifest = copy / "checkpoints" / "step_000006" / "manifest.json"
    facts = change(json.loads(manifest.read_text()))
    facts.pop("sha256")
    manifest.write_text(json.dumps({**facts, "sha256": folders.digest_of(facts)}))
    with pytest.raises(ValueError, match=rf"step_000006 cannot be used, though it is whole .*{reason}.*: delete it"):
        small(copy)


def test_the_state_of_another_head_is_one_sentence(small, copy):
    with pytest.raises(ValueError, match=r"it is the state of another head.*: delete it"):
        small(copy, "head.slots=5")


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

    for owner, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (checkpoint, "save_file")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_kill_at_any_moment_of_a_save_loses_no_whole_checkpoint(small, tmp_path, monkeypatch, stage):
    start = tmp_path / "start"
    trainer, _ = trained(small, start, [f"zero={stage}", "train.keep=1"])
    seen = []
    for moment in range(100):
        folder = shutil.copytree(start, tmp_path / f"killed-{moment}")
        with monkeypatch.context() as fault:
            killed_at(fault, moment)
            try:
                later = checkpoint.TrainState(step=8)
                checkpoint.save_checkpoint(trainer.step.engine, folder / "checkpoints", later, keep=1)
                done = True
            except Killed:
                done = False
        again = small(folder, f"zero={stage}")
        seen.append(again.state.step)
        assert all(torch.equal(w, head_weights(trainer)[name]) for name, w in head_weights(again).items())
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
