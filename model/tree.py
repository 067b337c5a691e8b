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

from ctcdraft.model.lattice import Lattice


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
    found = _search(lattice.emission, lattice.blank, lattice.tokens, ends, lattice.merge, nodes, depth, chain)
    return Tree(*found)


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
def _search(emission, blank, tokens, ends, merge, nodes, max_depth, chain):
    T, _, C = emission.shape
    moving = emission.shape[1] > 1  # what a slot emits depends on the last token
    # pb[i, t], pn[i, t]: the first t slots collapse to exactly prefix i and end in blank / in its last
    # token. Index 0 is the empty prefix, index n + 1 is node n.
    pb = np.zeros((nodes + 1, T + 1), np.float32)
    pn = np.zeros((nodes + 1, T + 1), np.float32)
    pb[0, 0] = 1.0
    for t in range(T):
        pb[0, t + 1] = pb[0, t] * blank[t, 0]
    # children[i, c]: psi of prefix i followed by candidate c, -1 once taken; best[i] the largest of row i
    children = np.zeros((nodes + 1, C), np.float32)
    best = np.zeros(nodes + 1, np.float32)
    last = np.full(nodes + 1, -1)  # the candidate that each prefix ends in
    parents = np.empty(nodes, np.int64)
    depths = np.zeros(nodes + 1, np.int64)
    psis = np.empty(nodes, np.float32)
    count = 0
    while True:
        i = count  # the prefix that was found last
        ended = False
        for end in ends:
            ended |= i > 0 and tokens[last[i]] == end
        if depths[i] < max_depth and not ended:
            row = last[i] + 1 if moving else 0
            for t in range(T) if merge else range(depths[i], depths[i] + 1):
                phi = pb[i, t] + pn[i, t]
                for c in range(C):
                    children[i, c] += phi * emission[t, row, c]
            if merge and i > 0:  # a repeat needs a blank before it
                c, psi = last[i], np.float32(0.0)
                for t in range(T):
                    psi += pb[i, t] * emission[t, row, c]
                children[i, c] = psi
            best[i] = children[i, _largest(children[i])]
        g = count if chain else _largest(best[: count + 1])
        if count == nodes or best[g] <= 0.0:
            break
        c = _largest(children[g])
        n = count + 1
        parents[count], depths[n], psis[count], last[n] = g - 1, depths[g] + 1, best[g], c
        children[g, c] = -1.0
        best[g] = children[g, _largest(children[g])]
        row, own = (last[g] + 1, c + 1) if moving else (0, 0)
        for t in range(T):
            phi = pb[g, t] if merge and c == last[g] else pb[g, t] + pn[g, t]
            start = phi * emission[t, row, c]
            if merge:
                pn[n, t + 1] = pn[n, t] * emission[t, own, c] + start
                pb[n, t + 1] = (pb[n, t] + pn[n, t]) * blank[t, own]
            elif t == depths[g]:
                pn[n, t + 1] = start
        count = n
    return tokens[last[1 : count + 1]], parents[:count], depths[1 : count + 1], psis[:count]


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
