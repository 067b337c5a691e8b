"""The largest values of each row, tile after tile, compiled for a CPU. torch's topk takes as long as the GEMM that made
the tile.

Every LANES-th column is of one lane. About the S-th largest of the lanes' largest values is a bound: S values are at
least as large. So only lanes that reach it are looked at one by one, about S of them.

Suffixes as in chunked.py: R rows, C columns of a tile, S held.
"""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from ctcdraft.model.kernels.cpu_shortlist import array_of, use_torch_threads

LANES = 64
HALVINGS = 8  # in search of the bound


def suits(values: Tensor, top_k: int) -> bool:
    """Are the `top_k` largest of these found here: on a CPU, and where they are no more than lanes? More of them, as a
    full transition wants, torch's topk finds faster."""
    return not values.is_cuda and top_k <= LANES


def merge_top(top_RS: Tensor, index_RS: Tensor, z_RC: Tensor, first_column: int) -> None:
    """Take a tile into the running largest values (-inf: none yet) and their columns, in place: largest first, of equal
    ones the first column first."""
    _merge(use_torch_threads(), top_RS.numpy(), index_RS.numpy(), z_RC.numpy(), first_column)  # type: ignore[call-arg]


def largest(values_RC: Tensor, top_k: int) -> Tensor:
    """Columns of the `top_k` largest of each row [R, top_k], in the same order. On the caller's thread alone: each of
    several that decode comes here, and numba's threads need not bear that."""
    top_RS = values_RC.new_full((len(values_RC), top_k), -torch.inf)
    index_RS = torch.zeros_like(top_RS, dtype=torch.long)
    _merge_rows(top_RS.numpy(), index_RS.numpy(), array_of(values_RC), 0)  # type: ignore[call-arg]
    return index_RS


@njit(cache=True, parallel=True)
def _merge(threads, top, index, z, first_column):
    R = len(z)
    for chunk in prange(threads):
        rows = slice(R * chunk // threads, R * (chunk + 1) // threads)
        _merge_rows(top[rows], index[rows], z[rows], first_column)


@njit(cache=True)
def _merge_rows(top, index, z, first_column):
    (R, C), S = z.shape, top.shape[1]
    pool = np.empty(S + LANES, z.dtype)  # what is held, and the largest of each lane
    value, place = np.empty(S + C, z.dtype), np.empty(S + C, np.int64)  # what may be among the largest
    lane, column, above = np.empty(LANES, np.int64), np.empty(C, np.int64), np.empty(S + max(C, LANES), np.int32)
    for r in range(R):
        peak = pool[S:]
        peak[:] = -np.inf
        for start in range(0, C, LANES):
            row = z[r, start : start + LANES]
            for i in range(len(row)):
                peak[i] = row[i] if row[i] > peak[i] else peak[i]
        pool[:S] = value[:S] = top[r]
        place[:S] = index[r]
        least = _bound(pool, S)
        lanes = found = 0
        for i in range(LANES):
            lane[lanes] = i
            lanes += peak[i] >= least
        for i in range(lanes):
            for c in range(lane[i], C, LANES):
                column[found] = c
                found += z[r, c] >= least
        if found > S + 2 * LANES:
            found = _without_ties(column, found, z[r], least, S)
        for i in range(found):
            value[S + i], place[S + i] = z[r, column[i]], first_column + column[i]
        above[: S + found] = 0
        for j in range(S + found):
            for i in range(S + found):
                above[i] += (value[j] > value[i]) | ((value[j] == value[i]) & (place[j] < place[i]))
        for i in range(S + found):
            if above[i] < S:
                top[r, above[i]], index[r, above[i]] = value[i], place[i]


@njit(cache=True)
def _bound(values, k):
    """What at least k of them reach, and hardly more: from the least of some k, halfway to the largest and again."""
    low = high = values.dtype.type(-np.inf)
    for start in range(0, len(values) - k + 1, k):
        least = values[start]
        for i in range(start, start + k):
            least = min(least, values[i])
        low = max(low, least)
    for value in values:
        high = max(high, value)
    for _ in range(HALVINGS):
        middle = low + (high - low) * values.dtype.type(0.5)
        if not low < middle < high:
            break
        count = 0
        for i in range(len(values)):
            count += values[i] >= middle
        low, high = (middle, high) if count >= k else (low, middle)
    return low


@njit(cache=True)
def _without_ties(column, found, row, least, k):
    """The columns, in place, but of those that equal `least` only the first k of each lane: no more can be among the
    largest. How many are left."""
    kept = ties = 0
    lane = -1
    for i in range(found):
        c = column[i]
        if c % LANES != lane:
            lane, ties = c % LANES, 0
        tie = row[c] == least
        column[kept] = c
        kept += (row[c] > least) | (tie & (ties < k))
        ties += tie
    return kept
