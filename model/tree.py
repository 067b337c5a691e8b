"""From lattice to draft tree: best-first search on exact CTC prefix probabilities (docs/method.md).

psi never grows along a path, so the N best prefixes form a tree, and it is the N-node tree with the
largest expected number of accepted tokens under the head's own beliefs. Best-first finds them in order.

A node's children are all scored at once (a SIMD loop over the candidates), and only its best child that is not
taken yet competes with those of other nodes: no heap of all children.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ctcdraft.model.lattice import Behind, Lattice


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
NOT_MOVED = Behind(
    _ROW, _TABLE, _TABLE, _TABLE, np.zeros((0, 0), np.int64), _TABLE, np.zeros((0, 0, 0), np.float32), _ROW, _ROW, _ROW
)
EMPTY = Tree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))


def search(
    lattice: Lattice,
    nodes: int,
    *,
    max_depth: int | None = None,
    leaves: NDArray[np.int64] | None = None,
    chain: bool = False,
) -> Tree:
    """The best `nodes` prefixes of the lattice by psi, at most `max_depth` deep.

    Tokens in `leaves` (end of sequence) get no children. chain=True follows the best child only.
    """
    depth = lattice.slots if max_depth is None else min(max_depth, lattice.slots)
    if nodes < 1 or depth < 1:
        return EMPTY
    ends = NO_TOKENS if leaves is None else leaves
    plain = lattice.emission, lattice.blank, lattice.tokens, ends, lattice.merge, nodes, depth, chain
    if lattice.behind is None:
        return Tree(*_search(*plain, False, *NOT_MOVED))
    return Tree(*_search(*plain, True, *lattice.behind))


def first_emissions(lattice: Lattice) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """p_t(y) [T, Y] and p_t(blank) [T] before anything is collapsed."""
    if lattice.behind is None:
        return lattice.emission, lattice.blank
    p, blanks = np.empty_like(lattice.emission), np.empty_like(lattice.blank)
    root, _, _, *rest = lattice.behind
    _emit(p, blanks, 0, lattice.slots, root, lattice.emission, *rest)
    return p, blanks


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
    emission, blank, tokens, ends, merge, nodes, max_depth, chain, moving,
    root, step, carry, slot, place, log_p, token, rest, log_blank, blank_vector,
):  # fmt: skip
    T, C = emission.shape
    # pb[i, t], pn[i, t]: the first t slots collapse to exactly prefix i and end in blank / in its last
    # token. Index 0 is the empty prefix, index n + 1 is node n.
    pb = np.zeros((nodes + 1, T + 1), np.float32)
    pn = np.zeros((nodes + 1, T + 1), np.float32)
    # p[i, t, c], blanks[i, t]: what slot t emits behind prefix i, from slot depths[i] on; one row where nothing moves
    rows = nodes + 1 if moving else 1
    p, blanks = np.empty((rows, T, C), np.float32), np.empty((rows, T), np.float32)
    states = np.zeros((rows, len(root)), np.float32)
    if moving:
        states[0] = root
        _emit(p[0], blanks[0], 0, T, states[0], emission, slot, place, log_p, token, rest, log_blank, blank_vector)
    else:
        p[0], blanks[0] = emission, blank
    pb[0, 0] = 1.0
    for t in range(T):
        pb[0, t + 1] = pb[0, t] * blanks[0, t]
    # children[i, c]: psi of prefix i followed by candidate c, -1 once taken; best[i] the largest of row i
    children = np.zeros((nodes + 1, C), np.float32)
    best = np.zeros(nodes + 1, np.float32)
    last = np.full(nodes + 1, -1)  # the candidate that each prefix ends in
    parents = np.empty(nodes, np.int64)
    depths = np.zeros(nodes + 1, np.int64)
    psis = np.empty(nodes, np.float32)
    count = 0
    grows = True
    while True:
        i = count  # the prefix that was found last
        if grows:
            stop = T if merge else depths[i] + 1
            repeat = last[i] if merge and i > 0 else -1
            _score(children[i], pb[i], pn[i], p[i if moving else 0], depths[i], stop, repeat)
            best[i] = children[i, _largest(children[i])]
        g = count if chain else _largest(best[: count + 1])
        if count == nodes or best[g] <= 0.0:
            break
        c = _largest(children[g])
        n, depth = count + 1, depths[g]
        parents[count], depths[n], psis[count], last[n] = g - 1, depth + 1, best[g], c
        children[g, c] = -1.0
        best[g] = children[g, _largest(children[g])]
        count = n
        grows = depth + 1 < max_depth and n < nodes
        for end in ends:
            grows &= tokens[c] != end
        if not grows:
            continue
        before, own = 0, 0
        if moving:
            before, own = g, n
            _advance(states[n], states[g], step[c], carry)
            stop = T if merge else depth + 2
            _emit(
                p[n], blanks[n], depth + 1, stop, states[n],
                emission, slot, place, log_p, token, rest, log_blank, blank_vector,
            )  # fmt: skip
        if not merge:
            pn[n, depth + 1] = (pb[g, depth] + pn[g, depth]) * p[before, depth, c]
            continue
        for t in range(depth, T):
            phi = pb[g, t] if c == last[g] else pb[g, t] + pn[g, t]
            pn[n, t + 1] = phi * p[before, t, c]
            if t > depth:
                pn[n, t + 1] += pn[n, t] * p[own, t, c]
                pb[n, t + 1] = (pb[n, t] + pn[n, t]) * blanks[own, t]
    return tokens[last[1 : count + 1]], parents[:count], depths[1 : count + 1], psis[:count]


@njit(cache=True)
def _score(children, pb, pn, p, start, stop, repeat):
    """psi of a prefix followed by each candidate; the one that repeats its last token needs a blank before it."""
    for t in range(start, stop):
        phi = pb[t] + pn[t]
        for c in range(len(children)):
            children[c] += phi * p[t, c]
    if repeat >= 0:
        psi = np.float32(0.0)
        for t in range(start, stop):
            psi += pb[t] * p[t, repeat]
        children[repeat] = psi


FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities stay what they are


@njit(cache=True)
def _hardswish(x):
    return x * min(max(x + np.float32(3.0), np.float32(0.0)), np.float32(6.0)) * np.float32(1 / 6)


@njit(cache=True, fastmath=FAST)
def _advance(state, before, step, carry):
    """The state behind a prefix that has grown by one token."""
    R = len(state)
    gate = np.empty(R, np.float32)
    for r in range(R):
        gate[r] = _hardswish(before[r])
    for r in range(R):
        carried = step[r]
        for q in range(R):
            carried += carry[r, q] * gate[q]
        state[r] = carried


@njit(cache=True, fastmath=FAST)
def _emit(p, blanks, start, stop, state, emission, slot, place, log_p, token, rest, log_blank, blank_vector):
    """p_t(y | prefix) and p_t(blank | prefix) of slots start..stop-1, from the prefix's state."""
    C, R, K = emission.shape[1], len(state), log_p.shape[1]
    gate, moved, scale = np.empty(R, np.float32), np.empty(K, np.float32), np.empty(K, np.int32)
    for t in range(start, stop):
        share = np.float32(0.0)
        for r in range(R):
            gate[r] = _hardswish(slot[t, r] + state[r])
            share += gate[r] * blank_vector[r]
        for k in range(K):
            delta = np.float32(0.0)
            for r in range(R):
                delta += gate[r] * token[t, k, r]
            moved[k] = log_p[t, k] + delta
        _exp(moved, scale)
        total = rest[t]
        for k in range(K):
            total += moved[k]
        p_blank = np.exp(min(log_blank[t] + share, np.float32(80.0)))
        inverse = np.float32(1.0) / (total + p_blank)
        blanks[t] = p_blank * inverse
        for c in range(C):
            p[t, c] = emission[t, c] * inverse
        for k in range(K):
            if place[t, k] >= 0:
                p[t, place[t, k]] = moved[k] * inverse


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
