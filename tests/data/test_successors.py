"""The table of bigrams against counting by hand."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctcdraft.data import successors as module
from ctcdraft.data.store import Corpus
from ctcdraft.data.successors import successors_of


def corpus_of(sequences):
    """Each [(token, is it part of an answer)]."""
    flat = [pair for sequence in sequences for pair in sequence]
    ids, mask = np.array([t for t, _ in flat], np.int32), np.array([m for _, m in flat], np.uint8)
    return Corpus(ids, mask, ids, np.cumsum([0, *map(len, sequences)]))


sequences = st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=9), max_size=5)


@given(sequences=sequences, count=st.integers(1, 5))
def test_the_most_frequent_successors_in_answers_come_first(sequences, count):
    counted = Counter()
    for sequence in sequences:
        counted.update((a, b) for (a, _), (b, answered) in itertools.pairwise(sequence) if answered)
    table = successors_of(corpus_of(sequences), 4, count)
    assert table.shape == (4, count)
    for token in range(4):
        ranked = sorted((-n, b) for (a, b), n in counted.items() if a == token)
        want = [b for _, b in ranked][:count]
        assert table[token].tolist() == want + [-1] * (count - len(want))


def test_only_the_first_tokens_of_a_large_corpus_are_read(monkeypatch):
    corpus = corpus_of([[(0, True), (1, True), (2, True), (3, True)]])
    monkeypatch.setattr(module, "READ", 2)
    assert successors_of(corpus, 4, 1).ravel().tolist() == [1, -1, -1, -1]


def test_a_prompts_last_token_is_followed_by_the_answers_first():
    assert successors_of(corpus_of([[(2, False), (3, False), (1, True)]]), 4, 1).ravel().tolist() == [-1, -1, -1, 1]
