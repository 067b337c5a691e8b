from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.model.draft.budget import Calibration, best_size, chain_of, fit_calibration, step_seconds
from ctcdraft.model.draft.tree import Tree


def observations(bend, count=40000, seed=0):
    """Nodes whose true acceptance is psi ** bend."""
    rng = np.random.default_rng(seed)
    psi = rng.random(count)
    return psi, rng.random(count) < psi**bend


@pytest.mark.parametrize("bend", [0.5, 1.0, 2.0])
def test_calibration_finds_the_true_acceptance(bend):
    calibration = fit_calibration(*observations(bend))
    x = np.linspace(0.95, 0.05, 30)
    got = calibration.applied(beside(x)).psi
    assert np.abs(got - x**bend).max() < 0.05
    assert (np.diff(got) <= 0).all()


def beside(psi):
    """Nodes of these psi, all behind the root."""
    return Tree(np.arange(len(psi)), np.full(len(psi), -1), np.ones(len(psi), np.int64), np.array(psi, np.float32))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=300))
def test_whatever_was_observed_rises_with_psi_and_falls_along_paths(rows):
    psi, right = (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0),) * 2
    calibration = fit_calibration(psi.astype(float), right.astype(bool))
    if calibration is None:
        assert not rows
        return
    assert Calibration(**asdict(calibration)) == calibration
    assert calibration.rate == sorted(calibration.rate)
    assert 0 <= calibration.rate[0] <= calibration.rate[-1] <= 1
    tree = Tree(np.arange(5), np.arange(5) - 1, np.arange(5) + 1, np.array([0.9, 0.8, 0.5, 0.5, 0.1], np.float32))
    assert (np.diff(calibration.applied(tree).psi) <= 0).all()


def test_the_budget_is_what_pays_most_per_second():
    tree = Tree(np.arange(4), np.full(4, -1), np.ones(4, np.int64), np.array([0.6, 0.3, 0.09, 0.01], np.float32))
    free = np.ones(5)
    assert best_size(tree, free) == 4
    dear = np.array([1.0, 1.7, 2.4, 3.1, 3.8])
    assert best_size(tree, dear) == 0
    steps = np.array([1.0, 1.2, 1.3, 1.45, 1.6])  # 1, 1.33, 1.46, 1.37, 1.25 per second
    assert best_size(tree, steps) == 2
    doubtful = Calibration([0.0, 1.0], [0.0, 0.1]).applied(tree)
    assert best_size(doubtful, steps) == 0


def test_calibrated_nodes_are_worth_what_lies_between_the_knots():
    found = Calibration([0.1, 0.5, 0.9], [0.2, 0.2, 0.6]).applied(beside([0.95, 0.8, 0.5, 0.3, 0.05]))
    assert found.psi.tolist() == pytest.approx([0.6, 0.5, 0.2, 0.2, 0.2])
    assert found.tokens.tolist() == [0, 1, 2, 3, 4]


def test_a_calibrated_tree_keeps_the_nodes_like_which_none_was_accepted():
    kept = Calibration([0.1, 0.9], [0.0, 1.0]).applied(beside([0.9, 0.09, 0.08, 0.05]))
    assert kept.tokens.tolist() == [0, 1, 2, 3]
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
    for found in ({}, {"psi": 3, "rate": 4}, {"psi": [[0.2, 0.1]], "rate": [[0, 1]]}):
        with pytest.raises(ValueError, match="for Calibration"):
            Calibration(**found)
    for psi, rate in (([], []), ([0.1], []), ([0.2, 0.1], [0, 1]), ([0.1, 0.2], [1, 0])):
        with pytest.raises(ValueError, match="calibration is damaged"):
            Calibration(psi, rate)


def test_likely_nodes_are_not_thrown_together_with_the_many_unlikely_ones():
    """Sixty nodes of an anchor are hopeless, four are good and better: each finds its own rate."""
    rng = np.random.default_rng(0)
    psi = np.concatenate([rng.uniform(0, 0.01, 60_000), rng.uniform(0.1, 1.0, 4_000)])
    calibration = fit_calibration(psi, rng.random(len(psi)) < psi**2)
    p = np.array([0.9, 0.6, 0.3])
    assert np.abs(calibration.applied(beside(p)).psi - p**2).max() < 0.08


def test_a_chain_is_a_tree():
    tree = chain_of([7, 8, 9])
    assert tree.walk([7, 8, 1, 0].__getitem__) == ([0, 1], 1)
    assert len(tree.first(2)) == 2
    assert len(chain_of([])) == 0
    assert chain_of([7, 8], 0.5).psi.tolist() == [0.5, 0.25]
