"""Runs: which are there and what they are worth, and which command goes on with one."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ctcdraft.launch import runs
from ctcdraft.launch.cli import compose, typed
from ctcdraft.launch.schema import RunsEntry, TrainEntry

SUMMARY = {
    "base": "SmolLM2",
    "head": {"kind": "ctc"},
    "training": {"step": 800},
    "bench": "heldout",
    "tokens_per_step": 3.1614,
    "speedup": {"ratio_of_means": 2.411, "ci95": [1.94, 2.99]},
}


def test_runs_are_listed_with_their_figures_the_newest_last(tmp_path, capsys):
    summaries = {"done": json.dumps(SUMMARY), "begun": None, "damaged": "{", "strange": '{"speedup": 3}'}
    for number, (name, summary) in enumerate(summaries.items()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("run: {}")
        os.utime(tmp_path / name / "config.yaml", (1e9 + 86400 * number,) * 2)
        if summary:
            (tmp_path / name / "summary.json").write_text(summary)
    (tmp_path / "no run").mkdir()
    assert runs.main(RunsEntry(str(tmp_path))) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == [*summaries]
    assert cells[0][1:7] == ["SmolLM2", "ctc", "800", "3.16", "2.41x [1.94, 2.99]", "heldout"]
    assert all(row[1:7] == ["-"] * 6 for row in cells[1:])
    days = [row[7][:10] for row in cells]
    assert days == sorted(days)
    assert days[0].startswith("2001-09-0")


def test_without_a_run_it_says_how_to_begin(tmp_path):
    with pytest.raises(ValueError, match=r"there is no run in .*: start with `make train`"):
        runs.main(RunsEntry(str(tmp_path)))


def begun(tmp_path, *options):
    """(the configuration, the folder, the record) of a run that has begun."""
    words = ["experiment=smoke", "base=toy", "name=older", f"runs_dir={tmp_path}", *options]
    config = typed(compose("train", words), TrainEntry)
    folder = tmp_path / "older"
    base = SimpleNamespace(path="base", identity={})
    runs.open_run(folder, config, base, tmp_path / "data")
    return config, folder, yaml.safe_load((folder / "config.yaml").read_text())


@pytest.mark.parametrize("removed", [("objective", "teacher_k"), ("train", "pack"), ("head", "rank"), ("objective",)])
def test_an_option_that_is_younger_than_the_run_had_its_default(tmp_path, removed):
    config, folder, record = begun(tmp_path)
    part = record["run"]
    for name in removed[:-1]:
        part = part[name]
    del part[removed[-1]]
    (folder / "config.yaml").write_text(yaml.safe_dump(record))
    if removed == ("objective",):  # of which labels has no default
        with pytest.raises(ValueError, match=r"is a run without objective.labels, this one is with objective.labels="):
            runs.check_inputs(config)
    else:
        assert runs.check_inputs(config) == folder


def test_a_younger_option_that_is_not_at_its_default_makes_another_run(tmp_path):
    config, folder, record = begun(tmp_path, "objective.teacher_k=8")
    del record["run"]["objective"]["teacher_k"]
    (folder / "config.yaml").write_text(yaml.safe_dump(record))
    with pytest.raises(ValueError, match=r"with objective.teacher_k=16, this one is with objective.teacher_k=8"):
        runs.check_inputs(config)


def test_an_option_of_the_run_that_is_no_more_makes_another_run(tmp_path):
    config, folder, record = begun(tmp_path)
    record["run"]["objective"]["follow"] = 0.5
    (folder / "config.yaml").write_text(yaml.safe_dump(record))
    with pytest.raises(ValueError, match=r"is a run with objective.follow=0.5, this one is without objective.follow"):
        runs.check_inputs(config)


@pytest.fixture
def sitting(tmp_path, monkeypatch):
    """sitting(ranks, *options) -> (folder, rows of a step) of a run, as rank 0 of so many begins it or goes on."""
    monkeypatch.setattr(runs.ds, "from_rank_zero", lambda make: make())
    monkeypatch.setattr(runs.ds, "barrier", lambda: None)

    def begin(ranks, *options):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        words = ["experiment=smoke", "base=toy", f"runs_dir={tmp_path}", *options]
        config = typed(compose("train", words), TrainEntry)
        folder = runs.check_inputs(config)
        config = runs.with_batch(config, folder)
        runs.open_run(folder, config, SimpleNamespace(path="base", identity={}), tmp_path / "data")
        return folder, config.train.batch

    return begin


def test_a_batch_that_is_not_said_is_the_runs_own_whatever_the_ranks(sitting):
    first, rows = sitting(8)
    assert rows == 8
    assert sitting(2) == sitting(1) == (first, 8)
    assert sitting(2, f"name={first.name}", "train.batch=8") == (first, 8)
    with pytest.raises(ValueError, match=r"train\.batch=8 does not split over 3 ranks: take a number of ranks"):
        sitting(3)
    with pytest.raises(ValueError, match=r"is a run with train.batch=8, this one is with train.batch=4"):
        sitting(2, f"name={first.name}", "train.batch=4")


def test_a_run_of_four_rows_is_not_begun_anew_on_ranks_that_do_not_divide_them(sitting):
    first, rows = sitting(1)
    assert rows == 4
    assert sitting(4) == (first, 4)
    with pytest.raises(ValueError, match=r"train\.batch=4 does not split over 8 ranks"):
        sitting(8)


def test_data_is_prepared_by_ranks_that_do_not_divide_the_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    words = ["experiment=smoke", "train.batch=4", "name=mine", f"runs_dir={tmp_path}"]
    assert runs.check_inputs(typed(compose("prepare", words), TrainEntry)) == tmp_path / "mine"


@pytest.mark.parametrize("damage", ["x", -4])
def test_a_damaged_batch_is_one_sentence(sitting, damage):
    folder, _ = sitting(1)
    record = yaml.safe_load((folder / "config.yaml").read_text())
    record["run"]["train"]["batch"] = damage
    (folder / "config.yaml").write_text(yaml.safe_dump(record))
    with pytest.raises(ValueError, match=f"is a run with train.batch={damage}, this one is without train.batch"):
        sitting(1)


@pytest.mark.parametrize("missing", ["config.yaml", "paths.json"])
def test_a_start_that_was_cut_off_is_written_down_by_the_next(tmp_path, missing):
    _, folder, _ = begun(tmp_path, "base.dtype=bf16")
    (folder / missing).unlink()
    _, _, record = begun(tmp_path)
    assert record["run"]["base"]["dtype"] == runs.run_paths(folder)["dtype"] == "fp32"


def test_a_run_finds_base_and_data_from_any_folder_and_where_all_of_it_was_moved(tmp_path, monkeypatch):
    for name in ("here/models/b", "here/cache/d", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    config = typed(compose("train", ["experiment=smoke", "name=a"]), TrainEntry)
    runs.open_run(Path("runs/a"), config, SimpleNamespace(path="models/b", identity={}), Path("cache/d"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "here").rename(tmp_path / "there")
    found = runs.run_paths(tmp_path / "there" / "runs" / "a")
    assert [found["base"], found["data"]] == [f"{tmp_path}/there/models/b", f"{tmp_path}/there/cache/d"]


def test_the_name_of_a_base_on_the_hub_stays_a_name(tmp_path):
    _, folder, _ = begun(tmp_path)
    assert runs.run_paths(folder)["base"] == "base"
