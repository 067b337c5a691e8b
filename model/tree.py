"""From lattice to draft tree: best-first search on exact CTC prefix probabilities (docs/method.md).

psi never grows along a path, so the N best prefixes form a tree, and it is the N-node tree with the
largest expected number of accepted tokens under the head's own beliefs. Best-first finds them in order.

A node's children are all scored at once (a SIMD loop over the candidates), and only its best child that is not
taken yet competes with those of other nodes: no heap of all children.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ctcdraft.model.lattice import Behind, Lattice
from ctcdraft.model.transition import Tables


@dataclass(frozen=True)
class Tree:
    """Draft nodes, parents first: token ids, parent index (-1: the root), depth (1..), psi. All [N]."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    psi: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> "Tree":
        """The tree of the first nodes: parents come first, so it is one."""
        return Tree(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes], self.psi[:nodes])

    def ancestors(self) -> NDArray[np.bool_]:
        """[N + 1, N + 1]: may row i attend to column j? Index 0 is the root, i + 1 is node i."""
        return _ancestors(self.parents)

    def walk(self, targets: NDArray[np.int64]) -> list[int]:
        """The accepted nodes: from the root, follow the child that holds the target of where we stand.

        targets [N + 1]: what the base chose after the root (index 0) and after node i (index i + 1).
        """
        return list(_walk(self.tokens, self.parents, targets))

    def path_of(self, labels: Sequence[int]) -> list[int]:
        """The nodes that hold the labels, the base's own continuation of the root, as far as they go."""
        at, path = -1, []
        for label in labels:
            child = np.flatnonzero((self.parents == at) & (self.tokens == label))
            if not len(child):
                break
            at = int(child[0])
            path.append(at)
        return path

    def accepted(self, labels: Sequence[int]) -> int:
        """How many of the labels the tree holds as a path."""
        return len(self.path_of(labels))


NO_TOKENS = np.zeros(0, np.int64)
_ROW, _TABLE = np.zeros(0, np.float32), np.zeros((0, 0), np.float32)
_NO_TABLES = Tables(_TABLE, _TABLE, np.zeros((0, 0), np.int32), _TABLE, _TABLE, _TABLE, _ROW)
_NO_PLACES, _NONE_HELD = np.zeros((0, 0), np.int64), np.zeros((0, 0), np.bool_)
NOT_MOVED = Behind(0, _ROW, _TABLE, _NO_PLACES, _NONE_HELD, _TABLE, _TABLE, _ROW, _ROW, _NO_TABLES)
EMPTY = Tree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))


def search(
    lattice: Lattice,
    nodes: int,
    *,
    read: NDArray[np.int64] = NO_TOKENS,
    max_depth: int | None = None,
    leaves: NDArray[np.int64] | None = None,
    chain: bool = False,
) -> Tree:
    """The best `nodes` prefixes of the lattice by psi, at most `max_depth` deep.

    read: the tokens so far, the root last, for a transition that looks them up. Tokens in `leaves` (end of sequence)
    get no children. chain=True follows the best child only.
    """
    depth = lattice.slots if max_depth is None else min(max_depth, lattice.slots)
    if nodes < 1 or depth < 1:
        return EMPTY
    ends = NO_TOKENS if leaves is None else leaves
    plain = lattice.emission, lattice.blank, lattice.tokens, ends, lattice.merge, nodes, depth, chain
    *behind, tables = NOT_MOVED if lattice.behind is None else lattice.behind
    return Tree(*_search(*plain, lattice.behind is not None, read, *behind, *tables))  # type: ignore[call-arg]


def first_emissions(lattice: Lattice, read: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """p_t(y) [T, Y] and p_t(blank) [T] before anything is collapsed; read: see `search`."""
    if lattice.behind is None:
        return lattice.emission, lattice.blank
    *behind, tables = lattice.behind
    p, blanks = _first(lattice.emission, lattice.tokens, read, *behind, *tables)  # type: ignore[call-arg]
    return p[:, : len(lattice.tokens)], blanks


def chosen(
    scored: Tree,
    nodes: int,
    *,
    max_depth: int | None = None,
    leaves: NDArray[np.int64] | None = None,
    chain: bool = False,
) -> Tree:
    """The best `nodes` nodes by psi of a tree whose psi never grows along a path: what `search` is for a lattice."""
    ends = NO_TOKENS if leaves is None else leaves
    deepest = int(scored.depths.max(initial=0)) if max_depth is None else max_depth
    kept = _chosen(scored.tokens, scored.parents, scored.depths, scored.psi, ends, nodes, deepest, chain)
    number = np.full(len(scored) + 1, -1)
    number[kept] = np.arange(len(kept))
    return Tree(scored.tokens[kept], number[scored.parents[kept]], scored.depths[kept], scored.psi[kept])


@njit(cache=True)
def _chosen(tokens, parents, depths, psi, ends, nodes, max_depth, chain):
    order = np.argsort(-psi, kind="mergesort")  # stable: parents come before children of the same psi
    taken = np.zeros(len(tokens) + 1, np.bool_)
    taken[-1] = True  # the root
    kept = np.empty(min(nodes, len(tokens)), np.int64)
    count, last = 0, -1
    for i in order:
        if count == len(kept):
            break
        parent = parents[i]
        ended = False
        for end in ends:
            ended |= parent >= 0 and tokens[parent] == end
        if taken[parent] and not ended and depths[i] <= max_depth and psi[i] > 0 and (not chain or parent == last):
            taken[i] = True
            kept[count] = i
            count, last = count + 1, i
    return kept[:count]


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


@njit(cache=True)
def _search(
    emission, blank, tokens, ends, merge, nodes, max_depth, chain, moving, read,
    root_token, root, slot, place, held, log_p, every, rest, log_blank,
    context, token, successor, lookup, match, carry, blank_vector,
):  # fmt: skip
    T, C = emission.shape
    J = successor.shape[1] + (len(lookup) > 0)
    # Columns are what may follow a prefix: the candidates; then of what was looked up and its last token's successors
    # those that are none of them
    # (own[i, j]: column C + j of prefix i); then that token itself, where it is neither.
    columns = C + J + (J > 0)
    # pb[i, t], pn[i, t]: the first t slots collapse to exactly prefix i and end in blank / in its last
    # token. Index 0 is the empty prefix, index n + 1 is node n.
    pb = np.zeros((nodes + 1, T + 1), np.float32)
    pn = np.zeros((nodes + 1, T + 1), np.float32)
    # p[i, t, c]: what slot t emits behind prefix i; one row where nothing moves
    rows = nodes + 1 if moving else 1
    p = np.zeros((rows, T, columns), np.float32)
    states, own = np.zeros((rows, len(root)), np.float32), np.full((rows, J), -1)
    at = _anchor(
        tokens,
        emission,
        read,
        slot,
        place,
        held,
        log_p,
        every,
        rest,
        log_blank,
        token,
        successor,
        lookup,
        match,
        carry,
        blank_vector,
    )
    pb[0, 0] = 1.0
    if moving:
        states[0] = root
        _place(own[0], states[0], read[-2] if len(read) > 1 else -1, root_token, at)
    else:
        p[0] = emission
    for t in range(T):
        if pb[0, t] > UNLIKELY:
            pb[0, t + 1] = pb[0, t] * (_emit(p[0, t], t, states[0], root_token, -1, at) if moving else blank[t])
    # children[i, c]: psi of prefix i followed by column c, -1 once taken; best[i] the largest of row i
    children = np.zeros((nodes + 1, columns), np.float32)
    best = np.zeros(nodes + 1, np.float32)
    said = np.empty(nodes + 1, np.int64)  # the token that each prefix ends in
    stays = np.full(nodes + 1, -1)  # and its own column for it
    parents = np.empty(nodes, np.int64)
    depths = np.zeros(nodes + 1, np.int64)
    psis = np.empty(nodes, np.float32)
    count = 0
    grows = True
    while True:
        i = count  # the prefix that was found last
        if grows:
            stop = T if merge else depths[i] + 1
            _score(children[i], pb[i], pn[i], p[i if moving else 0], depths[i], stop, stays[i] if merge else -1)
            if J > 0:
                children[i, C + J] = 0.0  # it is no candidate
            best[i] = children[i, _largest(children[i])]
        g = count if chain else _largest(best[: count + 1])
        if count == nodes or best[g] <= 0.0:
            break
        c = _largest(children[g])
        n, depth = count + 1, depths[g]
        said[n] = tokens[c] if c < C else own[g, c - C]
        parents[count], depths[n], psis[count] = g - 1, depth + 1, best[g]
        children[g, c] = -1.0
        best[g] = children[g, _largest(children[g])]
        count = n
        grows = depth + 1 < max_depth and n < nodes
        for end in ends:
            grows &= said[n] != end
        if not grows:
            continue
        before, after = (g, n) if moving else (0, 0)
        stays[n] = c
        if moving:
            _advance(states[n], states[g], context[said[n]], at)
            stays[n] = _place(own[n], states[n], said[g] if g > 0 else root_token, said[n], at)
        for t in range(depth, T if merge else depth + 1):
            phi = pb[g, t] if merge and c == stays[g] else pb[g, t] + pn[g, t]
            pn[n, t + 1] = phi * p[before, t, c]
            if pb[n, t] + pn[n, t] > UNLIKELY:
                p_blank = _emit(p[n, t], t, states[n], said[n], stays[n], at) if moving else blank[t]
                pn[n, t + 1] += pn[n, t] * p[after, t, stays[n]]
                pb[n, t + 1] = (pb[n, t] + pn[n, t]) * p_blank
        if moving and not merge:
            _emit(p[n, depth + 1], depth + 1, states[n], said[n], stays[n], at)
    return said[1 : count + 1], parents[:count], depths[1 : count + 1], psis[:count]


@njit(cache=True)
def _first(
    emission, tokens, read, root_token, root, slot, place, held, log_p, every, rest, log_blank,
    context, token, successor, lookup, match, carry, blank_vector,
):  # fmt: skip
    """What slots emit behind the empty prefix."""
    (T, C), J = emission.shape, successor.shape[1] + (len(lookup) > 0)
    p, blanks = np.zeros((T, C + J + (J > 0)), np.float32), np.empty(T, np.float32)
    at = _anchor(
        tokens,
        emission,
        read,
        slot,
        place,
        held,
        log_p,
        every,
        rest,
        log_blank,
        token,
        successor,
        lookup,
        match,
        carry,
        blank_vector,
    )
    state = root.copy()
    _place(np.full(J, -1), state, read[-2] if len(read) > 1 else -1, root_token, at)
    for t in range(T):
        blanks[t] = _emit(p[t], t, state, root_token, -1, at)
    return p, blanks


@njit(cache=True)
def _score(children, pb, pn, p, start, stop, repeat):
    """psi of a prefix followed by each candidate; the one that repeats its last token needs a blank before it."""
    for t in range(start, stop):
        phi = pb[t] + pn[t]
        if phi == 0.0:
            continue
        for c in range(len(children)):
            children[c] += phi * p[t, c]
    if repeat >= 0:
        psi = np.float32(0.0)
        for t in range(start, stop):
            psi += pb[t] * p[t, repeat]
        children[repeat] = psi


UNLIKELY = np.float32(1e-9)  # slots that are this unlikely to write what follows a prefix are not looked at


@njit(cache=True)
def _hardswish(x):
    return x * min(max(x + np.float32(3.0), np.float32(0.0)), np.float32(6.0)) * np.float32(1 / 6)


@njit(cache=True)
def _products(out, gate, key):
    """out + gate @ key, four ranks at a time; a sum's order is fixed, see kernels/cpu_shortlist.py. (Not its function:
    numba would go on with the compiled search of before where only another file has changed.)"""
    R, X = key.shape
    for r in range(0, R // 4 * 4, 4):
        g0, g1, g2, g3 = gate[r], gate[r + 1], gate[r + 2], gate[r + 3]
        for x in range(X):
            out[x] += (g0 * key[r, x] + g1 * key[r + 1, x]) + (g2 * key[r + 2, x] + g3 * key[r + 3, x])
    for r in range(R // 4 * 4, R):
        for x in range(X):
            out[x] += gate[r] * key[r, x]


@njit(cache=True)
def _advance(state, before, step, at):
    """The state behind a prefix that has grown by one token."""
    for r in range(len(state)):
        at.gate[r] = _hardswish(before[r])
    state[:] = step
    _products(state, at.gate, at.carry)


class _Anchor(NamedTuple):
    """What `_emit` reads, bundled within compiled code, where that is free: see `Behind`. key [T, R, K]: P w_v of the
    shortlists; next [J], next_key [R, J] and column [J]: what was looked up and the last token's successors, their
    P w_v, and where they stand; then room for intermediate results."""

    tokens: Any
    emission: Any
    read: Any
    slot: Any
    place: Any
    held: Any
    log_p: Any
    every: Any
    rest: Any
    log_blank: Any
    token: Any
    successor: Any
    lookup: Any
    match: Any
    carry: Any
    blank_vector: Any
    key: Any
    next: Any
    next_key: Any
    column: Any
    gate: Any
    moved: Any
    scale: Any
    counts: Any


@njit(cache=True)
def _anchor(
    tokens, emission, read, slot, place, held, log_p, every, rest, log_blank,
    token, successor, lookup, match, carry, blank_vector,
):  # fmt: skip
    (T, K), J, R = log_p.shape, successor.shape[1] + (len(lookup) > 0), slot.shape[1]
    key = np.empty((T, R, K), np.float32)
    for t in range(T):
        _transposed(key[t], token, tokens[place[t]])
    room = K + 2 * J  # the shortlist, moved; successors, moved; successors, as they were
    return _Anchor(
        tokens, emission, read, slot, place, held, log_p, every, rest, log_blank,
        token, successor, lookup, match, carry, blank_vector,
        key, np.empty(J, np.int64), np.zeros((R, J), np.float32), np.empty(J, np.int64), np.empty(R, np.float32),
        np.empty(room, np.float32), np.empty(room, np.int32), np.zeros(J, np.bool_),
    )  # fmt: skip


@njit(cache=True)
def _followed(read, before, last):
    """(token, match): what followed the latest place where (before, last) were read one after the other, match 2, or
    else the latest where `last` was, match 1; (-1, 0): nowhere."""
    token = -1
    for i in range(len(read) - 2, -1, -1):
        if read[i] == last:
            if i > 0 and read[i - 1] == before:
                return read[i + 1], 2
            if token < 0:
                token = read[i + 1]
    return token, 1 if token >= 0 else 0


@njit(cache=True)
def look_up(read, labels, token, match):
    """What followed the last time, behind the tokens read and each label after them, into token and match [S]."""
    before, last = read[-2] if len(read) > 1 else -1, read[-1]
    token[0], match[0] = _followed(read, before, last)
    for u in range(len(labels)):
        before, last = last, labels[u]
        token[u + 1], match[u + 1] = _followed(read, before, last)


@njit(cache=True)
def _place(own, state, before, last, at):
    """The column of a prefix's last token; `own` takes the tokens of its own columns, `at` what it says of tokens that
    may follow, the state what was looked up."""
    C, looks_up = len(at.tokens), len(at.lookup) > 0
    stay = _column(at.tokens, last)
    if looks_up:
        at.next[0], match = _followed(at.read, before, last)
        for r in range(len(state)):
            state[r] += at.match[match, r] + (at.lookup[at.next[0], r] if match > 0 else np.float32(0.0))
    for j in range(at.successor.shape[1]):
        v = at.successor[last, j]
        at.next[j + looks_up] = -1 if looks_up and v == at.next[0] else v
    _transposed(at.next_key, at.token, at.next)
    for j in range(len(own)):
        v = at.next[j]
        at.column[j] = _column(at.tokens, v)
        if at.column[j] < 0:
            at.column[j], own[j] = C + j, v
            if v == last:
                stay = C + j
    return C + len(own) if stay < 0 else stay


@njit(cache=True)
def _transposed(out, rows, index):
    """Columns of `out` are the rows at the index, anything where it is -1."""
    R, X = out.shape
    for r in range(R):
        for x in range(X):
            out[r, x] = rows[max(index[x], 0), r]


@njit(cache=True)
def _column(tokens, v):
    """Where token v stands among the candidates (ascending), -1: nowhere."""
    low, high = 0, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if tokens[middle] < v:
            low = middle + 1
        else:
            high = middle
    return low if low < len(tokens) and tokens[low] == v else -1


@njit(cache=True)
def _emit(p, t, state, last, stay, at):
    """p_t(y | prefix) into p [columns], from the prefix's state and last token, after its `_place`; p_t(blank | prefix)
    is given back.

    stay: the column of the last token, -1 for the empty prefix.
    """
    C, R, K, J = len(at.tokens), len(state), at.log_p.shape[1], len(at.column)
    gate, moved, counts = at.gate, at.moved, at.counts
    share = np.float32(0.0)
    for r in range(R):
        gate[r] = _hardswish(at.slot[t, r] + state[r])
        share += gate[r] * at.blank_vector[r]
    moved[:K] = at.log_p[t]
    for j in range(J):
        v = at.next[j]
        counts[j] = v >= 0 and (at.column[j] >= C or not at.held[t, at.column[j]])
        moved[K + j] = moved[K + J + j] = at.every[t, max(v, 0)]
    _products(moved[:K], gate, at.key[t])
    _products(moved[K : K + J], gate, at.next_key)
    _exp(moved, at.scale)
    total = at.rest[t]
    for j in range(J):
        total -= moved[K + J + j] if counts[j] else np.float32(0.0)
    total = max(total, np.float32(0.0))
    for k in range(K):
        total += moved[k]
    for j in range(J):
        total += moved[K + j] if counts[j] else np.float32(0.0)
    p_blank = np.exp(min(at.log_blank[t] + share, np.float32(80.0)))
    inverse = np.float32(1.0) / (total + p_blank)
    for c in range(C):
        p[c] = at.emission[t, c] * inverse
    for k in range(K):
        p[at.place[t, k]] = moved[k] * inverse
    for j in range(J):
        if counts[j]:
            p[at.column[j]] = moved[K + j] * inverse
    if stay == C + J:
        p[stay] = np.exp(at.every[t, last]) * inverse
    return p_blank * inverse


@njit(cache=True, fastmath={"contract"})
def _exp(x, scale):
    """exp in place, to 1e-7 of its value, |log2| up to 126: a polynomial and an exponent, which the compiler can
    write for 8 numbers at once (Cephes' coefficients of 2^f)."""
    for k in range(len(x)):
        power = min(max(x[k] * np.float32(1.4426950408889634), np.float32(-126.0)), np.float32(126.0))
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
def _ancestors(parents):
    N = len(parents)
    allowed = np.zeros((N + 1, N + 1), np.bool_)
    allowed[0, 0] = True
    for i in range(N):
        allowed[i + 1] = allowed[parents[i] + 1]
        allowed[i + 1, i + 1] = True
    return allowed


@njit(cache=True)
def _walk(tokens, parents, targets):
    path = []
    at = -1
    for i in range(len(tokens)):
        if parents[i] == at and tokens[i] == targets[at + 1]:
            path.append(i)
            at = i
    return path


@njit(cache=True)
def calibrated(psi, depths, parents, knot_psi, knot_rate, begins):
    """Each node's psi through the knots of its depth (budget.Calibration), at most its parent's."""
    p = np.empty(len(psi))
    for i in range(len(psi)):
        row = min(depths[i], len(begins) - 1) - 1
        first, last = begins[row], begins[row + 1] - 1
        k = first
        while k < last and knot_psi[k + 1] <= psi[i]:
            k += 1
        if k == last or psi[i] <= knot_psi[first]:
            p[i] = knot_rate[k]
        else:
            share = (psi[i] - knot_psi[k]) / (knot_psi[k + 1] - knot_psi[k])
            p[i] = knot_rate[k] + share * (knot_rate[k + 1] - knot_rate[k])
        if parents[i] >= 0:
            p[i] = min(p[i], p[parents[i]])
    return p
