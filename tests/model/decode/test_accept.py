"""Candidates that were drawn: the outcome has the base's distribution, and what would spoil it is seen to."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ctcdraft.model.base.sampling import Sampling
from ctcdraft.model.decode import accept
from ctcdraft.model.decode.accept import accept_drawn
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.draft.growth import Row, Rule, grow

pytestmark = pytest.mark.slow

P = torch.tensor([[0.1, 0.35, 0.3, 0.05, 0.2]], dtype=torch.float64).log()
Q = np.array([0.45, 0.1, 0.2, 0.2, 0.05])
DRAWS = 20000


class Fixed:
    """Whatever stands before, Q follows."""

    def __init__(self, q):
        self.q = q

    def row(self):
        return Row(np.arange(5), self.q)

    def followed_by(self, column, q):
        return self


@cache
def drawn(q, k):
    """The tree behind every position."""
    config = DraftConfig("ranked", k=list(k), proposal="sampled", prompt_lookup=0)
    rules = (Rule(config, Sampling(1.0), 7, position, None) for position in range(DRAWS))
    no_ends = np.array([], np.int64)
    return [grow(Fixed(np.array(q)), rule, config.most_nodes, max_depth=9, leaves=no_ends) for rule in rules]


def outcomes(q=Q, k=(3,), spoil=lambda tree: tree):
    """What the first token is, over many positions."""
    counts, accepted = np.zeros(5), 0
    for position, tree in enumerate(drawn(tuple(q), k)):
        request = SimpleNamespace(length=position, seed=7, sampling=Sampling(1.0), seen_V=None)
        tree = spoil(tree)
        path, bonus = accept_drawn(tree, request, lambda row: P)
        counts[int(tree.tokens[path[0]]) if path else bonus] += 1
        accepted += bool(path)
    return counts, accepted


@cache
def honest(k):
    return outcomes(k=k)


def chi_square(counts):
    expected = P.exp().numpy()[0] * DRAWS
    statistic = torch.tensor(((counts - expected) ** 2 / expected).sum())
    return torch.special.gammaincc(torch.tensor(2.0, dtype=torch.float64), statistic / 2).item()


@pytest.mark.parametrize("k", [(1,), (3,), (5,), (2, 2)], ids=str)
def test_the_first_token_has_the_bases_distribution(k):
    counts, accepted = honest(k)
    assert chi_square(counts) > 1e-3
    assert accepted > 0.45 * DRAWS


def test_more_candidates_are_accepted_more_often():
    assert honest((3,))[1] > 1.1 * honest((1,))[1]


def test_a_head_that_is_right_is_always_accepted():
    assert outcomes(q=P.exp().numpy()[0], k=(1,))[1] == DRAWS


def sorted_by_q(tree):
    """Not in the order in which they were drawn."""
    order = np.argsort(-Q[tree.tokens], kind="stable")
    return type(tree)(tree.tokens[order], tree.parents, tree.depths, tree.psi, proposals=tree.proposals)


def as_if_drawn_from_another(tree):
    proposals = {row: (tokens, np.full(5, 0.2)) for row, (tokens, _) in tree.proposals.items()}
    return type(tree)(tree.tokens, tree.parents, tree.depths, tree.psi, proposals=proposals)


@pytest.mark.parametrize("spoil", [sorted_by_q, as_if_drawn_from_another])
def test_what_was_not_drawn_as_it_says_is_seen(spoil):
    assert chi_square(outcomes(spoil=spoil)[0]) < 1e-6


@pytest.mark.parametrize("kept", ["r", "q"])
def test_an_acceptance_that_forgets_what_it_refused_is_seen(monkeypatch, kept):
    def forgetful(r_V, q_V, token):
        r, q = true(r_V, q_V, token)
        return (r_V, q) if kept == "r" else (r, q_V)

    true = accept.refused
    monkeypatch.setattr(accept, "refused", forgetful)
    assert chi_square(outcomes()[0]) < 1e-6
