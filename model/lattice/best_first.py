"""Best-first search on exact CTC prefix probabilities, compiled (docs/method.md); `tree.search` is its front.

All of it lies in this file: where only another one has changed, numba would go on with what it compiled before.

Shapes: T slots, C candidates, P prefixes.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

LOG_NOTHING = np.float32(-1e30)  # a log-probability of 0 whose differences are numbers
UNLIKELY = np.float32(1e-7)  # slots that are this unlikely to write what follows a prefix are not looked at


class Prefix(NamedTuple):
    """What is known of one prefix. pb, pn [T + 1] as in `search`; p [band + 1, Y]: what the slots of its band emit
    behind it; its depth, and the column of its last token, -1: none."""

    pb: NDArray[np.float32]
    pn: NDArray[np.float32]
    p: NDArray[np.float32]
    depth: int
    column: int


@njit(cache=True)
def search(lattice, ends, nodes, max_depth, chain, prune):
    """Tokens, parents, depths and psi of the best nodes of a `Lattice`; see `tree.search`.

    What a slot emits behind a prefix is computed once that could decide which node comes next: no child has more than
    what the slots before gave it and all that is left of its parent. Once that is at most `prune` of the parent's psi,
    it is left out.
    """
    (T, C), band, merge = lattice.log_p.shape, lattice.band, lattice.merge
    # What is known of each prefix: index 0 is the empty one, index n + 1 is node n.
    # pb[i, t], pn[i, t]  the first t slots collapse to exactly prefix i and end in blank / in its last token; beyond
    #                     slot next_slot[i], only what comes from its parent. What slot t hands on is 0 where t is not
    #                     in the band: depths[i] to depths[i] + band, the edge
    # p[i, s]             what the s-th slot of its band emits behind it
    # children[i, c]      psi of prefix i followed by column c, by the slots before next_slot[i], -1 once taken
    # best[i], left[i]    no child of i has more; of that, what is not in a column yet
    # column[i]           the token that it ends in, -1: none yet
    P = nodes + 1
    pb = np.zeros((P, T + 1), np.float32)
    pn = np.zeros((P, T + 1), np.float32)
    p = np.zeros((P, min(T, band + 1), C), np.float32)
    children = np.zeros((P, C), np.float32)
    best, left = np.zeros(P, np.float32), np.zeros(P, np.float32)
    pb[0, 0] = best[0] = left[0] = 1.0
    next_slot, depths = np.zeros(P, np.int64), np.zeros(P, np.int64)
    column = np.full(P, -1)
    parents, psis, count = np.empty(nodes, np.int64), np.empty(nodes, np.float32), 0
    while count < nodes:
        g = count if chain else _largest(best[: count + 1])
        if best[g] <= 0.0:
            break
        if left[g] > 0.0:
            t = next_slot[g]
            if pb[g, t] + pn[g, t] > UNLIKELY:
                own, edge = p[g, t - depths[g]], t == depths[g] + band
                pb[g, t + 1] = (pb[g, t] + pn[g, t]) * _emit(own, lattice, t, edge, column[g])
                _hand_on(children[g], pb[g], pn[g], t, own, column[g] if merge else -1)
            next_slot[g] = t + 1
            left[g] = _left(pb[g], pn[g], t + 1, prune * (psis[g - 1] if g > 0 else np.float32(1.0)))
            best[g] = children[g, _largest(children[g])] + left[g]
            continue
        c = _largest(children[g])
        n, depth = count + 1, depths[g]
        column[n] = c
        parents[count], depths[n], psis[count] = g - 1, depth + 1, best[g]
        children[g, c] = -1.0
        best[g] = children[g, _largest(children[g])]
        count = n
        if depth + 1 == max_depth or n == nodes or (ends == lattice.tokens[c]).any():
            continue
        for t in range(depth, min(T, depth + band + 1)):
            pn[n, t + 1] = (pb[g, t] if merge and c == column[g] else pb[g, t] + pn[g, t]) * p[g, t - depth, c]
        next_slot[n] = depth + 1
        best[n] = left[n] = _left(pb[n], pn[n], depth + 1, prune * psis[count - 1])
    return lattice.tokens[column[1 : count + 1]], parents[:count], depths[1 : count + 1], psis[:count]


def root_of(lattice):
    """The empty prefix, to be opened by itself."""
    T, C = lattice.log_p.shape
    pb = np.zeros(T + 1, np.float32)
    pb[0] = 1.0
    return Prefix(pb, np.zeros_like(pb), np.zeros((min(T, lattice.band + 1), C), np.float32), 0, -1)


@njit(cache=True)
def opened(lattice, prefix):
    """q(c | prefix) [Y]: psi of the prefix with each candidate behind it, over its own. Completes its pb, pn and p."""
    (T, C), (pb, pn, p, depth, column), band = lattice.log_p.shape, prefix, lattice.band
    q = np.zeros(C, np.float32)
    for t in range(depth, min(T, depth + band + 1)):
        if pb[t] + pn[t] > UNLIKELY:
            pb[t + 1] = (pb[t] + pn[t]) * _emit(p[t - depth], lattice, t, t == depth + band, column)
            _hand_on(q, pb, pn, t, p[t - depth], column if lattice.merge else -1)
    return q


@njit(cache=True)
def followed(lattice, prefix, column, q):
    """An opened prefix with a candidate behind it, which has q of it: pb and pn are shares of its own psi."""
    depth = prefix.depth
    repeats = lattice.merge and column == prefix.column
    pn = np.zeros_like(prefix.pn)
    for t in range(depth, min(len(lattice.log_p), depth + lattice.band + 1)):
        before = prefix.pb[t] if repeats else prefix.pb[t] + prefix.pn[t]
        pn[t + 1] = before * prefix.p[t - depth, column] / q
    return Prefix(np.zeros_like(pn), pn, np.zeros_like(prefix.p), depth + 1, column)


@njit(cache=True)
def _hand_on(children, pb, pn, t, p, stay):
    """What slot t, which emits p, adds to psi of a prefix followed by each column, of which the one that repeats its
    last token needs a blank before it; and how likely the prefix still is all that was written after that slot."""
    phi = pb[t] + pn[t]
    repeated = children[stay] + pb[t] * p[stay] if stay >= 0 else np.float32(0.0)
    for c in range(len(children)):
        children[c] += phi * p[c]
    if stay >= 0:
        children[stay] = repeated
        pn[t + 1] += pn[t] * p[stay]


@njit(cache=True)
def _left(pb, pn, t, negligible):
    """What the slots from t on may add to the children of a prefix; 0 where they are not looked at."""
    left = pb[t]
    for s in range(t, len(pn) - 1):
        left += pn[s]
    return left if t < len(pn) - 1 and left > max(negligible, UNLIKELY) else np.float32(0.0)


@njit(cache=True)
def _emit(p, lattice, t, edge, last):
    """p_t(y | u) into p [Y], u the candidate in column `last` (-1: the root); p_t(blank | u), 0 at the edge, is given
    back. Tokens that are no candidates keep the share that they had."""
    gate, odds = np.empty(len(lattice.root), np.float32), lattice.log_blank[t]
    for r in range(len(gate)):
        x = lattice.slot[t, r] + (lattice.root[r] if last < 0 else lattice.context[last, r])
        gate[r] = x * min(max(x + np.float32(3.0), np.float32(0.0)), np.float32(6.0)) * np.float32(1 / 6)  # hardswish
        odds += gate[r] * lattice.blank_key[r]
    p_blank = np.float32(0.0) if edge else np.float32(1.0) / (np.float32(1.0) + np.exp(-odds))
    for c in range(len(p)):  # one array into another would take numba three seconds more to compile
        p[c] = lattice.log_p[t, c]
    for r in range(len(gate)):
        for c in range(len(p)):
            p[c] += gate[r] * lattice.key[r, c]
    peak = lattice.log_rest[t]  # a transition may move by more than float32's exponential can hold
    for c in range(len(p)):
        peak = max(peak, p[c])
    total = np.float64(np.exp(lattice.log_rest[t] - peak))
    for c in range(len(p)):
        p[c] = np.exp(p[c] - peak)
        total += p[c]
    token = np.float32((np.float64(1.0) - p_blank) / total)
    for c in range(len(p)):
        p[c] *= token
    return p_blank


@njit(cache=True, fastmath=True)
def _largest(values):
    """The position of the largest value, the first of several."""
    best = values[0]
    for value in values:
        best = max(best, value)
    for i in range(len(values)):
        if values[i] == best:
            return i
    return 0
