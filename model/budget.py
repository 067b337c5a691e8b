"""How many nodes a draft should have: calibrated psi against the measured time of a step.

A step with a tree of n nodes yields 1 + (expected accepted tokens) and takes time(n). Best-first search hands out nodes
by falling psi, so the first n are the best tree of n nodes, and the budget that pays most is the n that maximises
(1 + sum of the first n calibrated psi) / time(n).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctcdraft.model.tree import Tree, calibrated, chosen

LEAST_IN_BIN = 40  # observations behind one knot
MOST_KNOTS = 16
FAINT = 1e-6  # of psi, for nodes like which none was accepted
SIZES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROUNDS = 5


@dataclass(frozen=True)
class Calibration:
    """P(a node is accepted) as a rising piecewise linear function of its psi, one per depth.

    psi[d], rate[d]: the knots of depth d + 1. Deeper nodes use the last depth's.
    """

    psi: list[list[float]]
    rate: list[list[float]]

    def of(self, tree: Tree) -> NDArray[np.float64]:
        """The calibrated probability [N] of each node, at most its parent's."""
        return calibrated(tree.psi, tree.depths, tree.parents, *self._table)

    def applied(self, tree: Tree) -> Tree:
        """The tree with that for psi, the likeliest nodes first."""
        p = np.maximum(self.of(tree), FAINT * tree.psi)  # a node of 0 would be left out
        return chosen(replace(tree, psi=p.astype(np.float32)), len(tree))

    @cached_property
    def _table(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """The knots as arrays: psi and rate, depth after depth, and where each depth begins."""
        begins = np.cumsum([0, *map(len, self.psi)])
        return np.concatenate(self.psi), np.concatenate(self.rate), begins

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(found: dict[str, Any]) -> "Calibration":
        """Raises ValueError where that is no calibration."""
        try:
            psi, rate = ([[float(x) for x in row] for row in found[name]] for name in ("psi", "rate"))
            good = len(psi) == len(rate) > 0 and all(len(a) == len(b) > 0 for a, b in zip(psi, rate, strict=True))
            good = good and all(sorted(row) == row for row in psi)
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise ValueError("the calibration is damaged")
        return Calibration(psi, rate)


def fit_calibration(
    psi_M: NDArray[np.float64], depth_M: NDArray[np.int64], accepted_M: NDArray[np.bool_]
) -> Calibration | None:
    """Isotonic regression of acceptance on psi for each depth, on bins of equally many nodes.

    None without observations. A depth with too few shares the one before. Barlow et al. 1972 (pool adjacent violators).
    """
    knots: list[tuple[list[float], list[float]]] = []
    for depth in range(1, int(depth_M.max(initial=0)) + 1):
        at = depth_M == depth
        if at.sum() < LEAST_IN_BIN and knots:
            knots.append(knots[-1])
        elif at.any():
            knots.append(_isotonic(psi_M[at], accepted_M[at]))
    return Calibration(*map(list, zip(*knots, strict=True))) if knots else None


def _isotonic(psi_M: NDArray[np.float64], accepted_M: NDArray[np.bool_]) -> tuple[list[float], list[float]]:
    order = np.argsort(psi_M, kind="stable")
    bins = np.array_split(order, max(1, min(MOST_KNOTS, len(order) // LEAST_IN_BIN)))
    pools: list[list[float]] = []  # weight, sum of psi, accepted
    for part in bins:
        pools.append([len(part), psi_M[part].sum(), accepted_M[part].sum()])
        while len(pools) > 1 and pools[-2][2] / pools[-2][0] >= pools[-1][2] / pools[-1][0]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    return [s / n for n, s, _ in pools], [a / n for n, _, a in pools]


@dataclass(frozen=True)
class Budget:
    """seconds[n]: a whole step with n nodes, n = 0..most."""

    seconds: NDArray[np.float64]

    def choose(self, tree: Tree) -> int:
        """The number of nodes, of the tree's first, with the most expected tokens per second."""
        gain = 1.0 + np.concatenate([[0.0], np.cumsum(tree.psi, dtype=np.float64)])
        return int(np.argmax(gain / self.seconds[: len(tree) + 1]))


def step_seconds(most: int, verify: Callable[[int], Any], draft: Callable[[], Any]) -> NDArray[np.float64]:
    """Seconds of a step with 0..most nodes: `verify(n)` measured at some n and interpolated, plus `draft()`."""
    sizes = sorted({n for n in SIZES if n < most} | {most})
    taken: dict[int, list[float]] = {n: [] for n in sizes}
    drafting: list[float] = []
    for _ in range(ROUNDS + 1):  # interleaved; the first round warms up
        drafting.append(_timed(draft))
        for n in sizes:
            taken[n].append(_timed(lambda n=n: verify(n)))  # type: ignore[misc]
    rising = np.maximum.accumulate([median(taken[n][1:]) for n in sizes])
    return np.interp(np.arange(most + 1), sizes, rising) + median(drafting[1:])


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def chain_of(tokens: Sequence[int]) -> Tree:
    """A draft of one path."""
    n = len(tokens)
    return Tree(np.array(tokens, np.int64), np.arange(n) - 1, np.arange(n) + 1, np.ones(n, np.float32))
