"""From lattice to draft tree: best-first search on exact CTC prefix probabilities (docs/method.md).

psi never grows along a path, so the N best prefixes form a tree, and it is the N-node tree with the
largest expected number of accepted tokens under the head's own beliefs. Best-first finds them in order.

Shape suffixes: N nodes, B sequences, Q rows (root, nodes, padding), K cached and new entries.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from ..base.context import AttentionMask
from ..lattice import best_first
from ..lattice.candidates import Lattice

HEAD, LOOKUP, PHRASES, SIBLINGS = 1, 2, 4, 8  # bits of Tree.source
SOURCES = {HEAD: "head", LOOKUP: "lookup", HEAD | LOOKUP: "both"}
NAMES = {HEAD: "head", LOOKUP: "lookup", PHRASES: "phrases", SIBLINGS: "siblings"}


@dataclass(frozen=True)
class Tree:
    """Draft nodes, parents first: token ids, parent index (-1: the root), depth (1..), psi. All [N].

    source [N]: who proposed each node, HEAD, LOOKUP, PHRASES, SIBLINGS or several; by default the head. proposals: of
    rows (0: the root, n + 1: node n) whose children were drawn, in the order of their nodes, the tokens and the
    probabilities that they were drawn from.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    psi: NDArray[np.float32]
    source: NDArray[np.int8] = None  # type: ignore[assignment]
    proposals: Mapping[int, tuple[NDArray[np.int64], NDArray[np.float64]]] | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            object.__setattr__(self, "source", np.full(len(self), HEAD, np.int8))

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> "Tree":
        """The tree of the first nodes: parents come first, so it is one."""
        n = slice(nodes)
        return Tree(self.tokens[n], self.parents[n], self.depths[n], self.psi[n], self.source[n])

    def ancestors(self) -> NDArray[np.bool_]:
        """[N + 1, N + 1]: may row i attend to column j? Index 0 is the root, i + 1 is node i."""
        return _ancestors(self.parents)

    def walk(self, said: Callable[[int], int]) -> tuple[list[int], int]:
        """The accepted nodes, and what is said behind the last of them: from the root, to the child that holds what is
        said where we stand. said(row): after the root (row 0) or node row - 1."""
        at, path = -1, list[int]()
        while True:
            token = said(at + 1)
            children = np.flatnonzero((self.parents == at) & (self.tokens == token))
            if not len(children):
                return path, token
            at = int(children[0])
            path.append(at)

    def sources(self, path: Sequence[int]) -> list[str]:
        """Who proposed each node of a path: `head`, `lookup`, `both` for these two, or others joined by +."""
        return [source_name(int(self.source[node])) for node in path]

    def path_of(self, labels: Sequence[int]) -> list[int]:
        """The nodes that hold the labels, the base's own continuation of the root, as far as they go."""
        left = iter(labels)
        return self.walk(lambda _: next(left, -1))[0]


def source_name(bits: int) -> str:
    return SOURCES.get(bits) or "+".join(name for bit, name in NAMES.items() if bits & bit)


NO_TOKENS = np.zeros(0, np.int64)
EMPTY = Tree(NO_TOKENS, NO_TOKENS, NO_TOKENS, np.zeros(0, np.float32))
ANY_DEPTH = 1 << 30


def search(
    lattice: Lattice,
    nodes: int,
    *,
    max_depth: int = ANY_DEPTH,
    leaves: NDArray[np.int64] = NO_TOKENS,
    chain: bool = False,
    prune: float = 0.0,
) -> Tree:
    """The best `nodes` prefixes of the lattice by psi, at most `max_depth` deep.

    Tokens in `leaves` (end of sequence) get no children. chain=True follows the best child only. prune: behind each
    prefix the last slots are left out that at most this share of its alignments reach without a new token, so that psi
    of depth d is at most d * prune too small.
    """
    depth = min(max_depth, len(lattice.log_p))
    if nodes < 1 or depth < 1:
        return EMPTY
    return Tree(*best_first.search(lattice, leaves, nodes, max_depth=depth, chain=chain, prune=np.float32(prune)))


def chosen(
    scored: Tree,
    nodes: int,
    *,
    max_depth: int = ANY_DEPTH,
    leaves: NDArray[np.int64] = NO_TOKENS,
    chain: bool = False,
) -> Tree:
    """The best `nodes` nodes by psi of a tree whose psi never grows along a path: what `search` is for a lattice."""
    tree = scored.tokens, scored.parents, scored.depths, scored.psi
    kept = _chosen(*tree, ends=leaves, nodes=nodes, max_depth=max_depth, chain=chain)
    number = np.full(len(scored) + 1, -1)
    number[kept] = np.arange(len(kept))
    parents, source = number[scored.parents[kept]], scored.source[kept]
    return Tree(scored.tokens[kept], parents, scored.depths[kept], scored.psi[kept], source)


def tree_mask(drafts: Sequence[Tree], lengths: NDArray[np.int64], device: torch.device) -> AttentionMask:
    """Of trees behind `lengths` [B] committed entries: a node stands at root + depth, and sees the committed past and
    its own ancestors."""
    B, Q = len(drafts), 1 + max(map(len, drafts))
    past_B1, row_Q = lengths[:, None], np.arange(Q)
    depths_BQ = np.zeros((B, Q), np.int64)
    if B == Q == 1:
        return AttentionMask(torch.from_numpy(past_B1.copy()).to(device))
    sees_BQK = np.zeros((B, Q, int(lengths.max()) + Q), bool)
    sees_BQK |= (np.arange(sees_BQK.shape[2]) < past_B1)[:, None]
    sees_BQK[np.arange(B)[:, None], row_Q, past_B1 + row_Q] = True  # a padding row must see something: itself
    for b, tree in enumerate(drafts):
        if len(tree):
            rows, past = len(tree) + 1, int(lengths[b])
            depths_BQ[b, 1:rows] = tree.depths
            sees_BQK[b, :rows, past : past + rows] = tree.ancestors()
    positions_BQ = torch.from_numpy(past_B1 + depths_BQ)
    return AttentionMask(positions_BQ.to(device), torch.from_numpy(sees_BQK).to(device).unsqueeze(1))


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
        ended = parent >= 0 and (ends == tokens[parent]).any()
        if taken[parent] and not ended and depths[i] <= max_depth and psi[i] > 0 and (not chain or parent == last):
            taken[i] = True
            kept[count] = i
            count, last = count + 1, i
    return kept[:count]


@njit(cache=True)
def _ancestors(parents):
    N = len(parents)
    allowed = np.zeros((N + 1, N + 1), np.bool_)
    allowed[0, 0] = True
    for i in range(N):
        for j in range(N + 1):  # see best_first._emit
            allowed[i + 1, j] = allowed[parents[i] + 1, j]
        allowed[i + 1, i + 1] = True
    return allowed
