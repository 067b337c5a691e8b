import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bases import write_base

ROOT = Path(__file__).parents[2]


def doctor(folder, *words, **env):
    words = [sys.executable, str(ROOT / "launch" / "doctor.py"), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | env
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


def test_a_machine_with_nothing_on_it_yet_is_told_what_comes(folder):
    (folder / "torch" / "py311_cpu" / "op").mkdir(parents=True)
    (folder / "torch" / "py311_cpu" / "op" / "lock").touch()
    done = doctor(folder, "--json", "experiment=toy", "logger=none", TORCH_EXTENSIONS_DIR=str(folder / "torch"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = dict(found["rows"])
    assert rows["torch"].startswith("2.")
    assert "`make train` makes it" in rows["base"]
    assert "delete it, or a run may wait for it for ever" in found["warnings"][0]


def test_an_untrained_base_is_an_error_that_names_the_stage(folder):
    write_base(folder / "base")
    done = doctor(folder, "--json", "base=local", "base.path=base", "base.dtype=fp32", "logger=none")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    rows = dict(found["rows"])
    assert rows["end of answer"] == "supervised"
    assert ["The Rhine, the Danube and the Elbe.</s>", True] in found["pieces"]
    assert rows["memory: head weights"].endswith("MB")
    assert "another tokenizer, or a base that is not trained" in rows["one conversation: tokenizer"]
    assert found["errors"] == ["one conversation is not learnt; the first stage that disagrees is tokenizer"]


def test_a_base_that_is_not_there_is_one_sentence(folder):
    done = doctor(folder, "base=local", "base.path=./nowhere", "logger=none")
    assert done.returncode == 1
    assert "error: base: base.path=./nowhere: no such folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_options_are_one_sentence(folder):
    done = doctor(folder, "optim.lrr=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: optim.lrr: there is no such option")
