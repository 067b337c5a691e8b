import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.data.packing import first_fit

LENGTHS = st.lists(st.integers(1, 30), max_size=40)


def first_fit_plainly(lengths, capacity):
    rows, room = [], []
    for number, length in enumerate(min(n, capacity) for n in lengths):
        row = next((i for i, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(number)
        room[row] -= length
    return rows


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(1, 40))
def test_it_is_first_fit(lengths, capacity):
    assert [row.tolist() for row in first_fit(lengths, capacity)] == first_fit_plainly(lengths, capacity)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS.filter(bool), capacity=st.integers(1, 40))
def test_every_sequence_is_in_one_row_and_no_row_overflows(lengths, capacity):
    rows = first_fit(lengths, capacity)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    clipped = np.minimum(lengths, capacity)
    assert all(clipped[row].sum() <= capacity for row in rows)
    share = 1 - clipped.sum() / (len(rows) * capacity)
    assert 0 <= share < 1
    if len(rows) > 1:  # first-fit fills all rows but one more than half
        assert share < 0.5 + 0.5 / len(rows)
