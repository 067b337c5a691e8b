import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lattices import TOPOLOGIES, brute_psi, lattice_from_logits, prefixes, random_lattice

from ctcdraft.model.draft.growth import LatticePrefix
from ctcdraft.model.draft.tree import search
from ctcdraft.model.lattice.candidates import Tables, candidates_of
from ctcdraft.model.lattice.topology import CTC, Topology


@settings(max_examples=50, deadline=None)
@given(T=st.integers(1, 5), V=st.integers(1, 3), nodes=st.integers(1, 12), seed=st.integers(0, 9999))
def test_the_tree_is_the_n_best_prefixes_by_brute_force(T, V, nodes, seed):
    lattice, logits, blank = random_lattice(T, V, seed)
    tree = search(lattice, nodes)
    psi = brute_psi(logits, blank, T)
    for path, value in zip(prefixes(tree), tree.psi, strict=True):
        assert abs(value - psi[path]) < 1e-5
    best = sorted(psi.values(), reverse=True)[:nodes]
    assert np.allclose(sorted(tree.psi, reverse=True), best, atol=1e-5)
    assert all(tree.parents[i] < i for i in range(len(tree)))


@settings(max_examples=30, deadline=None)
@given(T=st.integers(1, 4), V=st.integers(1, 4), nodes=st.integers(1, 20), seed=st.integers(0, 9999))
def test_without_a_blank_psi_is_the_product_of_the_slots(T, V, nodes, seed):
    lattice, logits, _ = random_lattice(T, V, seed, with_blank=False)
    tree = search(lattice, nodes)
    p = logits.softmax(1)
    for path, value in zip(prefixes(tree), tree.psi, strict=True):
        want = np.prod([p[t, c].item() for t, c in enumerate(path)])
        assert abs(value - want) < 1e-5
    assert len(tree) == min(nodes, sum(V**k for k in range(1, T + 1)))


def moving_lattice(T, V, seed, R=4, K=2, topology=CTC):
    """Random slots over a vocabulary, K tokens of which are candidates, with a transition."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    tables = Tables(normal(V, R).numpy(), normal(V, R).numpy() / 2, normal(R).numpy() / 2)
    moved = normal(1, T, R), torch.tensor([int(rng.integers(V))]), tables
    return candidates_of(normal(1, T, V), normal(1, T), min(K, V), topology, moved=moved).lattices()[0]


def emitted(lattice, t, prefix):
    """p_t of all candidates, by token, and of the blank behind a prefix, in float64; and which these are."""
    tokens = lattice.tokens.tolist()
    at = lattice.slot[t].astype(float) + (lattice.context[tokens.index(prefix[-1])] if prefix else lattice.root)
    gate = at * np.clip(at + 3, 0, 6) / 6
    p = np.exp(lattice.log_p[t] + gate @ lattice.key)
    p /= p.sum() + np.exp(lattice.log_rest[t].astype(float))
    blank = 1 / (1 + np.exp(-lattice.log_blank[t] - lattice.blank_key @ gate))
    return dict(zip(tokens, p * (1 - blank), strict=True)), blank, set(tokens)


def brute_starts(T, emitted, topology):
    """{prefix: psi}: the probability that a slot writes the prefix's last token, summed over slots, alignment by
    alignment. emitted(t, output): p_t of all tokens and of the blank, and which tokens may be put forward."""
    psi, band = {}, T if topology.band is None else topology.band

    def go(t, output, previous, p):
        if t == T:
            return
        emission, blank, forward = emitted(t, output)
        if t - len(output) == band:
            emission = {v: p_v / (1 - blank) for v, p_v in emission.items()}
        else:
            go(t + 1, output, -1, p * blank)
            if topology.merge and previous >= 0:
                go(t + 1, output, previous, p * emission[previous])
        for v in forward - ({previous} if topology.merge else set()):
            grown = (*output, v)
            psi[grown] = psi.get(grown, 0.0) + p * emission[v]
            go(t + 1, grown, v, p * emission[v])

    go(0, (), -1, 1.0)
    return psi


@settings(max_examples=60, deadline=None)
@given(T=st.integers(1, 5), V=st.integers(1, 3), topology=TOPOLOGIES, seed=st.integers(0, 9999))
def test_every_topology_is_exact(T, V, topology, seed):
    lattice, logits, blank = random_lattice(T, V, seed, topology=topology)
    table = torch.cat([logits, blank.unsqueeze(1)], 1).softmax(1).numpy()
    psi = brute_starts(T, lambda t, output: (dict(enumerate(table[t, :V])), table[t, V], set(range(V))), topology)
    tree = search(lattice, 30)
    for path, value in zip(prefixes(tree), tree.psi, strict=True):
        assert abs(value - psi[path]) < 1e-5
    assert np.allclose(sorted(tree.psi, reverse=True), sorted(psi.values(), reverse=True)[: len(tree)], atol=1e-5)
    if not topology.merge and topology.band is not None and topology.band < T:
        certain = T - topology.band  # so many tokens are written whatever happens
        assert abs(sum(p for path, p in psi.items() if len(path) == certain) - 1) < 1e-9


def test_a_band_of_nothing_is_a_head_without_a_blank():
    banded, logits, _ = random_lattice(4, 3, seed=1, topology=Topology(merge=False, band=0))
    one, other = search(banded, 30), search(lattice_from_logits(logits.float(), None, 3), 30)
    assert np.array_equal(one.tokens, other.tokens)
    assert np.allclose(one.psi, other.psi, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(1, 4),
    V=st.integers(1, 4),
    K=st.integers(1, 4),
    topology=TOPOLOGIES,
    seed=st.integers(0, 9999),
)
def test_a_transition_lattice_is_exact(T, V, K, topology, seed):
    lattice = moving_lattice(T, V, seed, K=K, topology=topology)
    psi = brute_starts(T, lambda t, output: emitted(lattice, t, output), topology)
    tree = search(lattice, 40)
    for path, value in zip(prefixes(tree), tree.psi, strict=True):
        assert abs(value - psi[path]) < 1e-5
    best = sorted(psi.values(), reverse=True)[: len(tree)]
    assert np.allclose(sorted(tree.psi, reverse=True), best, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    T=st.integers(1, 6), V=st.integers(1, 3), prune=st.floats(0, 0.5), topology=TOPOLOGIES, seed=st.integers(0, 9999)
)
def test_pruning_takes_no_more_of_psi_than_it_may(T, V, prune, topology, seed):
    lattice = moving_lattice(T, V, seed, topology=topology)
    exact = dict(zip(prefixes(whole := search(lattice, 10**4)), whole.psi, strict=True))
    tree = search(lattice, 10**4, prune=prune)
    kept = dict(zip(prefixes(tree), tree.psi, strict=True))
    for path, psi in exact.items():
        ancestors = [1.0, *(kept.get(path[:k], 0.0) for k in range(1, len(path)))]
        assert psi - prune * sum(ancestors) - 1e-5 < kept.get(path, 0.0) < psi + 1e-5
    best = sorted(kept.values(), reverse=True)[:10]
    assert np.allclose(search(lattice, 10, prune=prune).psi, best, atol=1e-5)  # of those that are left


def test_pruning_leaves_out_what_nothing_but_blanks_leads_to():
    """Half of what the first slot writes is a blank, behind which the second writes token 1, as nothing else does."""
    logits, blank = torch.tensor([[0.0, -30.0], [-30.0, 0.0]]), torch.tensor([0.0, -30.0])
    lattice = lattice_from_logits(logits, blank, 2, Topology(merge=False, band=1))
    for prune, want in ((0.0, [(0,), (0, 1), (1,)]), (0.49, [(0,), (0, 1), (1,)]), (0.51, [(0,), (0, 1)])):
        tree = search(lattice, 9, prune=prune)
        assert sorted(path for path, psi in zip(prefixes(tree), tree.psi, strict=True) if psi > 0.01) == want


def test_a_chain_has_one_leaf_and_follows_the_best_child():
    lattice, logits, blank = random_lattice(5, 3, seed=4)
    chain = search(lattice, 4, chain=True)
    assert list(chain.parents) == list(range(-1, len(chain) - 1))
    psi = brute_psi(logits, blank, 5)
    path = ()
    for token in chain.tokens:
        children = {c: psi.get((*path, c), 0.0) for c in range(3)}
        assert token == max(children, key=children.get)
        path = (*path, int(token))


def test_depth_limit_and_leaves_stop_growth():
    lattice, _, _ = random_lattice(5, 3, seed=5)
    assert search(lattice, 50, max_depth=2).depths.max() == 2
    assert len(search(lattice, 50, max_depth=0)) == 0
    tree = search(lattice, 60, leaves=np.array([1]))
    assert 1 in tree.tokens
    assert not any(parent >= 0 and tree.tokens[parent] == 1 for parent in tree.parents)


def test_all_blank_gives_no_draft_that_is_believed():
    logits, blank = torch.full((4, 3), -200.0), torch.zeros(4)
    assert len(search(lattice_from_logits(logits, blank, 3), 8)) == 0


def test_walk_follows_the_targets_and_ancestors_see_only_their_path():
    lattice, _, _ = random_lattice(4, 3, seed=6)
    tree = search(lattice, 12)
    rng = np.random.default_rng(0)
    for _ in range(50):
        targets = rng.integers(0, 3, len(tree) + 1)
        at, want = -1, []
        while True:
            child = [i for i in range(len(tree)) if tree.parents[i] == at and tree.tokens[i] == targets[at + 1]]
            if not child:
                break
            at = child[0]
            want.append(at)
        assert tree.walk(targets.__getitem__) == (want, targets[at + 1])
    allowed = tree.ancestors()
    for i in range(len(tree)):
        chain, at = {0, i + 1}, tree.parents[i]
        while at >= 0:
            chain.add(at + 1)
            at = tree.parents[at]
        assert set(np.flatnonzero(allowed[i + 1])) == chain


def test_top_k_keeps_the_full_normaliser():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(7))
    lattice = lattice_from_logits(logits, torch.zeros(3), 4)
    full = torch.cat([logits, torch.zeros(3, 1)], 1).softmax(1)
    prefix = LatticePrefix(lattice)
    prefix.row()
    assert np.allclose(prefix.state.p, full[:, lattice.tokens], atol=1e-6)
    assert len(lattice.tokens) == 4
    peak = full[:, :50].amax(dim=0)
    assert set(lattice.tokens) == set(peak.topk(4).indices.tolist())
