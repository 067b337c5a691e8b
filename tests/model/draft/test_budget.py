from dataclasses import replace

import numpy as np

from ctcdraft.model.draft.budget import best_size, chain_of, step_seconds
from ctcdraft.model.draft.tree import Tree


def test_the_budget_is_what_pays_most_per_second():
    tree = Tree(np.arange(4), np.full(4, -1), np.ones(4, np.int64), np.array([0.6, 0.3, 0.09, 0.01], np.float32))
    free = np.ones(5)
    assert best_size(tree, free) == 4
    dear = np.array([1.0, 1.7, 2.4, 3.1, 3.8])
    assert best_size(tree, dear) == 0
    steps = np.array([1.0, 1.2, 1.3, 1.45, 1.6])  # 1, 1.33, 1.46, 1.37, 1.25 per second
    assert best_size(tree, steps) == 2
    doubtful = replace(tree, psi=0.1 * tree.psi)
    assert best_size(doubtful, steps) == 0


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


def test_a_chain_is_a_tree():
    tree = chain_of([7, 8, 9])
    assert tree.walk([7, 8, 1, 0].__getitem__) == ([0, 1], 1)
    assert len(tree.first(2)) == 2
    assert len(chain_of([])) == 0
    assert chain_of([7, 8], 0.5).psi.tolist() == [0.5, 0.25]
