"""The console command."""

import runpy
import sys
from pathlib import Path

import pytest
from commands import run

from ctcdraft.launch import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_command_runs_its_entry_with_what_stands_behind_it(monkeypatch):
    seen = []
    monkeypatch.setattr(runpy, "run_module", lambda name, run_name: seen.append((name, run_name, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["ctcdraft", "train", "head.layers=3"])
    main.main()
    assert seen == [("ctcdraft.launch.train", "__main__", ["head.layers=3"])]


@pytest.mark.parametrize("words", [[], ["fly"]])
def test_another_word_gets_the_list_of_commands(words):
    done = run(["-m", "ctcdraft.launch.main", *words], cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ctcdraft train|eval|prepare|export|doctor|chat|serve|runs [options]")


def test_an_entry_started_by_name_is_the_entry():
    given = ["train", "head=medusa", "--cfg", "job", "--package", "head"]
    done = run(["-m", "ctcdraft.launch.main", *given], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "kind: medusa" in done.stdout
