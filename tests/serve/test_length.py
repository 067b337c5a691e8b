import numpy as np
import pytest

from ctcdraft.model.draft.budget import chain_of
from ctcdraft.serve.length import AGAIN, REST, ROUNDS, TRIES, Lengths

MOST = 8
LEARN = ROUNDS * len(TRIES)


def serve(lengths, requests, psi, seconds, draft, steps, worth=1.0):
    """Steps of a batch whose chains have psi, on an engine of that time per rows; the lengths that were chosen."""
    chosen = []
    for _ in range(steps):
        by_head = not lengths.rests(requests)
        drafted = [chain_of(list(range(MOST)), psi) if by_head else chain_of([]) for _ in range(requests)]
        times = lengths.times(requests)
        times.observe_draft(draft)
        chains = lengths.cut(drafted, by_head)
        rows, accepted = requests + sum(map(len, chains)), worth * sum(chain.psi.sum() for chain in chains)
        times.observe(rows, seconds(rows), accepted)
        chosen.append(([len(chain) for chain in chains], by_head))
    return chosen


def test_a_batch_size_begins_with_every_length():
    chosen = serve(Lengths(MOST), 1, 0.9, lambda rows: 1.0, 0.0, LEARN)
    assert [lengths for lengths, _ in chosen] == ROUNDS * [[round(share * MOST)] for share in TRIES]


def test_where_rows_cost_nothing_chains_are_whole():
    chosen = serve(Lengths(MOST), 4, 0.5, lambda rows: 1.0, 0.01, LEARN + 20)
    assert all(lengths == [MOST] * 4 for lengths, _ in chosen[LEARN:])


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
def test_chains_end_where_a_row_costs_more_than_it_brings(cost):
    psi, seconds = 0.6, lambda rows: 1.0 + cost * rows
    chosen = serve(Lengths(MOST), 1, psi, seconds, 0.0, LEARN + 1)
    gains = [(1 + sum(psi**d for d in range(1, n + 1))) / seconds(1 + n) for n in range(MOST + 1)]
    assert chosen[-1][0] == [int(np.argmax(gains))]


def test_likely_chains_of_a_batch_are_longer_than_unlikely_ones():
    lengths = Lengths(MOST)
    serve(lengths, 2, 0.5, lambda rows: 1.0 + 0.2 * rows, 0.0, LEARN)
    sure, unsure = lengths.cut([chain_of(list(range(MOST)), 0.95), chain_of(list(range(MOST)), 0.2)], True)
    assert len(sure) == MOST
    assert len(unsure) <= 1


def test_a_head_whose_drafts_cost_more_than_they_bring_rests_and_is_tried_again():
    chosen = serve(Lengths(MOST), 16, 0.2, lambda rows: 1.0 + 0.1 * rows, 2.0, LEARN + 4 * REST)
    later = [by_head for _, by_head in chosen[LEARN + 1 :]]
    assert 0 < sum(later) <= len(later) / 10
    seconds = sum(1 + 0.1 * (16 + sum(lengths)) + 2.0 * by_head for lengths, by_head in chosen[LEARN + 1 :])
    assert seconds < 1.1 * (1 + 0.1 * 16) * len(later)


def test_psi_that_promises_too_much_counts_for_what_it_is_worth():
    cost = lambda rows: 1.0 + 0.2 * rows  # noqa: E731
    honest = serve(Lengths(MOST), 1, 0.7, cost, 0.0, LEARN + 30)[-1][0]
    boasting = serve(Lengths(MOST), 1, 0.7, cost, 0.0, LEARN + 30, worth=0.5)[-1][0]
    assert boasting[0] < honest[0]


def test_lengths_are_tried_again_now_and_then():
    chosen = serve(Lengths(MOST), 1, 0.1, lambda rows: float(rows), 0.0, 4 * AGAIN + 1)
    assert {lengths[0] for lengths, _ in chosen[LEARN:]} == {0, *(round(share * MOST) for share in TRIES)}
