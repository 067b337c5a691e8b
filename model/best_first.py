"""Best-first search on exact CTC prefix probabilities, compiled (docs/method.md); `tree.search` is its front.

All of it lies in this file: where only another one has changed, numba would go on with what it compiled before.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

LOG_NOTHING = np.float32(-1e30)  # a log-probability of 0 whose differences are numbers
CANCELS = np.float32(0.02)  # float32 keeps too little of a sum of probabilities that is 1 but for less than this
UNLIKELY = np.float32(1e-7)  # slots that are this unlikely to write what follows a prefix are not looked at


@njit(cache=True)
def search(emission, blank, tokens, ends, merge, band, nodes, max_depth, chain, prune, moving, *behind):
    """Tokens, parents, depths and psi of the best nodes; see `tree.search`. behind: fields of a `Behind`, then those of
    its tables; not looked at unless `moving`.

    What a slot emits behind a prefix is computed once that could decide which node comes next: no child has more than
    what the slots before gave it and all that is left of its parent. Once that is at most `prune` of the parent's psi,
    it is left out.
    """
    at, slots = _anchor(tokens, emission, nodes + 1 if moving else 1, behind)
    (T, C), J = emission.shape, at.next.shape[2]
    pb, pn, children, best, left, next_slot, said, stays, depths = _prefixes(nodes + 1, T, C + J)
    parents, psis, count = np.empty(nodes, np.int64), np.empty(nodes, np.float32), 0
    # p[i, row, c]: what a slot emits behind a prefix, see `_row`. Columns are what may follow it: the candidates; then
    # its at.next that are no candidates; then its last token, where it is neither; then room.
    p = np.zeros((nodes + 1, min(T, band + 1), C + J + 2) if moving else (2, T, C + J + 2), np.float32)
    states = np.zeros((len(at.next), len(at.gate)), np.float32)
    said[0] = at.root_token
    if moving:
        _begin(states[0], at)
    else:
        for t in range(T):
            p[0, t, :C] = emission[t] * (np.float32(1.0) - blank[t])
            p[1, t, :C] = emission[t]
    while count < nodes:
        g = count if chain else _largest(best[: count + 1])
        if best[g] <= 0.0:
            break
        if left[g] > 0.0:
            t = next_slot[g]
            edge = t == depths[g] + band
            if pb[g, t] + pn[g, t] > UNLIKELY:
                i, row = _row(g, t, depths[g], edge, moving)
                if moving:
                    p_blank = _emit(p, i, row, t, edge, states, said[g], stays[g], slots)
                else:
                    p_blank = np.float32(0.0) if edge else blank[t]
                _hand_on(children[g], pb[g], pn[g], t, p[i, row], p_blank, stays[g])
            next_slot[g] = t + 1
            left[g] = _left(pb[g], pn[g], t + 1, prune * (psis[g - 1] if g > 0 else np.float32(1.0)))
            best[g] = children[g, _largest(children[g])] + left[g]
            continue
        c = _largest(children[g])
        n, depth = count + 1, depths[g]
        said[n] = tokens[c] if c < C else at.next[g, 0, c - C]
        parents[count], depths[n], psis[count] = g - 1, depth + 1, best[g]
        children[g, c] = -1.0
        best[g] = children[g, _largest(children[g])]
        count = n
        if depth + 1 == max_depth or n == nodes or (ends == said[n]).any():
            continue
        column = c
        if moving:
            _advance(states[n], states[g], said[n], at)
            column = _place(said[n], n, at)
        stays[n] = column if merge else -1
        for t in range(depth, min(T, depth + band + 1)):
            i, row = _row(g, t, depth, t == depth + band, moving)
            pn[n, t + 1] = (pb[g, t] if c == stays[g] else pb[g, t] + pn[g, t]) * p[i, row, c]
        next_slot[n] = depth + 1
        best[n] = left[n] = _left(pb[n], pn[n], depth + 1, prune * psis[count - 1])
    return said[1 : count + 1], parents[:count], depths[1 : count + 1], psis[:count]


@njit(cache=True)
def _prefixes(count, T, columns):
    """What is known of each prefix: index 0 is the empty one, index n + 1 is node n.

    pb[i, t], pn[i, t]  the first t slots collapse to exactly prefix i and end in blank / in its last token; beyond slot
                        next_slot[i], only what comes from its parent. What slot t hands on is 0 where t is not in the
                        band: depths[i] to depths[i] + band, the edge
    children[i, c]      psi of prefix i followed by column c, by the slots before next_slot[i], -1 once taken
    best[i], left[i]    no child of i has more; of that, what is not in a column yet
    said[i], stays[i]   the token that it ends in, and the column in which a slot repeats it, -1: none does
    """
    pb, pn = np.zeros((count, T + 1), np.float32), np.zeros((count, T + 1), np.float32)
    children = np.zeros((count, columns), np.float32)
    best, left = np.zeros(count, np.float32), np.zeros(count, np.float32)
    pb[0, 0] = best[0] = left[0] = 1.0
    next_slot, said, depths = np.zeros(count, np.int64), np.empty(count, np.int64), np.zeros(count, np.int64)
    return pb, pn, children, best, left, next_slot, said, np.full(count, -1), depths


@njit(cache=True)
def _row(i, t, depth, edge, moving):
    """Where p holds what slot t emits behind prefix i: a row per slot of its band; or, without a transition, the same
    behind all, once with the blank beside it and once, at an edge, without."""
    return (i, t - depth) if moving else (int(edge), t)


@njit(cache=True)
def first_emissions(emission, tokens, *behind):
    """What slots emit behind the empty prefix: p_t(y) [T, Y] and p_t(blank) [T]; arguments as in `search`."""
    at, slots = _anchor(tokens, emission, 1, behind)
    (T, C), J = emission.shape, at.next.shape[2]
    p, blanks = np.zeros((1, T, C + J + 2), np.float32), np.empty(T, np.float32)
    states = np.empty((1, len(at.gate)), np.float32)
    _begin(states[0], at)
    for t in range(T):
        blanks[t] = _emit(p, 0, t, t, False, states, at.root_token, -1, slots)
    return p[0, :, :C], blanks


@njit(cache=True)
def _hand_on(children, pb, pn, t, p, p_blank, stay):
    """What slot t adds to psi of a prefix followed by each column, of which the one that repeats its last token needs a
    blank before it; and how likely the prefix still is all that was written after that slot."""
    phi, repeats = pb[t] + pn[t], 0 <= stay < len(children)
    repeated = children[stay] + pb[t] * p[stay] if repeats else np.float32(0.0)
    for c in range(len(children)):
        children[c] += phi * p[c]
    if repeats:
        children[stay] = repeated
    pb[t + 1] = phi * p_blank
    if stay >= 0:
        pn[t + 1] += pn[t] * p[stay]


@njit(cache=True)
def _left(pb, pn, t, negligible):
    """What the slots from t on may add to the children of a prefix; 0 where they are not looked at."""
    left = pb[t]
    for s in range(t, len(pn) - 1):
        left += pn[s]
    return left if t < len(pn) - 1 and left > max(negligible, UNLIKELY) else np.float32(0.0)


@njit(cache=True)
def _hardswish(x):
    return x * min(max(x + np.float32(3.0), np.float32(0.0)), np.float32(6.0)) * np.float32(1 / 6)


@njit(cache=True)
def _products(out, gate, key):
    """out + gate @ key, eight ranks at a time; a sum's order is fixed, see kernels/cpu_shortlist.py."""
    R, X = key.shape
    eights = R // 8 * 8
    for r in range(0, eights, 8):
        g0, g1, g2, g3 = gate[r], gate[r + 1], gate[r + 2], gate[r + 3]
        g4, g5, g6, g7 = gate[r + 4], gate[r + 5], gate[r + 6], gate[r + 7]
        for x in range(X):
            first = (g0 * key[r, x] + g1 * key[r + 1, x]) + (g2 * key[r + 2, x] + g3 * key[r + 3, x])
            second = (g4 * key[r + 4, x] + g5 * key[r + 5, x]) + (g6 * key[r + 6, x] + g7 * key[r + 7, x])
            out[x] += first + second
    for r in range(eights, R):
        for x in range(X):
            out[x] += gate[r] * key[r, x]


@njit(cache=True)
def _advance(state, before, token, at):
    """The state behind a prefix that has grown by one token."""
    for r in range(len(state)):
        at.gate[r] = _hardswish(before[r])
    state[:] = at.context[token]
    _products(state, at.gate, at.carry)


class _Anchor(NamedTuple):
    """What a prefix grows by, bundled within compiled code: see `Behind`. next [I, 2, J] and next_key [I,
    R, J]: per prefix its last token's successors, the columns where they stand, and their P w_v; gate: room; bucket:
    see `_buckets`."""

    tokens: Any
    root_token: Any
    context: Any
    token: Any
    successor: Any
    carry: Any
    next: Any
    next_key: Any
    gate: Any
    bucket: Any


class _Slots(NamedTuple):
    """What slots emit from, in few arrays, since every one of an argument costs time: see `Behind`. fixed [T, R + K +
    2]: a slot's vector, log_p of its shortlist, log_blank and log_p of all else; key [T, R, K + 1]: P w_v of those,
    the blank's vector; where [T, K + columns + 1]: place, then 1 where the slot holds a column; next [I, 2, J]: tokens
    and columns of the anchor's; then room."""

    tokens: Any
    emission: Any
    fixed: Any
    where: Any
    every: Any
    key: Any
    next: Any
    next_key: Any
    gate: Any
    moved: Any
    scale: Any


@njit(cache=True)
def _anchor(tokens, emission, grown, behind):
    root_token, slot, place, held, log_p, every, log_blank = behind[:7]
    context, token, successor, carry, blank_vector = behind[7:]
    (T, K), C, J, R = log_p.shape, len(tokens), successor.shape[1], slot.shape[1]
    key = np.empty((T, R, K + 1), np.float32)
    fixed, where = np.empty((T, R + K + 2), np.float32), np.zeros((T, K + C + J + 2), np.int64)
    for t in range(T):
        _transposed(key[t], token, tokens[place[t]])
        key[t, :, K] = blank_vector
        fixed[t, :R], fixed[t, R : R + K] = slot[t], log_p[t]
        fixed[t, R + K] = max(log_blank[t], LOG_NOTHING)
        fixed[t, R + K + 1] = _log_rest(log_p[t], every[t], tokens[place[t]])
        where[t, :K], where[t, K : K + C], where[t, K + C + J + 1] = place[t], held[t], 1
    next, next_key = np.empty((grown, 2, J), np.int64), np.empty((grown, R, J), np.float32)
    # Moved: shortlist, blank, successors; as they were: the rest, one, successors
    gate, room = np.empty(R, np.float32), K + 1 + J + 2 + J
    at = _Anchor(
        tokens, root_token, context, token, successor, carry, next, next_key, gate, _buckets(tokens),
    )  # fmt: skip
    slots = _Slots(
        tokens, emission, fixed, where, every, key, next, next_key,
        gate, np.empty(room, np.float32), np.empty(room, np.int32),
    )  # fmt: skip
    return at, slots


@njit(cache=True)
def _begin(state, at):
    """The empty prefix."""
    state[:] = at.context[at.root_token]
    _place(at.root_token, 0, at)


@njit(cache=True)
def _place(last, i, at):
    """The column of prefix i's last token; `at` takes what may follow it and where that stands."""
    next, column = at.next[i]
    C, J = len(at.tokens), len(next)
    stay = _column(at.bucket, at.tokens, last)
    next[:] = at.successor[last]
    _transposed(at.next_key[i], at.token, next)
    for j in range(J):
        v = next[j]
        column[j] = _column(at.bucket, at.tokens, v) if v >= 0 else C + J + 1
        if column[j] < 0:
            column[j] = C + j
            if v == last:
                stay = C + j
    return C + J if stay < 0 else stay


@njit(cache=True)
def _transposed(out, rows, index):
    """The first columns of `out` are the rows at the index, anything where it is -1."""
    R, X = len(out), len(index)
    fours = X // 4 * 4
    for x in range(0, fours, 4):
        a, b, c, d = max(index[x], 0), max(index[x + 1], 0), max(index[x + 2], 0), max(index[x + 3], 0)
        for r in range(R):
            out[r, x] = rows[a, r]
            out[r, x + 1] = rows[b, r]
            out[r, x + 2] = rows[c, r]
            out[r, x + 3] = rows[d, r]
    for x in range(fours, X):
        for r in range(R):
            out[r, x] = rows[max(index[x], 0), r]


@njit(cache=True)
def _column(bucket, tokens, v):
    """Where token v stands among the candidates, -1: nowhere; see `_buckets`."""
    mask = len(bucket) - 1
    h = v & mask
    while bucket[h] >= 0 and tokens[bucket[h]] != v:
        h = (h + 1) & mask
    return bucket[h]


@njit(cache=True)
def _buckets(tokens):
    """An open hash table of the candidates."""
    size = 16
    while size < 4 * len(tokens):
        size *= 2
    bucket = np.full(size, -1)
    for c in range(len(tokens)):
        h = tokens[c] & (size - 1)
        while bucket[h] >= 0:
            h = (h + 1) & (size - 1)
        bucket[h] = c
    return bucket


@njit(cache=True)
def _emit(p, i, row, t, edge, states, last, stay, slots):
    """p_t(y | prefix i) into p[i, row, columns], from its state and last token, after its `_place`; p_t(blank | prefix
    i), 0 at the edge, is given back. The column behind them takes what is none.

    stay: the column of the last token, where it may be written once more without a new one (-1: it may not).
    """
    C, J, (R, X) = slots.emission.shape[1], slots.next.shape[2], slots.key.shape[1:]
    K, none, gate, moved = X - 1, C + J + 1, slots.gate, slots.moved
    Y = X + J
    unmoved = moved[Y + 2 :]
    for r in range(R):
        gate[r] = _hardswish(slots.fixed[t, r] + states[i, r])
    for x in range(X):
        moved[x] = slots.fixed[t, R + x]
    for j in range(J):
        moved[X + j] = unmoved[j] = slots.every[t, max(slots.next[i, 0, j], 0)]
    _products(moved[:X], gate, slots.key[t])
    _products(moved[X:Y], gate, slots.next_key[i])
    if edge:
        moved[K] = LOG_NOTHING
    for j in range(J):
        if slots.where[t, K + slots.next[i, 1, j]]:  # none, or in the shortlist already
            moved[X + j] = unmoved[j] = LOG_NOTHING
    # What is neither in the shortlist nor a successor keeps its logit: `left` of the rest.
    peak, log_rest, left = _peak(moved[:Y]), slots.fixed[t, R + X], np.float32(1.0)
    _exp(unmoved, log_rest, slots.scale)
    for j in range(J):
        left -= unmoved[j]
    if left < CANCELS and log_rest > peak:  # under a moved peak that is as high, what rounding leaves is nothing
        log_rest = _log_sum_without(slots.every[t], slots.tokens[slots.where[t, :K]], slots.next[i, 0])
        left = np.float32(1.0)
    moved[Y], moved[Y + 1] = log_rest, np.float32(0.0)
    peak = max(peak, log_rest)  # a transition may move by more than the logarithm of what float32 can hold
    _exp(moved[: Y + 2], peak, slots.scale)
    total = max(left, np.float32(0.0)) * moved[Y]
    for x in range(Y):
        total += moved[x]
    inverse = np.float32(1.0) / total
    as_it_was = moved[Y + 1] * inverse
    for c in range(C):
        p[i, row, c] = slots.emission[t, c] * as_it_was
    for k in range(K):
        p[i, row, slots.where[t, k]] = moved[k] * inverse
    for j in range(J):
        column = slots.next[i, 1, j]
        p[i, row, none if slots.where[t, K + column] else column] = moved[X + j] * inverse
    if stay == C + J:
        p[i, row, stay] = np.exp(slots.every[t, last]) * as_it_was
    return moved[K] * inverse


@njit(cache=True, fastmath={"contract"})
def _exp(x, peak, scale):
    """exp(x - peak) in place, to 1e-7 of its value, 0 below 2^-126 and at most 2^126: a polynomial and an exponent,
    which the compiler can write for 8 numbers at once (Cephes' coefficients of 2^f)."""
    for k in range(len(x)):
        power = min(max((x[k] - peak) * np.float32(1.4426950408889634), np.float32(-127.0)), np.float32(126.0))
        whole = np.floor(power + np.float32(0.5))
        f = power - whole
        scale[k] = (np.int32(whole) + 127) << 23
        y = np.float32(1.535336188319500e-4) * f + np.float32(1.339887440266574e-3)
        y = y * f + np.float32(9.618437357674640e-3)
        y = y * f + np.float32(5.550332471162809e-2)
        y = y * f + np.float32(2.402264791363012e-1)
        y = y * f + np.float32(6.931472028550421e-1)
        x[k] = y * f + np.float32(1.0)
    powers = scale.view(np.float32)
    for k in range(len(x)):
        x[k] *= powers[k]


@njit(cache=True)
def _log_rest(log_p, every, shortlist):
    """The log-probability of all tokens outside of a shortlist, whose own is log_p."""
    rest = np.float32(1.0)
    for k in range(len(log_p)):
        rest -= np.exp(log_p[k])
    return np.log(rest) if rest > CANCELS else _log_sum_without(every, shortlist, shortlist[:0])


@njit(cache=True)
def _log_sum_without(log_p, some, others):
    """The log-probability of all tokens but some and others (-1: none), summed up token by token: as 1 minus theirs it
    is mostly rounding where they have nearly all there is."""
    log_p = log_p.copy()
    for v in some:
        log_p[v] = LOG_NOTHING
    for v in others:
        if v >= 0:
            log_p[v] = LOG_NOTHING
    peak, total = _peak(log_p), 0.0
    if peak == LOG_NOTHING:
        return LOG_NOTHING
    _exp(log_p, peak, np.empty(len(log_p), np.int32))
    for share in log_p:
        total += share
    return np.float32(peak + np.log(total))


@njit(cache=True, fastmath=True)
def _peak(values):
    best = values[0]
    for value in values:
        best = max(best, value)
    return best


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
