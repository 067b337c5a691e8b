"""From lattice to draft tree: best-first search on exact CTC prefix probabilities (docs/method.md).

psi never grows along a path, so the N best prefixes form a tree, and it is the N-node tree with the
largest expected number of accepted tokens under the head's own beliefs. Best-first pops them in order.
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
    is_leaf = np.isin(lattice.tokens, leaves) if leaves is not None else np.zeros(len(lattice.tokens), bool)
    found = _search(lattice.emission, lattice.blank, lattice.merge, is_leaf, nodes, depth, chain)
    candidate, parents, depths, psi = found
    return Tree(lattice.tokens[candidate], parents, depths, psi)


@njit(cache=True)
def _push(heap_psi, heap_parent, heap_candidate, size, psi, parent, candidate):
    i = size
    while i > 0:
        up = (i - 1) // 2
        if heap_psi[up] >= psi:
            break
        heap_psi[i], heap_parent[i], heap_candidate[i] = heap_psi[up], heap_parent[up], heap_candidate[up]
        i = up
    heap_psi[i], heap_parent[i], heap_candidate[i] = psi, parent, candidate


@njit(cache=True)
def _drop_top(heap_psi, heap_parent, heap_candidate, size):
    """Remove the top of a heap of `size` entries: the last entry sinks from the top."""
    last = size - 1
    psi, parent, candidate = heap_psi[last], heap_parent[last], heap_candidate[last]
    i = 0
    while 2 * i + 1 < last:
        child = 2 * i + 1
        if child + 1 < last and heap_psi[child + 1] > heap_psi[child]:
            child += 1
        if heap_psi[child] <= psi:
            break
        heap_psi[i], heap_parent[i] = heap_psi[child], heap_parent[child]
        heap_candidate[i] = heap_candidate[child]
        i = child
    heap_psi[i], heap_parent[i], heap_candidate[i] = psi, parent, candidate


@njit(cache=True)
def _search(emission, blank, merge, is_leaf, nodes, max_depth, chain):
    T, R, C = emission.shape
    # pb[i, t], pn[i, t]: the first t slots collapse to exactly prefix i and end in blank / in its last
    # token. Index 0 is the empty prefix, index n + 1 is node n.
    pb = np.zeros((nodes + 1, T + 1), np.float32)
    pn = np.zeros((nodes + 1, T + 1), np.float32)
    pb[0, 0] = 1.0
    for t in range(T):
        pb[0, t + 1] = pb[0, t] * blank[t, 0]
    candidates = np.empty(nodes, np.int64)
    parents = np.empty(nodes, np.int64)
    depths = np.empty(nodes, np.int64)
    psis = np.empty(nodes, np.float32)
    heap_psi = np.empty(C * (nodes + 1), np.float32)
    heap_parent = np.empty(C * (nodes + 1), np.int64)
    heap_candidate = np.empty(C * (nodes + 1), np.int64)
    size = 0
    count = 0
    parent, last, depth = -1, -1, 0
    while True:
        if depth < max_depth and (last < 0 or not is_leaf[last]):
            size = 0 if chain else size
            row = last + 1 if R > 1 else 0
            g = parent + 1
            for c in range(C):
                psi = np.float32(0.0)
                for t in range(T):
                    p = pb[g, t] if merge and c == last else pb[g, t] + pn[g, t]
                    if not merge:
                        p = p if t == depth else np.float32(0.0)
                    psi += p * emission[t, row, c]
                if psi > 0.0:
                    _push(heap_psi, heap_parent, heap_candidate, size, psi, parent, c)
                    size += 1
        elif chain:
            size = 0
        if count == nodes or size == 0:
            break
        psi, parent, last = heap_psi[0], heap_parent[0], heap_candidate[0]
        _drop_top(heap_psi, heap_parent, heap_candidate, size)
        size -= 1
        depth = 1 if parent < 0 else depths[parent] + 1
        candidates[count], parents[count], depths[count], psis[count] = last, parent, depth, psi
        before = candidates[parent] if parent >= 0 else -1
        row, own = (before + 1, last + 1) if R > 1 else (0, 0)
        g, n = parent + 1, count + 1
        for t in range(T):
            p = pb[g, t] if merge and last == before else pb[g, t] + pn[g, t]
            start = p * emission[t, row, last]
            if merge:
                pn[n, t + 1] = pn[n, t] * emission[t, own, last] + start
                pb[n, t + 1] = (pb[n, t] + pn[n, t]) * blank[t, own]
            elif t == depth - 1:
                pn[n, t + 1] = start
        parent = count
        count += 1
    return candidates[:count], parents[:count], depths[:count], psis[:count]


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
