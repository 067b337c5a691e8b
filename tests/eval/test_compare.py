"""Several heads on the same questions: paired differences, and the files."""

import json

import numpy as np
import pytest
from bases import write_base
from drafting import export_random_heads

from ctcdraft.eval.bench import BenchConfig, Question, Setting
from ctcdraft.eval.evaluate import Measurement, evaluate
from ctcdraft.eval.results import difference, estimate
from ctcdraft.eval.run import Turn
from ctcdraft.model import DraftConfig, load_base
from ctcdraft.model.decode.decoder import Generation


def answered(grown, steps, fast, plain, setting, question=None):
    drafted = Generation([0] * (grown + 1), steps=steps, accepted=[0] * steps, expected=[0.0] * steps)
    question = question or Question("q", "a", ("x",))
    alone = Generation([0] * (grown + 1))
    return Turn(question, setting, drafted=drafted, seconds=fast, plain=alone, plain_seconds=plain)


def test_a_bootstrap_interval_of_known_data():
    values = np.arange(100.0)
    mean, (low, high) = estimate(0, np.stack([values, np.ones(100)]))
    assert mean == values.mean()
    spread = 1.96 * values.std() / 10
    assert low == pytest.approx(49.5 - spread, abs=0.6)  # the Monte Carlo error of a 2.5% quantile over 2000 draws
    assert high == pytest.approx(49.5 + spread, abs=0.6)
    assert estimate(0, np.stack([values, np.ones(100)])) == (mean, [low, high])


def test_differences_are_paired_by_question():
    """Questions differ widely, the second head gains exactly one token per step on each: no doubt is left."""
    first, second = [], []
    for number in range(20):
        question = Question(str(number), "a", ("x",))
        for seed in (0, 1):
            setting, steps = Setting(1.0, seed), 10
            grown = steps * (1 + number)
            first.append(answered(grown, steps, 1.0, 4.0, setting, question))
            second.append(answered(grown + steps, steps, 1.0, 4.0, setting, question))
    found = difference(first, second, 0)
    assert found["tokens_per_step"]["value"] == pytest.approx(1.0)
    assert found["tokens_per_step"]["ci95"] == pytest.approx([1.0, 1.0])
    nothing = difference(first, first, 0)
    assert nothing == {name: {"value": 0.0, "ci95": [0.0, 0.0]} for name in ("tokens_per_step", "speedup")}


def test_a_difference_in_speedup_is_that_of_the_ratios_of_means():
    setting = Setting()
    first = [answered(9, 5, 1.0, 2.0, setting), answered(19, 5, 1.0, 2.0, setting)]
    second = [answered(9, 5, 0.5, 2.0, setting), answered(19, 5, 0.5, 2.0, setting)]
    found = difference(first, second, 0)
    assert found["speedup"]["value"] == pytest.approx(2.0)  # 4x less 2x
    assert found["speedup"]["ci95"] == pytest.approx([2.0, 2.0])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_base(str(write_base(tmp_path_factory.mktemp("compare") / "b", eos_token_id=1, initializer_range=0.05)))


@pytest.fixture(scope="module")
def heads(base, tmp_path_factory):
    return export_random_heads(base, tmp_path_factory.mktemp("heads"), "one", "two", "three")


@pytest.mark.slow
def test_several_heads_leave_one_comparison(base, heads, tmp_path):
    bench = BenchConfig("toy", questions=3, max_new_tokens=6, temperatures=[0.0, 1.0], seeds=2)
    folder = tmp_path / "eval" / "toy-heads"
    found = evaluate(Measurement(base, DraftConfig("tree", 4, budget="fixed"), bench), heads, folder).results
    assert found == json.loads((folder / "results.json").read_text())
    assert list(found["heads"]) == ["one", "two", "three"]
    assert [block["temperature"] for block in found["temperatures"]] == [0.0, 1.0]
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    for block in found["temperatures"]:
        assert block["heads"]["one"]["difference"] is None
        assert set(block["heads"]["two"]["difference"]) == {"tokens_per_step", "speedup"}
        assert list(block["heads"]) == ["one", "two", "three", "prompt lookup alone"]
        alone = block["heads"]["prompt lookup alone"]
        assert alone["identical"]["compared"] == alone["identical"]["identical"] > 0
        assert alone["accepted_by_source"]["head"] == 0.0
        turns = 3 * 2 * (2 if block["temperature"] else 1)
        for label in heads:
            head, none = block["heads"][label], {"divergences": [], "same_shape": None}
            assert head["identical"] == {"compared": turns, "identical": turns, "beyond_bound": 0, **none}
            rows = [row for row in answers if (row["head"], row["temperature"]) == (label, block["temperature"])]
            assert head["tokens"] == sum(row["tokens"] for row in rows)
            assert head["tokens_per_step"] == sum(row["tokens"] - row["turns"] for row in rows) / head["steps"]
    assert (folder / "heads.png").stat().st_size > 1000
    report = (folder / "report.md").read_text()
    assert "| three" in report
    assert "| prompt lookup alone" in report
    assert "| temperature 1" in report
    assert "| draft tokens | one, temperature 0 | two, temperature 0 | three, temperature 0 |" in report
