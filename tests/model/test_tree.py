import numpy as np
import oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lattices import lattice_from_logits

from ctcdraft.model.lattice import Lattice
from ctcdraft.model.tree import search


def random_lattice(T, V, seed, merge=True, sharpness=1.5):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, V, generator=g) * sharpness
    blank = torch.randn(T, generator=g) if merge else None
    return lattice_from_logits(logits, blank, V), logits.double(), None if blank is None else blank.double()


def prefixes(tree):
    paths = []
    for i in range(len(tree)):
        parent = tree.parents[i]
        paths.append((() if parent < 0 else paths[parent]) + (int(tree.tokens[i]),))
    return paths


def brute_psi(logits, blank, max_length):
    table = oracle.outputs(torch.cat([logits, blank.unsqueeze(1)], 1).log_softmax(1))
    psi = {}
    for output, log_p in table.items():
        for k in range(1, min(len(output), max_length) + 1):
            psi[output[:k]] = psi.get(output[:k], 0.0) + log_p.exp().item()
    return psi


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
def test_without_merging_psi_is_the_product_of_the_slots(T, V, nodes, seed):
    lattice, logits, _ = random_lattice(T, V, seed, merge=False)
    tree = search(lattice, nodes)
    p = logits.softmax(1)
    for path, value in zip(prefixes(tree), tree.psi, strict=True):
        want = np.prod([p[t, c].item() for t, c in enumerate(path)])
        assert abs(value - want) < 1e-5
    assert len(tree) == min(nodes, sum(V**k for k in range(1, T + 1)))


def transition_outputs(emission, blank):
    """Enumerate alignments where slot t's distribution depends on the last token collapsed."""
    T, _, C = emission.shape
    found = {}

    def go(t, output, previous, p):
        if t == T:
            found[output] = found.get(output, 0.0) + p
            return
        row = output[-1] + 1 if output else 0
        go(t + 1, output, -1, p * blank[t, row])
        for c in range(C):
            grown = output if previous == c else (*output, c)
            # A slot that repeats c collapses into it: the last token collapsed so far is c itself.
            go(t + 1, grown, c, p * emission[t, row, c])

    go(0, (), -1, 1.0)
    return found


@settings(max_examples=30, deadline=None)
@given(T=st.integers(1, 4), C=st.integers(1, 3), seed=st.integers(0, 9999))
def test_a_transition_lattice_is_exact(T, C, seed):
    rng = np.random.default_rng(seed)
    raw = rng.dirichlet(np.ones(C + 1), size=(T, C + 1)).astype(np.float32)
    lattice = Lattice(np.arange(C), raw[:, :, :C].copy(), raw[:, :, C].copy(), merge=True)
    tree = search(lattice, 40)
    outputs = transition_outputs(lattice.emission, lattice.blank)
    for path, value in zip(prefixes(tree), tree.psi, strict=True):
        want = sum(p for output, p in outputs.items() if output[: len(path)] == path)
        assert abs(value - want) < 1e-5


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
        assert tree.walk(targets) == want
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
    assert np.allclose(lattice.emission[:, 0], full[:, lattice.tokens], atol=1e-6)
    assert len(lattice.tokens) <= 12
