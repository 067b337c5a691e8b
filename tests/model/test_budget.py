import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.model.budget import Budget, Calibration, chain_of, fit_calibration, step_seconds
from ctcdraft.model.tree import Tree


def observations(bend, count=40000, seed=0):
    """Nodes of two depths whose true acceptance is psi ** bend."""
    rng = np.random.default_rng(seed)
    psi = rng.random(count)
    depth = rng.integers(1, 3, count)
    return psi, depth, rng.random(count) < psi**bend


@pytest.mark.parametrize("bend", [0.5, 1.0, 2.0])
def test_calibration_finds_the_true_acceptance(bend):
    calibration = fit_calibration(*observations(bend))
    x = np.linspace(0.05, 0.95, 30)
    for depth in (1, 2):
        got = np.array([calibration.of(leaf(p, depth))[-1] for p in x])
        assert np.abs(got - x**bend).max() < 0.05
        assert (np.diff(got) >= 0).all()


def leaf(psi, depth):
    """A chain whose last node has this psi; its parents are certain."""
    values = np.ones(depth, np.float32)
    values[-1] = psi
    return Tree(np.arange(depth), np.arange(depth) - 1, np.arange(depth) + 1, values)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4), st.booleans()), max_size=300))
def test_whatever_was_observed_rises_with_psi_and_falls_along_paths(rows):
    psi, depth, right = (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 3
    calibration = fit_calibration(psi.astype(float), depth.astype(np.int64), right.astype(bool))
    if calibration is None:
        assert not rows
        return
    assert Calibration.from_dict(calibration.to_dict()) == calibration
    for row in calibration.rate:
        assert row == sorted(row)
        assert 0 <= row[0] <= row[-1] <= 1
    for depth in range(1, 6):
        row = min(depth, len(calibration.psi)) - 1
        for p in (0.0, 0.02, 0.3, 0.75, 1.0):
            want = np.interp(np.float32(p), calibration.psi[row], calibration.rate[row])
            flat = Tree(np.zeros(1, np.int64), np.full(1, -1), np.full(1, depth), np.full(1, p, np.float32))
            assert abs(calibration.of(flat)[0] - want) < 1e-12
    tree = Tree(np.arange(5), np.arange(5) - 1, np.arange(5) + 1, np.array([0.9, 0.8, 0.5, 0.5, 0.1], np.float32))
    assert (np.diff(calibration.of(tree)) <= 0).all()


def test_the_budget_is_what_pays_most_per_second():
    tree = Tree(np.arange(4), np.full(4, -1), np.ones(4, np.int64), np.array([0.6, 0.3, 0.09, 0.01], np.float32))
    free = Budget(np.ones(5))
    assert free.choose(tree) == 4
    dear = Budget(np.array([1.0, 1.7, 2.4, 3.1, 3.8]))
    assert dear.choose(tree) == 0
    steps = Budget(np.array([1.0, 1.2, 1.3, 1.45, 1.6]))  # 1, 1.33, 1.46, 1.37, 1.25 per second
    assert steps.choose(tree) == 2
    doubtful = Calibration([[0.0, 1.0]], [[0.0, 0.1]]).applied(tree)
    assert steps.choose(doubtful) == 0


def test_calibrated_nodes_come_by_what_they_are_worth():
    tree = Tree(
        np.arange(4), np.array([-1, 0, -1, 1]), np.array([1, 2, 1, 3]), np.array([0.9, 0.8, 0.1, 0.1], np.float32)
    )
    found = Calibration([[0.0, 1.0], [0.0, 1.0]], [[0.5, 0.5], [0.0, 0.25]]).applied(tree)
    assert found.tokens.tolist() == [0, 2, 1, 3]
    assert found.parents.tolist() == [-1, -1, 0, 2]
    assert found.psi.tolist() == pytest.approx([0.5, 0.5, 0.2, 0.025])


def test_a_calibrated_tree_keeps_the_nodes_like_which_none_was_accepted():
    calibration = Calibration([[0.1, 0.9]], [[0.0, 1.0]])
    tree = Tree(np.arange(4), np.array([-1, -1, 0, 1]), np.array([1, 1, 2, 2]), np.float32([0.9, 0.09, 0.05, 0.08]))
    kept = calibration.applied(tree)
    assert kept.tokens.tolist() == [0, 1, 3, 2]
    assert (kept.psi > 0).all()
    assert kept.psi[1:].sum() < 1e-6


def test_step_times_are_interpolated_and_never_fall():
    import time

    slept = []

    def verify(nodes):
        slept.append(nodes)
        time.sleep(0.002 if nodes >= 8 else 0.0005)

    seconds = step_seconds(20, verify, lambda: time.sleep(0.001))
    assert len(seconds) == 21
    assert (np.diff(seconds) >= 0).all()
    assert set(slept) == {0, 1, 2, 4, 8, 16, 20}
    assert seconds[0] > 0.001


def test_a_damaged_calibration_is_refused():
    for found in ({}, {"psi": [[0.1]], "rate": []}, {"psi": [[0.2, 0.1]], "rate": [[0, 1]]}, {"psi": 3, "rate": 4}):
        with pytest.raises(ValueError, match="calibration is damaged"):
            Calibration.from_dict(found)


def test_a_chain_is_a_tree():
    tree = chain_of([7, 8, 9])
    assert tree.walk(np.array([7, 8, 1, 0])) == [0, 1]
    assert len(tree.first(2)) == 2
    assert len(chain_of([])) == 0
