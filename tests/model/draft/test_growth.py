"""Trees that a rule grows, by brute force on tiny lattices."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lattices import TOPOLOGIES, brute_psi, prefixes, random_lattice

from ctcdraft.model.base.sampling import Sampling, gumbel_of
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.draft.growth import (
    BINS,
    GAMMA,
    TAIL,
    LatticePrefix,
    Row,
    Rule,
    ScoredPrefix,
    acceptance_bound,
    behind,
    grow,
    prefix_of,
)
from ctcdraft.model.draft.tree import search
from ctcdraft.model.lattice.topology import CTC

NO_LEAVES = np.array([], np.int64)
GREEDY, SAMPLED = Sampling(), Sampling(1.0)


def grown(lattice, config, sampling=GREEDY, nodes=12, *, seed=0, least=None, max_depth=99, leaves=NO_LEAVES):
    rule = Rule(config, sampling, seed, 10, least)
    return grow(LatticePrefix(lattice), rule, nodes, max_depth=max_depth, leaves=leaves)


def conditionals(logits, blank, T):
    """q(c | g) of every prefix, by enumeration."""
    psi = brute_psi(logits, blank, T)
    rows = {}
    for prefix, value in psi.items():
        rows.setdefault(prefix[:-1], {})[prefix[-1]] = value / psi.get(prefix[:-1], 1.0)
    return rows


@settings(max_examples=40, deadline=None)
@given(T=st.integers(1, 5), V=st.integers(1, 4), seed=st.integers(0, 9999), topology=TOPOLOGIES)
def test_without_options_it_is_the_search(T, V, seed, topology):
    lattice, _, _ = random_lattice(T, V, seed, topology=topology)
    for kind in ("tree", "chain"):
        want = search(lattice, 9, chain=kind == "chain")
        tree = grown(lattice, DraftConfig(kind), nodes=9)
        assert len(tree) == len(want)
        assert np.allclose(tree.psi, want.psi, atol=1e-6)
        both = dict(zip(prefixes(want), want.psi, strict=True))
        for path, psi in zip(prefixes(tree), tree.psi, strict=True):
            assert abs(both.get(path, psi) - psi) < 1e-6


@settings(max_examples=40, deadline=None)
@given(T=st.integers(2, 4), V=st.integers(1, 3), seed=st.integers(0, 9999), topology=TOPOLOGIES, scored=st.booleans())
def test_behind_tokens_stands_what_was_believed_of_them(T, V, seed, topology, scored):
    """psi(cd) / psi(c) of every d behind every c, of a lattice and of a tree whose nodes are scored."""
    lattice, _, _ = random_lattice(T, V, seed, topology=topology)
    everything, config = search(lattice, 500), DraftConfig(nodes=500)
    psi = {(): 1.0} | dict(zip(prefixes(everything), everything.psi.astype(float), strict=True))
    for tokens in psi:
        first = prefix_of(behind(everything if scored else lattice, tokens))
        tree = grow(first, Rule(config, GREEDY, 0, 10, None), 500, max_depth=99, leaves=NO_LEAVES)
        found = dict(zip(prefixes(tree), tree.psi, strict=True))
        for path, value in psi.items():
            if value > 1e-5 and len(path) > len(tokens) and path[: len(tokens)] == tokens:
                assert abs(found[path[len(tokens) :]] - value / psi[tokens]) < 1e-3
    assert (
        len(grow(prefix_of(behind(lattice, [99])), Rule(config, GREEDY, 0, 10, None), 9, max_depth=9, leaves=NO_LEAVES))
        == 0
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999), trust=st.floats(0.2, 2.0), doubt=st.floats(0, 0.9), temperature=st.floats(0.3, 2.0))
def test_shared_noise_ranks_by_belief_and_the_noise_of_the_position(seed, trust, doubt, temperature):
    lattice, logits, blank = random_lattice(3, 4, seed)
    rows = conditionals(logits, blank, 3)
    worth = {(): 1.0}
    for length in range(1, 4):
        for prefix in itertools.product(range(4), repeat=length):
            row = rows.get(prefix[:-1], {})
            if prefix[-1] not in row or prefix[:-1] not in worth:
                continue
            noise = gumbel_of(np.arange(4), seed, 10 + length - 1)
            score = {c: (np.log(q) / temperature + noise[c]) / trust for c, q in row.items()}
            drawn = np.exp(score[prefix[-1]]) / sum(map(np.exp, score.values()))
            own = row[prefix[-1]] ** (1 / temperature) / sum(q ** (1 / temperature) for q in row.values())
            share = (1 - doubt) * drawn + doubt * own
            worth[prefix] = worth[prefix[:-1]] * sum(row.values()) * share
    config = DraftConfig(proposal="shared", trust=trust, doubt=doubt)
    tree = grown(lattice, config, Sampling(temperature), 10, seed=seed)
    best = sorted((value for prefix, value in worth.items() if prefix), reverse=True)[:10]
    assert np.allclose(tree.psi, best, rtol=1e-3, atol=1e-7)
    for path, psi in zip(prefixes(tree), tree.psi, strict=True):
        assert np.isclose(worth[path], psi, rtol=1e-3, atol=1e-7)


def test_a_sure_base_that_is_the_head_is_followed_to_the_end():
    """With the head's own belief as the base's distribution the best child by shared noise is always the one drawn."""
    lattice, logits, _ = random_lattice(4, 6, 3, with_blank=False)
    log_p = logits.log_softmax(1).numpy()
    for seed in range(20):
        chain = grown(lattice, DraftConfig("chain", proposal="shared", trust=0.05), SAMPLED, 4, seed=seed)
        noise = np.stack([gumbel_of(np.arange(6), seed, 10 + depth) for depth in range(4)])
        assert chain.tokens.tolist() == (log_p + noise).argmax(axis=1).tolist()


@pytest.mark.slow
def test_cape_has_a_chain_and_more_beside_it_where_the_head_is_less_sure():
    for seed in range(6):
        lattice, logits, blank = random_lattice(4, 9, seed, sharpness=3.0)
        rows, tree = conditionals(logits, blank, 4), grown(lattice, DraftConfig("cape"), nodes=99)
        main = ()
        while (children := [p for p in prefixes(tree) if p[:-1] == main]) and len(main) < 4:
            row = rows[main]
            wanted = next(count for below, count in BINS if max(row.values()) < below)
            assert {p[-1] for p in children} == set(sorted(row, key=row.get, reverse=True)[:wanted])
            main = (*main, max(row, key=row.get))
        assert all(p[:-1] == main[: len(p) - 1] for p in prefixes(tree))  # all else ends at once


@pytest.mark.parametrize("proposal", ["best", "sampled"])
def test_a_ranked_layout_has_its_candidates_at_every_node(proposal):
    config = DraftConfig("ranked", k=[3, 2, 1], proposal=proposal, prompt_lookup=0)
    lattice, logits, blank = random_lattice(4, 6, 1)
    tree = grown(lattice, config, SAMPLED, config.most_nodes)
    assert config.most_nodes == len(tree) == 3 + 6 + 6
    counts = [0] * 3
    for path in [(), *prefixes(tree)]:
        below = sum(p[:-1] == path for p in prefixes(tree))
        assert below == ([3, 2, 1][len(path)] if len(path) < 3 else 0)
        counts[min(len(path), 2)] += 1
    if proposal == "sampled":
        rows = conditionals(logits, blank, 4)
        for row, (tokens, q) in tree.proposals.items():
            want = rows[prefixes(tree)[row - 1] if row else ()]
            assert np.allclose(q, [want.get(t, 0.0) / sum(want.values()) for t in tokens.tolist()], atol=1e-5)


def test_candidates_are_drawn_without_replacement():
    """The first of a row is drawn from q, the second from q without the first: counted over 20,000 positions."""
    q = np.array([0.5, 0.3, 0.2])
    config = DraftConfig("ranked", k=[2], proposal="sampled", prompt_lookup=0)
    counts = np.zeros((3, 3))
    for position in range(20000):
        picked = Rule(config, SAMPLED, 0, position, None)(Row(np.arange(3), q), 0)
        counts[tuple(picked.columns)] += 1
    want = np.array([[0 if i == j else q[i] * q[j] / (1 - q[i]) for j in range(3)] for i in range(3)])
    assert np.abs(counts / 20000 - want).max() < 0.01


def test_the_bound_of_adaedl_is_that_of_the_entropy():
    assert acceptance_bound(np.array([1.0])) == 1.0
    assert np.isclose(acceptance_bound(np.full(4, 0.25)), 1 - np.sqrt(GAMMA * np.log(4)))
    tail = 0.25 * np.log(4 * TAIL)  # what is missing is spread over many tokens
    assert np.isclose(acceptance_bound(np.full(3, 0.25)), 1 - np.sqrt(GAMMA * (0.75 * np.log(4) + tail)))
    assert acceptance_bound(np.zeros(1)) > 0


def test_of_a_row_that_is_cut_short_the_bound_is_no_higher():
    """A beam scores 32 children of a node, and a lattice has some hundred tokens: those left out are no certainty."""
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 3.0):
        q = np.sort(rng.dirichlet(np.full(5000, 1.0 / 5000 * 10**scale)))[::-1]
        assert acceptance_bound(q[:32]) <= acceptance_bound(q[:512]) <= acceptance_bound(q) + 1e-9


def test_a_higher_threshold_never_drafts_more():
    for seed in range(20):
        lattice, _, _ = random_lattice(4, 6, seed)
        sizes = [
            len(grown(lattice, DraftConfig(stop="adaedl"), nodes=30, least=least)) for least in np.linspace(0, 1.01, 9)
        ]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == len(search(lattice, 30))
        assert sizes[-1] == 0


def test_a_scored_tree_grows_as_its_lattice_does():
    lattice, _, _ = random_lattice(3, 4, 5)
    scored = search(lattice, 999)
    for config in (DraftConfig(), DraftConfig("cape"), DraftConfig(proposal="shared")):
        want = grown(lattice, config, SAMPLED, 10)
        tree = grow(ScoredPrefix(scored), Rule(config, SAMPLED, 0, 10, None), 10, max_depth=99, leaves=NO_LEAVES)
        assert np.allclose(tree.psi, want.psi, rtol=1e-3)


def test_depth_and_ends_are_kept():
    lattice, _, _ = random_lattice(4, 4, 2)
    assert len(grown(lattice, DraftConfig(), nodes=50, max_depth=0)) == 0
    assert grown(lattice, DraftConfig(), nodes=50, max_depth=2).depths.max() == 2
    tree = grown(lattice, DraftConfig(), nodes=99, leaves=np.array([1]))
    assert (tree.tokens == 1).any()
    assert not any(1 in path[:-1] for path in prefixes(tree))


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=3), Sampling(0.8, top_p=0.7)], ids=str)
def test_beliefs_are_cut_as_the_bases_probabilities_are(sampling):
    q = np.random.default_rng(0).dirichlet(np.ones(12), 20)
    for row in q:
        want = sampling.probabilities(torch.tensor(row).log().unsqueeze(0))[0].numpy()
        config = DraftConfig("ranked", proposal="sampled", prompt_lookup=0)
        got = Rule(config, sampling, 0, 0, None)(Row(np.arange(12), row), 0).q
        assert np.allclose(got, want, atol=1e-9)


def test_noise_of_another_position_is_other_noise():
    """What makes shared noise pay: with that of the next position the same child is no more likely than by chance."""
    q, config = np.full(50, 0.02), DraftConfig(proposal="shared")
    right = wrong = 0
    for position in range(400):
        drawn = int(gumbel_of(np.arange(50), 0, position).argmax())
        row = Row(np.arange(50), q)
        right += int(Rule(config, SAMPLED, 0, position, None)(row, 0).columns[0]) == drawn
        wrong += int(Rule(config, SAMPLED, 0, position + 1, None)(row, 0).columns[0]) == drawn
    assert right == 400
    assert wrong < 40


def test_a_lattice_whose_prefixes_are_unlikely_keeps_its_digits():
    """Forty tokens deep, where psi itself is below what float32 holds of a product."""
    lattice, logits, _ = random_lattice(40, 30, 0, with_blank=False, sharpness=0.3)
    chain = grown(lattice, DraftConfig("chain", proposal="shared"), SAMPLED, 40)
    assert len(chain) == 40
    p, prefix = logits.softmax(1), LatticePrefix(lattice)
    for depth, token in enumerate(chain.tokens.tolist()):
        row = prefix.row()
        assert np.allclose(row.q, p[depth], atol=1e-5)
        column = int(np.flatnonzero(row.tokens == token)[0])
        prefix = prefix.followed_by(column, row.q[column])


def test_a_config_that_cannot_be_kept_is_refused():
    for bad, words in (
        ({"kind": "forest"}, "kind\n  Input should be 'tree', 'chain', 'cape' or 'ranked'"),
        ({"proposal": "sampled"}, "needs draft.kind=ranked"),
        ({"graft": ["moss"]}, "Input should be 'phrases'"),
        ({"trust": 0.0}, "trust\n  Input should be greater than 0"),
        ({"stop": "now"}, "'none' or 'adaedl'"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(DraftConfig(), **bad)
    assert CTC.merge


def chains_of(bounds, rows, least):
    """Nodes and accepted tokens that chains through these rows promise, each ending where a bound is too low."""
    nodes = accepted = 0.0
    for row_bounds, q in zip(bounds, rows, strict=True):
        psi = 1.0
        for bound, row in zip(row_bounds, q, strict=True):
            if bound < least:
                break
            psi *= row.max()
            nodes, accepted = nodes + 1, accepted + psi
    return nodes, accepted


def test_ends_that_entropy_chose_keep_more_than_ends_by_chance():
    """Negative control: the same bounds given to other rows accept less for as many nodes."""
    rng = np.random.default_rng(0)
    rows = np.array([[rng.dirichlet(np.full(8, 10 ** rng.uniform(-1.5, 0.5))) for _ in range(5)] for _ in range(400)])
    bounds = np.array([[acceptance_bound(q) for q in chain] for chain in rows])
    nodes, accepted = chains_of(bounds, rows, 0.72)
    mixed = rng.permutation(bounds.ravel()).reshape(bounds.shape)
    other_nodes, other_accepted = chains_of(mixed, rows, 0.72)
    assert 0.5 < nodes / other_nodes < 2
    assert accepted / nodes > 1.2 * other_accepted / other_nodes


def test_cape_with_its_bins_reversed_promises_less():
    """Negative control: as many candidates, most of them where the head is surest."""
    rng = np.random.default_rng(0)
    rows = sorted((rng.dirichlet(np.full(12, 10 ** rng.uniform(-1.5, 0.5))) for _ in range(600)), key=max)
    counts = [len(Rule(DraftConfig("cape"), GREEDY, 0, 0, None)(Row(np.arange(12), q), 0).columns) for q in rows]
    assert counts == sorted(counts, reverse=True)

    def beside(counts):
        return sum(np.sort(q)[-count:-1].sum() for q, count in zip(rows, counts, strict=True))

    assert beside(counts) > 1.25 * beside(counts[::-1])
