"""A slice of `make fuzz`; and that it sees what it is there to see."""

import json
import random
import time

import fuzz
import pytest
from commands import run

pytestmark = pytest.mark.slow


def test_sixty_broken_inputs_are_handled_or_refused_with_a_sentence(tmp_path):
    done = run([fuzz.__file__, "--inputs", "60", "--seed", "7"], cwd=tmp_path, timeout=115)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = {line.split()[0]: [int(count) for count in line.split()[1:]] for line in done.stdout.splitlines()[1:]}
    assert set(rows) == {*fuzz.EDGES, "all"}
    assert rows["all"][0] == 60
    for edge in fuzz.EDGES:
        inputs, _, sentences, defects = rows[edge]
        assert (inputs, defects) == (10, 0)
        assert sentences, edge
    assert rows["all"][1] > 12


def write(path, text):
    path.write_text(text)


DEFECTS = {
    "an exception": (lambda rng, folder: {}["x"], "KeyError"),
    "a library's sentence": (lambda rng, folder: json.loads("{"), "JSONDecodeError"),
    "a hang": (lambda rng, folder: time.sleep(60), "it hangs"),
    "half a file": (lambda rng, folder: write(folder / "x.tmp", "ha"), "left behind"),
    "a wrong outcome": (lambda rng, folder: (_ for _ in ()).throw(fuzz.Wrong("another head")), "another head"),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_it_sees(what, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    edge, said = DEFECTS[what]
    found, defect = fuzz.outcome(edge, random.Random(0), tmp_path)
    assert found == "defect"
    assert said in defect


def test_a_sentence_of_ours_and_an_outcome_are_none(tmp_path):
    def refuse(rng, folder):
        raise ValueError("this is said by a file of this project")

    assert fuzz.outcome(refuse, random.Random(0), tmp_path) == ("sentence", "")
    assert fuzz.outcome(lambda rng, folder: None, random.Random(0), tmp_path) == ("handled", "")
