"""What a drafter learns from what became of its drafts."""

import numpy as np
import pytest

from ctcdraft.model.draft.drafter import Stop
from ctcdraft.model.draft.tree import EMPTY, Tree

CHAIN = Tree(np.arange(4), np.arange(-1, 3), np.arange(1, 5), np.ones(4, np.float32))


def after(steps, tree, path, longest=9):
    """The threshold after so many steps that all end alike."""
    stop = Stop()
    for _ in range(steps):
        stop.observe(tree, path, longest)
    return stop.least


def test_the_threshold_of_adaedl_rises_where_nothing_is_accepted_and_falls_where_much_is():
    assert after(1, CHAIN, []) == pytest.approx(Stop.least + 0.1 * Stop.EPSILON)
    assert after(1, CHAIN, [0]) == pytest.approx(Stop.least - 0.1 * Stop.EPSILON)
    assert after(2, CHAIN, []) > after(1, CHAIN, [])
    assert after(5, CHAIN, [0, 1, 2, 3], longest=4) == Stop.least  # a draft cannot be longer
    assert after(5, EMPTY, []) == Stop.least  # nothing was drafted, so nothing is known


@pytest.mark.parametrize(("path", "end"), [([], 1.0), ([0, 1, 2, 3], 0.0)])
def test_it_stays_a_probability(path, end):
    assert after(6000, CHAIN, path) == end
