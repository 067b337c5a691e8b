"""`ctcdraft runs`: what is there, and what it is worth."""

import json
import os

import pytest

from ctcdraft.launch import runs
from ctcdraft.launch.schema import RunsEntry

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
