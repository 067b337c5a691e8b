"""What is wanted of tiles of logits, compiled for a CPU: some columns, and the largest values of each row, for which
torch's topk takes as long as the GEMM that made the tile.

Every LANES-th column is of one lane. About the S-th largest of the lanes' largest values is a bound, since S values are
at least as large; once S values are held, their least is. Only lanes that reach it are looked at one by one.

Suffixes as in chunked.py: R rows, C columns of a tile, K wanted, S held.
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


def take(found_RK: Tensor, index_RK: Tensor, z_RC: Tensor, first_column: int) -> None:
    """Those of the wanted values that a tile holds, in place."""
    _take(use_torch_threads(), found_RK.numpy(), array_of(index_RK), z_RC.numpy(), first_column)  # type: ignore


@njit(cache=True, parallel=True)
def _take(threads, found, index, z, first_column):
    (R, C), K = z.shape, found.shape[1]
    for chunk in prange(threads):
        for r in range(R * chunk // threads, R * (chunk + 1) // threads):
            for k in range(K):
                c = index[r, k] - first_column
                if 0 <= c < C:
                    found[r, k] = z[r, c]


@njit(cache=True, parallel=True)
def _merge(threads, top, index, z, first_column):
    R = len(z)
    for chunk in prange(threads):
        rows = slice(R * chunk // threads, R * (chunk + 1) // threads)
        _merge_rows(top[rows], index[rows], z[rows], first_column)


@njit(cache=True)
def _merge_rows(top, index, z, first_column):
    (R, C), S = z.shape, top.shape[1]
    peak, lane, column = np.empty(LANES, z.dtype), np.empty(LANES, np.int64), np.empty(C, np.int64)
    for r in range(R):
        _peaks(peak, z[r])
        least = top[r, S - 1] if top[r, S - 1] > -np.inf else _bound(peak, S)
        lanes = found = 0
        for i in range(LANES):
            lane[lanes] = i
            lanes += peak[i] >= least
        for i in range(lanes):
            for c in range(lane[i], C, LANES):
                column[found] = c
                found += z[r, c] >= least
        for i in range(found):
            _insert(top[r], index[r], z[r, column[i]], first_column + column[i])


@njit(cache=True)
def _peaks(peak, row):
    """The largest value of each lane, four compared at once: only so the compiler vectorises it."""
    peak[:] = -np.inf
    fours = len(row) - len(row) % (4 * LANES)
    for start in range(0, fours, 4 * LANES):
        a, b = row[start : start + LANES], row[start + LANES : start + 2 * LANES]
        c, d = row[start + 2 * LANES : start + 3 * LANES], row[start + 3 * LANES : start + 4 * LANES]
        for i in range(LANES):
            x, y = a[i] if a[i] > b[i] else b[i], c[i] if c[i] > d[i] else d[i]
            x = x if x > y else y
            peak[i] = x if x > peak[i] else peak[i]
    for start in range(fours, len(row), LANES):
        rest = row[start : start + LANES]
        for i in range(len(rest)):
            peak[i] = rest[i] if rest[i] > peak[i] else peak[i]


@njit(cache=True)
def _insert(top, index, value, column):
    """Take a value where it belongs among the largest, if it does; of equal ones the first column comes first."""
    at = len(top)
    while at > 0 and (value > top[at - 1] or (value == top[at - 1] and column < index[at - 1])):
        at -= 1
        if at + 1 < len(top):
            top[at + 1], index[at + 1] = top[at], index[at]
    if at < len(top):
        top[at], index[at] = value, column


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
