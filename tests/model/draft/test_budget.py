from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.model.draft.budget import Budget, Calibration, chain_of, fit_calibration, step_seconds
from ctcdraft.model.draft.tree import Tree


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
    assert Calibration.from_dict(asdict(calibration)) == calibration
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


class Clock:
    """A machine that does other things too: `noise` > 0 makes each round slow as a whole, and one of its calls more."""

    def __init__(self, monkeypatch, noise=0.0):
        self.now, self.calls, self.rng, self.noise = 0.0, [], np.random.default_rng(0), noise
        monkeypatch.setattr("ctcdraft.model.draft.budget.time.perf_counter", lambda: self.now)

    def verify(self, nodes):
        if nodes == 0:
            self.slow, self.hit = 1 + self.noise * self.rng.random(), self.rng.integers(8)
        self.spend(nodes, 1 + nodes / 10)

    def draft(self):
        self.spend("draft", 0.5)

    def spend(self, what, seconds):
        self.hit -= 1
        self.now += seconds * self.slow * (4 if self.noise and self.hit == 0 else 1)
        self.calls.append(what)


def test_step_times_bear_a_machine_that_does_other_things(monkeypatch):
    clock = Clock(monkeypatch, noise=1.0)
    monkeypatch.setattr("ctcdraft.model.draft.budget.ENOUGH", 1e9)
    seconds = step_seconds(20, clock.verify, clock.draft)
    want = 1.5 + np.arange(21) / 10
    assert np.abs(seconds / seconds.mean() / (want / want.mean()) - 1).max() < 0.1


def test_more_nodes_in_less_time_are_what_fewer_are_worth(monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr("ctcdraft.model.draft.budget.ENOUGH", 1e9)
    seconds = step_seconds(8, lambda nodes: clock.verify(30 if nodes == 2 else nodes), clock.draft)
    assert np.allclose(seconds[[0, 1, 2, 4, 8]], 1.5 + np.array([0, 1, 4, 4, 8]) / 10)


def test_a_base_of_slow_steps_is_timed_at_few_sizes(monkeypatch):
    clock = Clock(monkeypatch)
    seconds = step_seconds(20, clock.verify, clock.draft)  # each of 1 to 3 seconds
    assert clock.calls == [0, 20, 0, 20, "draft", 0, 4, 20, "draft"]
    assert np.allclose(seconds, 1.5 + np.arange(21) / 10)
    monkeypatch.setattr("ctcdraft.model.draft.budget.ENOUGH", 30.0)
    step_seconds(20, clock.verify, clock.draft)
    assert {call for call in clock.calls[9:] if call != "draft"} == {0, 1, 4, 8, 20}


def test_a_damaged_calibration_is_refused():
    for found in ({}, {"psi": [[0.1]], "rate": []}, {"psi": [[0.2, 0.1]], "rate": [[0, 1]]}, {"psi": 3, "rate": 4}):
        with pytest.raises(ValueError, match="calibration is damaged"):
            Calibration.from_dict(found)


def test_likely_nodes_are_not_thrown_together_with_the_many_unlikely_ones():
    """Sixty nodes of an anchor are hopeless, four are good and better: each finds its own rate."""
    rng = np.random.default_rng(0)
    psi = np.concatenate([rng.uniform(0, 0.01, 60_000), rng.uniform(0.1, 1.0, 4_000)])
    calibration = fit_calibration(psi, np.ones(len(psi), np.int64), rng.random(len(psi)) < psi**2)
    for p in (0.3, 0.6, 0.9):
        assert abs(calibration.of(leaf(p, 1))[-1] - p**2) < 0.08


def test_a_chain_is_a_tree():
    tree = chain_of([7, 8, 9])
    assert tree.walk([7, 8, 1, 0].__getitem__) == ([0, 1], 1)
    assert len(tree.first(2)) == 2
    assert len(chain_of([])) == 0
    assert chain_of([7, 8], 0.5).psi.tolist() == [0.5, 0.25]
