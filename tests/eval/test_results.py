"""Bootstrap intervals, and differences that are paired by question."""

import numpy as np
import pytest

from ctcdraft.eval.bench import Question, Setting
from ctcdraft.eval.results import difference, estimate
from ctcdraft.eval.run import Turn
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
