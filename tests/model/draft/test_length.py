import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctcdraft.model.draft.budget import chain_of
from ctcdraft.model.draft.length import KEEP, MARGIN, PLAIN, SHARE, TRYING, Lengths, LengthsBySize, Line, Worth
from ctcdraft.model.draft.tree import EMPTY, Tree

MOST = 8


def serve(lengths, requests, psi, seconds, draft=0.0, steps=3 * PLAIN + 8, worth=1.0, copied=False, kink=0.0):
    """Steps of a batch whose chains have psi, on an engine of that time per rows: how long each chain was, if the head
    drafted, how much faster than plain decoding all of it was. copied: copies alone would draft the same; kink: seconds
    more of a step with drafts."""
    chosen, tokens, taken = [], 0.0, 0.0
    chain = chain_of(list(range(MOST)), psi)
    without = chain if copied else EMPTY
    for _ in range(steps):
        by_head = not lengths.rests(requests)
        if by_head:
            lengths.drafts.observe(requests, draft)
        chains = lengths.cut([chain if by_head else without] * requests, by_head, alone=lambda _: without)
        rows, psi_N = requests + sum(map(len, chains)), np.concatenate([chain.psi for chain in chains])
        step = seconds(rows) + (rows > requests) * kink
        lengths.observe(requests, rows, step, psi_N, worth * psi_N)
        tokens, taken = tokens + requests + worth * psi_N.sum(), taken + step + by_head * draft
        chosen.append(([len(chain) for chain in chains], by_head))
    return chosen, tokens / taken * seconds(requests) / requests


def padded(lengths, requests, psi, seconds, draft, steps, worth=1.0):
    """As `serve`, where rows are padded to the longest chain: how much faster than plain decoding, if the head drafted,
    how long the chains were."""
    tokens, taken, plain, chosen = 0.0, 0.0, 0.0, []
    for _ in range(steps):
        by_head = not lengths.rests(requests)
        chains = lengths.cut([chain_of(range(MOST), p) if by_head else EMPTY for p in psi[:requests]], by_head)
        rows, psi_N = requests * (1 + max(map(len, chains))), np.concatenate([chain.psi for chain in chains])
        lengths.observe(requests, rows, seconds(rows), psi_N, worth * psi_N)
        if by_head:
            lengths.drafts.observe(requests, draft)
        tokens, taken = tokens + requests + worth * psi_N.sum(), taken + seconds(rows) + by_head * draft
        plain += seconds(requests)
        chosen.append((by_head, max(map(len, chains))))
    return tokens / taken * plain / (requests * steps), chosen


def linear(cost):
    return lambda rows: 1.0 + cost * rows


def best_length(psi, seconds, draft=0.0):
    gains = [(1 + sum(psi**d for d in range(1, n + 1))) / (seconds(1 + n) + draft) for n in range(MOST + 1)]
    return int(np.argmax(gains))


def test_where_rows_cost_nothing_chains_are_whole():
    chosen, _ = serve(Lengths(), 4, 0.5, lambda rows: 1.0, 0.01)
    assert all(lengths == [MOST] * 4 for step, (lengths, _) in enumerate(chosen) if step % PLAIN and step > 1)


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
def test_chains_end_where_a_row_costs_more_than_it_brings(cost):
    psi, seconds = 0.6, linear(cost)
    chosen, _ = serve(Lengths(), 1, psi, seconds)
    assert chosen[-1][0] == [best_length(psi, seconds)]


def test_steps_come_in_few_numbers_of_rows_each_of_which_needs_kernels_of_its_own():
    rng, lengths, kernels, rows_seen = np.random.default_rng(0), Lengths(), set(), []
    for _ in range(400):
        chains = [chain_of(range(20), float(p)) for p in rng.uniform(0.5, 0.98, 8)]
        by_head = not lengths.rests(8)
        if by_head:
            lengths.drafts.observe(8, 0.5)
        kept = lengths.cut(chains, by_head)
        rows = 8 + sum(map(len, kept))
        seconds = 1 + 0.01 * rows + 3.0 * (rows not in kernels)
        kernels.add(rows)
        psi_N = np.concatenate([chain.psi for chain in kept])
        lengths.observe(8, rows, seconds, psi_N, psi_N)
        rows_seen.append(rows)
    drafted = [rows for rows in rows_seen if 16 < rows < 8 * 21]
    assert len(drafted) > 300
    assert all(rows % (4 if rows <= 64 else 8) == 0 for rows in drafted)
    assert len(kernels) < 30
    assert lengths.drafted.at(100) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("draft", [0.3, 0.6, 1.2])
def test_the_dearer_a_draft_is_the_more_of_it_is_verified(draft):
    psi, seconds = 0.8, linear(0.2)
    chosen, _ = serve(Lengths(), 1, psi, seconds, draft)
    assert best_length(psi, seconds) < best_length(psi, seconds, draft)
    assert chosen[-1][0] == [best_length(psi, seconds, draft)]


def test_likely_chains_of_a_batch_are_longer_than_unlikely_ones():
    lengths = Lengths()
    serve(lengths, 2, 0.5, linear(0.2))
    sure, unsure = lengths.cut([chain_of(list(range(MOST)), 0.95), chain_of(list(range(MOST)), 0.2)], True)
    assert len(sure) == MOST
    assert len(unsure) <= 1


@pytest.mark.parametrize(
    ("psi", "seconds", "draft"),
    [
        (0.2, linear(0.1), 1.3),
        (0.2, linear(0.1), 5.0),
        (0.5, lambda rows: rows, 0.1),
        (0.0, linear(0.0), 0.5),
    ],
    ids=["draft of half a step", "draft of two steps", "rows as dear as requests", "nothing accepted"],
)
def test_sixteen_requests_for_which_nothing_pays_lose_two_in_a_hundred_at_most(psi, seconds, draft):
    chosen, speedup = serve(Lengths(), 16, psi, seconds, draft, steps=200)
    assert any(by_head for _, by_head in chosen)
    assert speedup > 0.98


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("requests", [1, 4, 16])
def test_an_engine_that_is_slow_with_any_drafts_gets_none(requests, copied):
    _, speedup = serve(Lengths(), requests, 0.3, linear(0.01), 0.1, 200, copied=copied, kink=0.6)
    assert speedup > 0.98


def looked(lengths, requests, look, steps):
    """Steps of a batch for which nobody has a draft: those that looked for one, and the seconds that it cost."""
    looks, lost = [], 0.0
    for step in range(steps):
        if not lengths.sleeps(requests):
            by_head = not lengths.rests(requests)
            if by_head:
                lengths.drafts.observe(requests, 1.5)
            assert not any(map(len, lengths.cut([EMPTY] * requests, by_head, look)))
            looks.append(step)
            lost += look + by_head * 1.5
        lengths.observe(requests, requests, 1.0, EMPTY.psi, EMPTY.psi)
    return looks, lost


def test_looks_that_find_nothing_become_few_where_they_cost_much():
    looks, lost = looked(Lengths(), 16, 0.25, 1000)
    assert 8 < len(looks) < 60
    assert lost < 0.025 * 1000


def test_looks_that_cost_nothing_go_on():
    looks, _ = looked(Lengths(), 16, 0.0, 300)
    assert looks == list(range(300))


def test_a_batch_that_shrinks_is_looked_at_and_so_is_one_whose_looks_find_something():
    lengths = Lengths()
    looks, _ = looked(lengths, 16, 0.25, 301)
    assert looks[-1] < 300
    assert not lengths.sleeps(4)
    lengths.rests(4)
    kept = lengths.cut([chain_of(range(MOST), 0.9)] * 4, False, 0.25)
    assert max(map(len, kept)) > 0
    assert not any(lengths.sleeps(4) for _ in range(3))


def test_one_request_for_which_whole_chains_pay_gets_them_after_three_steps():
    chosen, speedup = serve(Lengths(), 1, 0.9, lambda rows: 1.0 + 0.02 * rows, 0.2, steps=200)
    assert all(lengths == [MOST] for step, (lengths, _) in enumerate(chosen) if step % PLAIN and step > 3)
    assert speedup > 4


def test_a_head_that_pays_for_few_requests_drafts_as_soon_as_many_become_few():
    lengths, cost = Lengths(), lambda rows: 0.05 + 0.009 * rows
    draft = {16: 0.1, 1: 0.017}
    for requests, pays in ((1, True), (16, False), (1, True), (16, False)):
        chosen, speedup = serve(lengths, requests, 0.65, cost, draft[requests], steps=100)
        assert (sum(by_head for _, by_head in chosen) > 90) == pays
        assert speedup > (1.1 if pays else 0.98)


def test_times_that_change_are_followed():
    lengths, psi = Lengths(), 0.6
    for cost in (0.05, 0.5, 0.0, 0.2):
        chosen, _ = serve(lengths, 1, psi, linear(cost), steps=8 * PLAIN)
        assert chosen[-1][0] == [best_length(psi, linear(cost))]


def test_a_head_that_pays_again_is_found_out():
    lengths, cost = Lengths(), linear(0.05)
    resting, _ = serve(lengths, 4, 0.6, cost, draft=1.5)
    assert sum(by_head for _, by_head in resting[PLAIN:]) <= TRYING * len(resting) + 1
    drafting, _ = serve(lengths, 4, 0.6, cost, draft=0.1, steps=16 * PLAIN)
    assert sum(by_head for _, by_head in drafting[-PLAIN:]) == PLAIN - 1


def test_a_head_that_drafts_what_copies_draft_rests():
    chosen, speedup = serve(Lengths(), 1, 0.9, lambda rows: 1.0, 0.2, copied=True)
    assert sum(by_head for _, by_head in chosen) <= 0.1 * len(chosen)
    assert chosen[-1][0] == [MOST]
    assert speedup > 5


def test_psi_that_promises_too_much_counts_for_what_it_is_worth():
    honest = serve(Lengths(), 1, 0.7, linear(0.2))[0][-1][0]
    boasting = serve(Lengths(), 1, 0.7, linear(0.2), worth=0.5)[0][-1][0]
    assert boasting[0] < honest[0]


def test_what_is_cut_off_counts_for_more_where_psi_promises_too_little():
    """A chain that promises .5, .25, .125 and so on, of which nine in ten tokens come at each place."""
    lengths, cost, honest = Lengths(), linear(0.15), 0.9 ** np.arange(1, MOST + 1)
    for _ in range(100):
        (kept,) = lengths.cut([chain_of(range(MOST), 0.5)], not lengths.rests(1))
        lengths.observe(1, 1 + len(kept), cost(1 + len(kept)), kept.psi, honest[: len(kept)])
    assert best_length(0.5, cost) < 4
    assert best_length(0.9, cost) == MOST == len(kept)


@pytest.mark.parametrize("shared", [True, False])
def test_what_few_requests_showed_psi_to_be_worth_counts_for_many(shared):
    """Chains promise .5, .25, .125 and so on, of which nine in ten tokens come at each place: only whole ones pay for
    sixteen requests."""
    honest, drafting, of_all = 0.9 ** np.arange(1, MOST + 1), 0, LengthsBySize()
    few, many = (of_all.of(requests) if shared else Lengths() for requests in (1, 16))
    for lengths, requests, steps in ((few, 1, 100), (many, 16, 40)):
        for _ in range(steps):
            by_head = not lengths.rests(requests)
            kept = lengths.cut([chain_of(range(MOST), 0.5 if by_head else 0.0)] * requests, by_head)
            rows, psi_N = requests + sum(map(len, kept)), np.concatenate([chain.psi for chain in kept])
            seconds = 1.0 + 0.01 * rows + 0.4 * (rows > requests)
            lengths.observe(requests, rows, seconds, psi_N, np.concatenate([honest[: len(chain)] for chain in kept]))
            lengths.drafts.observe(requests, 0.4)
            drafting += by_head and lengths is many
    assert (drafting > 30) == shared


@pytest.mark.parametrize(("first", "slope"), [(0.0, 1.0), (1.0, 0.6), (-1.5, 1.3), (2.0, 1.0)])
def test_worth_is_the_line_by_which_nodes_are_accepted(first, slope):
    rng, worth, psi = np.random.default_rng(0), Worth(), np.array([0.9, 0.7, 0.5, 0.3, 0.1])
    accepted = 1 / (1 + np.exp(-first - slope * np.log(psi / (1 - psi))))
    seen = []
    for step in range(600):
        psi_N = np.tile(psi, 4)
        worth.observe(psi_N, (rng.random(20) < np.tile(accepted, 4)).astype(float))
        seen += [worth.of(psi)] * (step > 100)
    assert np.mean(seen, axis=0) == pytest.approx(accepted, abs=0.02)


def test_chains_that_come_whole_or_not_at_all_do_not_throw_worth_to_and_fro():
    rng, worth, seen = np.random.default_rng(0), Worth(), []
    for _ in range(400):
        psi_N = np.linspace(0.999, rng.uniform(0.1, 0.9), 20)
        seen.append(worth.of(psi_N)[10])
        worth.observe(psi_N, np.full(20, float(rng.random() < 0.85)))
    assert np.mean(seen[50:]) == pytest.approx(0.85, abs=0.05)
    assert np.abs(np.diff(seen)).max() < 0.3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_worth_is_a_probability_that_never_grows_where_psi_falls_whatever_was_seen(seed, steps):
    rng, worth = np.random.default_rng(seed), Worth()
    for _ in range(steps):
        psi_N = rng.choice([0.0, 1.0, 0.5, *rng.random(5)], int(rng.integers(1, 30)))
        worth.observe(psi_N, (rng.random(len(psi_N)) < rng.random()).astype(float))
    worth_N = worth.of(np.linspace(1, 0, 50))
    assert ((worth_N > 0) & (worth_N < 1)).all()
    assert (np.diff(worth_N) <= 0).all()


@pytest.mark.parametrize(("worth", "rests"), [(0.1, False), (0.3, True)])
def test_copies_speak_against_the_head_by_what_they_hold_not_by_what_they_promise(worth, rests):
    """The head brings 1.56 tokens in 1.33; copies promise 1.96 in 1.08, and bring 1.10 or 1.29."""
    lengths = Lengths()
    for step in range(300):
        by_head = step < 60
        if by_head:
            lengths.drafts.observe(1, 0.25)
        (kept,) = lengths.cut([chain_of(range(2), 0.4 if by_head else 0.6)], by_head)
        accepted_N = kept.psi * (1.0 if by_head else worth)
        lengths.observe(1, 1 + len(kept), 1 + 0.04 * len(kept), kept.psi, accepted_N)
    assert lengths.rests(1) == rests


def test_what_only_copies_and_head_together_are_sure_of_speaks_for_the_head():
    """A copy that the head agrees with is likelier than alone: its share there is no ground to rest."""
    lengths, merged, alone = Lengths(), chain_of(range(MOST), 0.9), chain_of(range(MOST), 0.2)
    for _ in range(2 * PLAIN + 1):
        by_head = not lengths.rests(4)
        if by_head:
            lengths.drafts.observe(4, 3.0)
        chains = lengths.cut([merged if by_head else alone] * 4, by_head, alone=lambda _: alone)
        rows = 4 + sum(map(len, chains))
        psi_N = np.concatenate([chain.psi for chain in chains])
        lengths.observe(4, rows, 1 + 0.01 * rows, psi_N, psi_N)
    assert not lengths.rests(4)


def test_a_line_is_that_of_what_was_seen_and_no_steeper_than_proportional():
    line = Line(1.0)
    for _ in range(200):
        for size in (2, 10):
            line.observe(size, 1.0 + 0.1 * size)
    assert line.at(np.array([1, 20])) == pytest.approx([1.1, 3.0], rel=0.02)
    for _ in range(200):
        for size in (2, 10):
            line.sums *= KEEP
            line.observe(size, size * size)
    assert line.at(6) == pytest.approx(52, rel=0.05)
    assert line.at(1) >= 52 / 6 * 0.9


def test_a_line_through_one_size_knows_little_of_others():
    line = Line(1.0)
    for _ in range(20):
        line.observe(16, 2.0)
    assert line.at(np.array([16, 32])) == pytest.approx([2.0, 2.0 * (1 + SHARE)], rel=0.01)


def test_one_step_that_the_machine_slowed_down_changes_little():
    line = Line(1.0)
    for size in [2, 4, 8] * 20:
        line.observe(size, 1.0)
    line.observe(4, 100.0)
    assert line.at(4) < 1.1


@example(14439, 1)  # where the guess showed
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_drafts_that_are_padded_have_as_many_nodes_each_as_bring_most_tokens_per_second(seed, requests):
    rng, lengths = np.random.default_rng(seed), Lengths(padded=True)
    before, row, kink = rng.uniform(0.1, 2), rng.uniform(0, 1), rng.uniform(0, 1)
    lengths.drafted, lengths.count = Line(1.0), 1
    for size in np.tile(np.arange(1, 60), 20):
        lengths.plain.observe(size, before + row * size)
        lengths.drafted.observe(size, before + kink + row * size)
    for line in (lengths.plain, lengths.drafted):
        line.sums *= 1000  # seen so often that nothing is guessed any more
    psi = [np.sort(rng.random(rng.integers(0, 9)))[::-1].astype(np.float32) for _ in range(requests)]
    trees = [chain_of(range(len(own))) for own in psi]
    trees = [Tree(tree.tokens, tree.parents, tree.depths, own) for tree, own in zip(trees, psi, strict=True)]
    rates = []
    for n in range(max(map(len, psi)) + 1):
        tokens = sum(1 + own[:n].sum() for own in psi)
        seconds = MARGIN * (before + kink + row * requests * (1 + n)) if n else before + row * requests
        rates.append(tokens / seconds)
    kept = [len(tree) for tree in lengths.cut(trees, True)]
    (n,) = {max(kept)}
    assert kept == [min(n, len(own)) for own in psi]
    assert rates[n] == pytest.approx(max(rates), rel=1e-3)


ROW = 0.005  # seconds of a row beside 0.033 of any step: SmolLM2 on one core (docs/results/drafts.md)


@pytest.mark.parametrize("worth", [1.0, 0.5])
def test_a_head_that_pays_for_few_requests_and_not_for_many_is_used_for_few(worth):
    lengths, seconds = defaultdict(partial(Lengths, padded=True)), lambda rows: 0.033 + ROW * rows
    psi = np.linspace(0.6, 0.4, 16)
    for requests in (16, 1, 16, 4, 1, 8, 16):
        speedup, chosen = padded(
            lengths[requests], requests, psi, seconds, draft=0.003 + 0.004 * requests, steps=150, worth=worth
        )
        resting = sum(not by_head for by_head, _ in chosen)
        if requests > 1:
            assert speedup > 0.97
        else:
            assert speedup > (1.1 if worth == 1 else 0.97)
        if requests == 16:
            assert resting > 0.9 * len(chosen)


def test_padding_is_paid_for():
    """One of sixteen is sure of its draft: among separate rows that pays, where all are as long as the longest not."""
    kept = {}
    for separate in (True, False):
        lengths = Lengths(padded=not separate)
        for _ in range(3):
            for rows in (16, 32, 48):
                lengths.observe(16, rows, 0.05 + 0.002 * rows, EMPTY.psi, EMPTY.psi)
        lengths.count = 1
        sure, unsure = chain_of(range(MOST), 0.95), chain_of(range(MOST), 0.05)
        kept[separate] = [len(chain) for chain in lengths.cut([sure, *[unsure] * 15], True)]
    assert kept[True][0] == MOST
    assert kept[False] == [0] * 16


def test_threads_may_share_it():
    """As those of a decoder do, each with a batch of its own."""
    lengths, before = Lengths(padded=True), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            each = [threads.submit(serve, lengths, 4, 0.7, linear(0.05), 0.1, steps=150) for _ in range(4)]
            assert all(future.result() for future in each)
    finally:
        sys.setswitchinterval(before)
