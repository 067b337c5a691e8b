"""Phrases and siblings in draft trees, by brute force."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lattices import prefixes

from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.draft.drafter import Drafter, Frontier
from ctcdraft.model.draft.grafts import LENGTH, MOST_KEYS, PER_KEY, Phrases, grafted, siblings, tails
from ctcdraft.model.draft.tree import EMPTY, PHRASES, SIBLINGS, Tree


def tree_of(paths, psi=0.5):
    """The tree that holds these paths, psi a power of the depth."""
    known = sorted({path[:n] for path in paths for n in range(1, len(path) + 1)}, key=len)
    number = {path: n for n, path in enumerate(known)}
    rows = [(path[-1], number.get(path[:-1], -1), len(path)) for path in known]
    tokens, parents, depths = np.array(rows, np.int64).reshape(-1, 3).T
    return Tree(tokens, parents, depths, (psi**depths).astype(np.float32))


def test_a_pool_keeps_the_newest_phrases_of_a_token():
    pool, text = Phrases(), np.arange(40) % 7
    pool.learn(text[:20])
    pool.learn(text)
    assert list(pool.behind[3]) == [tuple((4 + i) % 7 for i in range(LENGTH))]
    for n in range(PER_KEY + 5):
        pool.add(99, [n] * LENGTH)
    assert [phrase[0] for phrase in pool.behind[99]] == list(range(5, PER_KEY + 5))
    pool.add(99, [7] * LENGTH)  # again: the newest
    assert pool.behind[99][-1][0] == 7
    pool.add(5, [1] * (LENGTH - 1))
    assert (1,) * (LENGTH - 1) not in pool.behind[5]


def test_growing_texts_are_learnt_once_and_whole():
    rng = np.random.default_rng(0)
    text, pool = rng.integers(0, 5, 60), Phrases()
    for end in (3, 9, 10, 31, 60):
        pool.learn(text[:end])
    for at in range(60 - LENGTH):
        assert tuple(text[at + 1 : at + 1 + LENGTH]) in set(pool.behind[int(text[at])])
    whole = Phrases()
    whole.learn(text)
    assert {k: set(v) for k, v in whole.behind.items()} == {k: set(v) for k, v in pool.behind.items()}


def test_a_pool_is_bounded_after_many_steps():
    pool, rng = Phrases(), np.random.default_rng(0)
    for token in rng.integers(0, 10**6, 100_000).tolist():
        pool.add(token, [token] * LENGTH)
    assert len(pool.behind) == MOST_KEYS


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 9999))
def test_grafts_are_a_trie_of_old_and_new_paths(seed):
    rng = np.random.default_rng(seed)
    old = {tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist()) for _ in range(4)}
    tree, pool = tree_of(old), Phrases()
    for _ in range(6):
        pool.add(int(rng.integers(0, 3)), rng.integers(0, 3, LENGTH).tolist())
    both = grafted(tree, pool.paths(tree, 1), PHRASES, 5)
    found = prefixes(both)
    want = set(prefixes(tree))
    for path in [(), *prefixes(tree)]:
        for phrase in list(pool.behind.get(path[-1] if path else 1, []))[-3:]:
            want |= {(*path, *phrase[:n]) for n in range(1, LENGTH + 1) if len(path) + n <= 5}
    assert len(found) == len(set(found))
    assert set(found) == want
    assert all(both.parents[i] < i for i in range(len(both)))
    assert (both.psi[both.parents[both.parents >= 0]] >= both.psi[both.parents >= 0]).all()
    assert all(both.source[: len(tree)] & 1)
    assert all(both.source[len(tree) :] == PHRASES)


def test_without_a_head_phrases_are_the_tree():
    pool = Phrases()
    pool.learn(np.array([1, 2, 3, 4, 5, 6, 7, 8, 1]))
    tree = grafted(EMPTY, pool.paths(EMPTY, 1), PHRASES, 99)
    assert tree.tokens.tolist() == [2, 3, 4, 5, 6, 7]


def test_what_became_of_phrases_is_what_the_next_are_worth():
    pool = Phrases()
    pool.add(1, [2, 3, 4, 5, 6, 7])
    for _ in range(400):
        tree = grafted(EMPTY, pool.paths(EMPTY, 1), PHRASES, 99)
        pool.observe(tree, [0, 1])  # two are accepted, the third is not, of later ones nothing is known
    first, later = pool.rates
    assert first > 0.99
    assert 0.4 < later < 0.6


def test_tails_are_what_the_base_said_where_the_draft_agreed():
    tree = tree_of([(1, 2, 3), (1, 5), (4,)])
    number = {path: n for n, path in enumerate(prefixes(tree))}
    said = {number[1,] + 1: 2, number[1, 2] + 1: 3, number[1, 2, 3] + 1: 9, number[4,] + 1: 8}
    found = {(token, tuple(phrase)) for token, phrase in tails(tree, [], said)}
    assert found == {(1, (2, 3, 9)), (2, (3, 9)), (3, (9,)), (4, (8,))}
    assert {token for token, _ in tails(tree, [number[1,], number[1, 2]], said)} == {3, 4}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9999))
def test_siblings_copy_what_follows_the_same_two_tokens(seed):
    rng = np.random.default_rng(seed)
    tree, root = tree_of({tuple(rng.integers(0, 2, 4).tolist()) for _ in range(2)} | {(0, 1), (1, 1)}), 1
    paths = prefixes(tree)
    whole = set(paths)
    inner = [p for p in paths if any(q[:-1] == p for q in paths)]
    wanted = set()
    for leaf in set(paths) - set(inner):
        twins = [p for p in inner if (root, *p)[-2:] == (root, *leaf)[-2:] and leaf[: len(p)] != p]
        if twins:
            first = min(twins, key=paths.index)
            wanted |= {leaf + q[len(first) :] for q in paths if q[: len(first)] == first and q != first}
    both = grafted(tree, siblings(tree, root), SIBLINGS, 99)
    assert set(prefixes(both)) == whole | wanted
    psi = dict(zip(prefixes(both), both.psi, strict=True))
    for path in wanted:
        assert np.isclose(psi[path], 0.5 ** len(path))  # psi(leaf) psi(sub) / psi(node), by construction


def test_no_tree_is_deeper_than_its_drafter_says():
    """What follows one copy is hung below the end of another: deeper than any copy is long."""
    rng, longest = np.random.default_rng(0), 0
    for graft in (["siblings"], ["phrases"], ["phrases", "siblings"]):
        for _ in range(60):
            drafter = Drafter(DraftConfig(nodes=128, prompt_lookup=8, graft=graft))
            tree = drafter.tree(EMPTY, Frontier(rng.integers(5, 8, 60), (), phrases=Phrases()))
            assert tree.depths.max(initial=0) <= drafter.deepest(0)
            longest = max(longest, tree.depths.max(initial=0))
    assert longest > 8 + LENGTH


def test_a_request_of_its_own_phrases_knows_nothing_of_another():
    drafter = Drafter(DraftConfig(prompt_lookup=0, graft=["phrases"]))
    first, second = Phrases(), Phrases()
    drafter.tree(EMPTY, Frontier(np.arange(20), (), phrases=first))
    tree = drafter.tree(EMPTY, Frontier(np.array([50, 3]), (), phrases=second))
    assert len(tree) == 0
    assert len(drafter.tree(EMPTY, Frontier(np.array([*range(20), 3]), (), phrases=first))) == LENGTH
