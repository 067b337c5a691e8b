"""Trees that a rule grows row by row, best first, where `tree.search` knows one rule, psi.

A row is what a head believes to follow a prefix, all candidates of it. A rule says which of them become nodes, what
each is worth, and which of them may be followed. Parts of one rule are shared noise (Daliri et al. 2024, arXiv
2408.07978), CaPE (Du et al. 2024, arXiv 2402.02082), multi-candidate layouts (Yang et al. 2024, arXiv 2401.06706) and
AdaEDL's stop (Agrawal et al. 2024, arXiv 2410.18351).

Shapes: C candidates of a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.sampling import PROPOSAL, Sampling, gumbel_of
from ..lattice import best_first
from ..lattice.candidates import Lattice
from .config import DraftConfig
from .tree import EMPTY, Tree

BINS = ((0.3, 8), (0.6, 6), (0.8, 4), (1.1, 2))  # of CaPE: below so much confidence, so many candidates in all
GAMMA = 0.1  # of AdaEDL: a draft is accepted with at least 1 - sqrt(gamma * entropy); theirs is 0.2
TAIL = 10_000  # tokens that share what a row leaves out


class Hints(NamedTuple):
    """What a head is told of the tree that becomes of its draft.

    noise_NTV: what is added to log-probabilities of the tokens that slot t may hold, where candidates are chosen, and
    the nodes that a beam expands. least: of a row whose `acceptance_bound` is below it nothing is drafted, nor behind
    it. chain: of each depth the likeliest node alone.
    """

    noise_NTV: Tensor | None = None
    least: float | None = None
    chain: bool = False


NO_HINTS = Hints()


class Row(NamedTuple):
    """Tokens [C] that may follow a prefix, and q(token | prefix) [C], at most 1 in all."""

    tokens: NDArray[np.int64]
    q: NDArray[np.float64]


class Picked(NamedTuple):
    """Children of a row, the ones to draft first: columns [k] of the row, the share of the prefix's worth that each
    has [k], and how many of them may have children. q [C]: what they were drawn from, where that is needed."""

    columns: NDArray[np.int64]
    share: NDArray[np.float64]
    followed: int
    q: NDArray[np.float64] | None = None


class LatticePrefix:
    """One of a lattice: of its state pn comes from the prefix before, all else once its row is asked for."""

    def __init__(self, lattice: Lattice, state: best_first.Prefix | None = None) -> None:
        self.lattice, self.state = lattice, state or best_first.root_of(lattice)

    def row(self) -> Row:
        return Row(self.lattice.tokens, best_first.opened(self.lattice, self.state).astype(np.float64))

    def followed_by(self, column: int, q: float) -> "LatticePrefix":
        return LatticePrefix(self.lattice, best_first.followed(self.lattice, self.state, column, np.float32(q)))


class ScoredPrefix:
    """One of a tree whose nodes a head has scored: a node of it, -1: the root."""

    def __init__(self, tree: Tree, node: int = -1) -> None:
        self.tree, self.node = tree, node

    def row(self) -> Row:
        self.children = np.flatnonzero(self.tree.parents == self.node)
        psi = self.tree.psi.astype(np.float64)
        return Row(self.tree.tokens[self.children], psi[self.children] / (psi[self.node] if self.node >= 0 else 1.0))

    def followed_by(self, column: int, q: float) -> "ScoredPrefix":
        return ScoredPrefix(self.tree, int(self.children[column]))


Prefix = LatticePrefix | ScoredPrefix  # what was drafted; its row is what a head believes to follow it
Drafted = Lattice | Tree | Prefix  # what a head believes, behind the root or behind what followed it since


def behind(drafted: Lattice | Tree, tokens: Iterable[int]) -> Drafted:
    """What a head believed to follow these tokens behind the root from which it drafted; EMPTY where it did not expect
    them."""
    first = prefix_of(drafted)
    for token in tokens:
        row = first.row()
        column = np.flatnonzero((row.tokens == token) & (row.q > 0))
        if not len(column):
            return EMPTY
        first = first.followed_by(int(column[0]), float(row.q[column[0]]))
    return first


def prefix_of(drafted: Drafted) -> Prefix:
    if isinstance(drafted, Tree):
        return ScoredPrefix(drafted)
    return LatticePrefix(drafted) if isinstance(drafted, Lattice) else drafted


def grow(first: Prefix, rule: "Rule", nodes: int, *, max_depth: int, leaves: NDArray[np.int64]) -> Tree:
    """The tree of at most `nodes` nodes that are worth most, none deeper than max_depth; `leaves` get no children. Its
    psi is what each node is worth. rule: of a row and its depth, 0 behind the root."""
    tokens = list[int]()
    parents = list[int]()
    depths = list[int]()
    worths = list[float]()
    proposals = dict[int, Row]()
    rows = list[tuple[Prefix, Row, Picked, int]]()  # and the node that each follows
    # What may come next, worth at most so much: the n-th child of a row, or (n = -1) the row behind a node.
    waiting: list[tuple[float, int, int, Prefix | None]] = [(-1.0, -1, -1, first)] if max_depth > 0 else []
    while waiting and len(tokens) < nodes:
        negative, number, n, prefix = heappop(waiting)
        if prefix is not None:
            parent, number, n = number, len(rows), 0
            depth = depths[parent] if parent >= 0 else 0
            row = prefix.row()
            picked = rule(row, depth)
            if picked.q is not None:
                proposals[parent + 1] = Row(row.tokens, picked.q)
            rows.append((prefix, row, picked, parent))
        else:
            prefix, row, picked, parent = rows[number]
            column = int(picked.columns[n])
            tokens.append(int(row.tokens[column]))
            parents.append(parent)
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            worths.append(-negative)
            if n < picked.followed and depths[-1] < max_depth and tokens[-1] not in leaves:
                following = prefix.followed_by(column, float(row.q[column]))
                heappush(waiting, (negative, len(tokens) - 1, -1, following))
            n += 1
        if n < len(picked.columns):
            above = worths[parent] if parent >= 0 else 1.0
            heappush(waiting, (-above * float(picked.share[n]), number, n, None))
    nodes_3N = np.array([tokens, parents, depths], np.int64).reshape(3, -1)
    return Tree(nodes_3N[0], nodes_3N[1], nodes_3N[2], np.array(worths, np.float32), proposals=proposals or None)


@dataclass(frozen=True)
class Rule:
    """The rule that a config asks for, where the base will choose with `sampling` and the noise of `seed`, what follows
    the root at `position`. least: AdaEDL's lambda, a row whose bound is below it has no children; None: any has."""

    config: DraftConfig
    sampling: Sampling
    seed: int
    position: int
    least: float | None

    def __call__(self, row: Row, depth: int) -> Picked:
        last = self.config.kind == "ranked" and depth == len(self.config.k)
        if last or not row.q.any() or (self.least is not None and acceptance_bound(row.q) < self.least):
            return NOTHING
        if self.sampling.temperature == 0.0 or self.config.proposal == "best":
            return _largest(row.q, *self._layout(row.q, depth))
        # log q as the base's temperature, top_k and top_p make its logits, but for a constant; -inf: left out
        log_q = self.sampling.warped(torch.from_numpy(row.q).log().unsqueeze(0))[0].numpy()
        if self.config.proposal == "shared":
            score = (log_q + gumbel_of(row.tokens, self.seed, self.position + depth)) / self.config.trust
            drawn, own = np.exp(score - score.max()), np.exp(log_q - log_q.max())
            doubt = self.config.doubt
            share = row.q.sum() * ((1 - doubt) * drawn / drawn.sum() + doubt * own / own.sum())
            return _largest(share, *self._layout(share, depth))
        q = np.exp(log_q - np.logaddexp.reduce(log_q))
        score = log_q + gumbel_of(row.tokens, self.seed, self.position + depth, PROPOSAL)
        count, followed = self._layout(q, depth)
        drawn = np.argsort(-score, kind="stable")[:count]  # without replacement: Gumbel top-k
        drawn = drawn[q[drawn] > 0]
        return Picked(drawn, q[drawn], followed, q)

    def _layout(self, share: NDArray[np.float64], depth: int) -> tuple[int, int]:
        """How many children a row of that depth has, and how many of them have children of their own."""
        if self.config.kind == "chain":
            return 1, 1
        if self.config.kind == "ranked":
            return self.config.k[depth], self.config.k[depth]
        if self.config.kind == "cape":
            return next(count for below, count in BINS if share.max(initial=0.0) < below), 1
        return self.config.nodes, self.config.nodes


NOTHING = Picked(np.zeros(0, np.int64), np.zeros(0), 0)


def acceptance_bound(q: NDArray[np.float64]) -> float:
    """AdaEDL's bound on how likely one draw is accepted, by the entropy of a row. What is not in it is spread over TAIL
    tokens: as one token it would make a row look surer the less of it is known."""
    rest, q = max(1.0 - q.sum(), 0.0), q[q > 0]
    tail = rest * np.log(TAIL / rest) if rest else 0.0
    return float(1.0 - np.sqrt(GAMMA * max(tail - (q * np.log(q)).sum(), 0.0)))


def _largest(share: NDArray[np.float64], count: int, followed: int) -> Picked:
    """The `count` columns with the largest share, where that is above 0."""
    count = min(count, len(share))
    best = np.argpartition(-share, count - 1)[:count] if count else NOTHING.columns
    best = best[np.argsort(-share[best], kind="stable")]
    best = best[share[best] > 0]
    return Picked(best, share[best], followed)
