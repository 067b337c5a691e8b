"""Copies: against a brute-force search of matches, by hand, and through the decoder."""

from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from drafting import HEADS, SETTINGS, prompts, random_head

from ctcdraft.model import Decoder, DraftConfig
from ctcdraft.model.base.sampling import Sampling
from ctcdraft.model.decode.step import EagerStep
from ctcdraft.model.draft import prompt_lookup
from ctcdraft.model.draft.drafter import Drafter, Frontier
from ctcdraft.model.draft.prompt_lookup import LONGEST_MATCH, LONGEST_RUN, match
from ctcdraft.model.draft.tree import EMPTY, Tree, chosen

RATES = np.full((3, LONGEST_RUN + 1), [[0.8], [0.4], [0.9]], np.float32)  # of first, second and later tokens
RATES[0, 1] = 0.5  # of a first token, behind a match of one


def all_copies(head, read, longest):
    with patch.object(prompt_lookup, "rates_at", lambda temperature: RATES):
        return prompt_lookup.with_copies(head, read, longest)


def with_copies(head, read, *, nodes, longest, **limits):
    return chosen(all_copies(head, read, longest), nodes, **limits)


def tree(tokens, parents, depths, psi):
    return Tree(*(np.array(x, np.int64) for x in (tokens, parents, depths)), np.array(psi, np.float32))


def paths(found):
    """{path: psi}"""
    out = []
    for i in range(len(found)):
        parent = int(found.parents[i])
        assert parent < i
        out.append((*(out[parent] if parent >= 0 else ()), int(found.tokens[i])))
        assert found.depths[i] == len(out[i])
    return dict(zip(out, found.psi.tolist(), strict=True))


def brute_force_match(read, other_than):
    best = (-1, 0)
    for end in range(len(read) - 1):
        common = 0
        while common <= end and common < LONGEST_MATCH and read[end - common] == read[-1 - common]:
            common += 1
        if common and read[end + 1] != other_than and common >= best[1]:
            best = (end + 1, common)
    return best


def test_a_match_is_the_latest_of_the_longest():
    rng = np.random.default_rng(0)
    for _ in range(300):
        read = rng.integers(0, rng.integers(2, 5), rng.integers(1, 90))
        first = match(read, -1)
        assert first == brute_force_match(read, -1)
        if first[1]:
            other = match(read, read[first[0]])
            assert other == brute_force_match(read, read[first[0]])


def test_a_copy_goes_on_into_itself():
    read = np.array([9, 1, 2, 3, 1, 2, 3, 1])
    assert match(read, -1) == (5, 4)
    assert all_copies(EMPTY, read, 8).tokens[:8].tolist() == [2, 3, 1, 2, 3, 1, 2, 3]


def test_copies_alone_are_a_tree_of_two_chains():
    read = np.array([5, 7, 8, 1, 7, 6, 5, 7])  # 5 7 was followed by 8 1 7 .., and 7 by 6 5 7 ..
    found = with_copies(EMPTY, read, nodes=6, longest=3)
    want = {(8,): 0.8, (8, 1): 0.72, (8, 1, 7): 0.648, (6,): 0.08, (6, 5): 0.072, (6, 5, 7): 0.0648}
    assert paths(found) == pytest.approx(want)
    assert list(paths(found)) == list(want)  # the likeliest first
    assert found.sources(range(6)) == ["lookup"] * 6


def test_a_node_that_both_propose_is_one_and_the_head_shares_what_copies_leave():
    read = np.array([3, 7, 8, 1, 4, 7])  # 7 was followed by 8 1 4 ..
    head = tree([8, 6, 1, 2], [-1, -1, 0, 0], [1, 1, 2, 2], [0.6, 0.3, 0.3, 0.12])
    found = with_copies(head, read, nodes=9, longest=2)
    p8 = 0.5 + 0.5 * 0.6
    want = {(8,): p8, (6,): 0.5 * 0.3, (8, 1): p8 * (0.9 + 0.1 * 0.5), (8, 2): p8 * 0.1 * 0.2}
    assert paths(found) == pytest.approx(want)
    by_path = dict(zip(paths(found), found.sources(range(4)), strict=True))
    assert by_path == {(8,): "both", (8, 1): "both", (6,): "head", (8, 2): "head"}


def test_any_tree_stays_one_with_the_likeliest_nodes_first():
    rng = np.random.default_rng(1)
    for _ in range(300):
        read = rng.integers(0, 4, rng.integers(1, 40))
        tokens, parents, depths, psi = [], [], [], []
        for _ in range(rng.integers(0, 12)):
            parent = int(rng.integers(-1, len(tokens)))
            token = int(rng.integers(0, 4))
            rest = (psi[parent] if parent >= 0 else 1.0) - sum(
                p for p, a in zip(psi, parents, strict=True) if a == parent
            )
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
                psi.append(rest * rng.random())
        head, options = tree(tokens, parents, depths, psi), {"longest": int(rng.integers(1, 9))}
        whole = with_copies(head, read, nodes=99, **options)
        assert (np.diff(whole.psi) <= 0).all()
        assert len(paths(whole)) == len(whole)  # no path twice
        assert set(paths(head)) <= set(paths(whole))
        for node in range(-1, len(whole)):
            mine = whole.psi[whole.parents == node].sum()
            assert mine <= (whole.psi[node] if node >= 0 else 1.0) + 1e-5
        few = with_copies(head, read, nodes=5, **options)
        assert paths(few) == paths(whole.first(5))
        chain = with_copies(head, read, nodes=5, chain=True, **options)
        assert (chain.parents == np.arange(len(chain)) - 1).all()


def test_depth_and_ends_of_sequence_limit_copies():
    read = np.array([1, 2, 9, 3, 1])
    assert with_copies(EMPTY, read, nodes=9, longest=8, max_depth=2).tokens.tolist() == [2, 9]
    assert with_copies(EMPTY, read, nodes=9, longest=8, max_depth=0).tokens.tolist() == []
    assert with_copies(EMPTY, read, nodes=9, longest=8, leaves=np.array([9])).tokens.tolist() == [2, 9]
    assert len(with_copies(EMPTY, np.array([4]), nodes=9, longest=8)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "fixed"),  # with a penalty there are eager steps alone
    [(s, fixed) for s in SETTINGS for fixed in (False, True) if not (fixed and "repetition_penalty" in s)],
    ids=str,
)
def test_lookup_alone_and_beside_a_head_changes_no_token(base, settings, fixed):
    asked, seeds = [prompt * 3 for prompt in prompts(3, seed=9)], [0, 1, 2]
    want = Decoder(base).generate(asked, 40, seed=seeds, **settings)
    for head, (kind, nodes, copied_tokens) in product(
        (None, random_head(HEADS[0], base), random_head(HEADS[1], base)),
        (("tree", 12, 32), ("tree", 3, 5), ("chain", 6, 32)),
    ):
        decoder = Decoder(base, head, DraftConfig(kind, nodes, prompt_lookup=copied_tokens, budget="fixed"))
        decoder.graphs = fixed
        groups = [([p], [s]) for p, s in zip(asked, seeds, strict=True)] if fixed else [(asked, seeds)]  # fixed: alone
        outs = [out for group, own in groups for out in decoder.generate(group, 40, seed=own, **settings)]
        assert [(got.tokens, got.finish) for got in outs] == [(plain.tokens, plain.finish) for plain in want]
        assert [sum(got.accepted_from.values()) for got in outs] == [sum(got.accepted) for got in outs]
    assert settings or any(got.accepted_from["lookup"] for got in outs)


def test_a_loop_is_read_in_few_steps(base, monkeypatch):
    """A base that goes round in circles: every copy is right, and as long as it may be."""
    prompt = prompts(1, seed=3)[0]
    loop = [11, 12, 13]
    monkeypatch.setattr(EagerStep, "_choose", lambda self, logits, places: [loop_at(*place) for place in places])

    def loop_at(request, tree, row):
        depth = 0 if row == 0 else int(tree.depths[row - 1])
        return loop[(request.length - len(request.prompt) + depth) % 3]

    drafted, plain = Decoder(base, None, DraftConfig("tree", 32, prompt_lookup=16, budget="fixed")), Decoder(base)
    drafted.graphs = plain.graphs = False  # the eager step's choice is the one that is replaced
    out = drafted.generate(prompt, 60, eos=[])
    assert out.tokens == (loop * 20)
    assert max(out.accepted) == 16
    assert out.accepted_from == {"lookup": sum(out.accepted)}
    assert plain.generate(prompt, 60, eos=[]).steps == 59


def test_no_lookup_is_the_heads_own_tree(base):
    head = random_head(HEADS[0], base)
    without = Decoder(base, head, DraftConfig("tree", 12, prompt_lookup=0, budget="fixed"))
    out = without.generate(prompts(1, seed=9)[0] * 3, 30)
    assert set(out.accepted_from) <= {"head"}
    assert Decoder(base, None, DraftConfig(prompt_lookup=0, budget="fixed")).generate([5, 6, 7], 10).accepted == [0] * 9
    with pytest.raises(ValueError, match="prompt_lookup\n  Input should be greater than or equal to 0"):
        DraftConfig(prompt_lookup=-1)


def test_copies_are_worth_less_the_warmer_the_base_samples():
    greedy, warm, hot = (prompt_lookup.rates_at(temperature)[:, 1:] for temperature in (0.0, 0.5, 1.0))
    assert np.allclose(greedy[0, : len(prompt_lookup.FIRST)], prompt_lookup.FIRST)
    assert (hot < warm).all()
    assert (warm < greedy).all()
    assert np.allclose(hot / (1 - hot) / (greedy / (1 - greedy)), np.exp(-prompt_lookup.SAMPLED), rtol=1e-3)
    read, drafter = np.array([7, 2, 9, 5, 7]), Drafter(DraftConfig(nodes=3))
    cold, sampled = (drafter.tree(EMPTY, Frontier(read, (), sampling=Sampling(t))) for t in (0.0, 1.0))
    assert cold.tokens.tolist() == sampled.tokens.tolist() == [2, 9, 5]
    assert (sampled.psi < cold.psi).all()
