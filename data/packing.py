"""First-fit packing: many sequences in few rows of one length."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def first_fit(lengths: NDArray[np.int64] | Sequence[int], capacity: int) -> list[NDArray[np.int64]]:
    """Members (numbers into `lengths`) of each row: every sequence goes into the first row with room for it.

    Lengths above `capacity` count as `capacity`: such a sequence is cut to fill a row alone. The space left in
    rows lies in a tree of maxima, so n sequences take n log n steps.
    """
    clipped = np.minimum(lengths, capacity).tolist()
    leaves = 1 << max(0, len(clipped) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = []
    for number, length in enumerate(clipped):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        row = node - leaves
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [np.asarray(row, np.int64) for row in rows]
