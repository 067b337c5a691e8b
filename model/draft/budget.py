"""How many nodes a draft should have: calibrated psi against the measured time of a step.

A step with a tree of n nodes yields 1 + (expected accepted tokens) and takes time(n). Best-first search hands out nodes
by falling psi, so the first n are the best tree of n nodes, and the budget that pays most is the n that maximises
(1 + sum of the first n calibrated psi) / time(n).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from .tree import Tree, calibrated, chosen

LEAST_IN_BIN = 40  # observations behind one knot
MOST_KNOTS = 16
FAINT = 1e-6  # of psi, for nodes like which none was accepted
SIZES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ENOUGH = 2.0  # seconds of measuring, and how often each size is timed in them
ROUNDS, MOST_ROUNDS = 3, 9


@dataclass(frozen=True)
class Calibration:
    """P(a node is accepted) as a rising piecewise linear function of its psi, one per depth.

    psi[d], rate[d]: the knots of depth d + 1. Deeper nodes use the last depth's.
    """

    psi: list[list[float]]
    rate: list[list[float]]

    def of(self, tree: Tree) -> NDArray[np.float64]:
        """The calibrated probability [N] of each node, at most its parent's."""
        psi, rate, begins = self._table
        return calibrated(tree.psi, tree.depths, tree.parents, psi, rate, begins)

    def applied(self, tree: Tree) -> Tree:
        """The tree with that for psi, the likeliest nodes first."""
        if not len(tree):
            return tree
        p = np.maximum(self.of(tree), FAINT * tree.psi)  # a node of 0 would be left out
        return chosen(replace(tree, psi=p.astype(np.float32)), len(tree))

    @cached_property
    def _table(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """The knots as arrays: psi and rate, depth after depth, and where each depth begins."""
        begins = np.cumsum([0, *map(len, self.psi)])
        return np.concatenate(self.psi), np.concatenate(self.rate), begins

    @staticmethod
    def from_dict(found: dict[str, Any]) -> "Calibration":
        """Raises ValueError where that is no calibration."""
        try:
            made = TypeAdapter(Calibration).validate_python(found)
            fits = [len(a) == len(b) > 0 and sorted(a) == a for a, b in zip(made.psi, made.rate, strict=True)]
        except ValueError:
            fits = []
        if not (fits and all(fits)):
            raise ValueError("the calibration is damaged")
        return made


def fit_calibration(
    psi_M: NDArray[np.float64], depth_M: NDArray[np.int64], accepted_M: NDArray[np.bool_]
) -> Calibration | None:
    """Isotonic regression of acceptance on psi for each depth, on bins of nodes by psi.

    None without observations. A depth with too few shares the one before. Barlow et al. 1972 (pool adjacent violators).
    """
    knots: list[tuple[list[float], list[float]]] = []
    for depth in range(1, int(depth_M.max(initial=0)) + 1):
        at = depth_M == depth
        if at.sum() < LEAST_IN_BIN and knots:
            knots.append(knots[-1])
        elif at.any():
            knots.append(_isotonic(psi_M[at], accepted_M[at]))
    return Calibration([psi for psi, _ in knots], [rate for _, rate in knots]) if knots else None


def _isotonic(psi_M: NDArray[np.float64], accepted_M: NDArray[np.bool_]) -> tuple[list[float], list[float]]:
    order = np.argsort(psi_M, kind="stable")
    share = psi_M[order] / max(psi_M.sum(), 1e-9) + 1 / len(order)  # likely nodes are few, and matter
    edges = np.searchsorted(np.cumsum(share), 2 * np.arange(1, MOST_KNOTS) / MOST_KNOTS)
    pools: list[NDArray[np.float64]] = []  # observations, sum of psi, accepted
    for part in filter(len, np.split(order, edges)):
        pools.append(np.array([len(part), psi_M[part].sum(), accepted_M[part].sum()]))
        while len(pools) > 1 and (
            pools[-2][0] < LEAST_IN_BIN or pools[-2][2] / pools[-2][0] >= pools[-1][2] / pools[-1][0]
        ):
            pools[-2:] = [pools[-2] + pools[-1]]
    if len(pools) > 1 and pools[-1][0] < LEAST_IN_BIN:
        pools[-2:] = [pools[-2] + pools[-1]]
    return [float(s / n) for n, s, _ in pools], [float(a / n) for n, _, a in pools]


@dataclass(frozen=True)
class Budget:
    """seconds[n]: a whole step with n nodes, n = 0..most."""

    seconds: NDArray[np.float64]

    def choose(self, tree: Tree) -> int:
        """The number of nodes, of the tree's first, with the most expected tokens per second."""
        gain = 1.0 + np.concatenate([[0.0], np.cumsum(tree.psi, dtype=np.float64)])
        return int(np.argmax(gain / self.seconds[: len(tree) + 1]))


def step_seconds(most: int, verify: Callable[[int], Any], draft: Callable[[], Any]) -> NDArray[np.float64]:
    """Seconds of a step with 0..most nodes: `verify(n)` measured at some n and interpolated, plus `draft()`.

    Takes about ENOUGH seconds, at as many n as ROUNDS rounds have the time for; of a base so large that one step takes
    a good part of that, one round at three n. What the machine does besides slows a whole round down, or one of its
    calls: so each time counts as its share of its round, of which the median is taken.
    """
    start = time.perf_counter()
    for _ in range(2):  # first calls make kernels and buffers
        ends = _timed(lambda: verify(0)) + _timed(lambda: verify(most))
    draft()
    sizes = np.array(sorted({n for n in SIZES if n < most} | {most}))
    affordable = max(3, round(ENOUGH / ROUNDS / (ends / 2)))
    if affordable < len(sizes):
        sizes = sizes[np.linspace(0, len(sizes) - 1, affordable).astype(int)]
    rounds: list[list[float]] = []
    while not rounds or (len(rounds) < MOST_ROUNDS and time.perf_counter() - start < ENOUGH):
        rounds.append([_timed(lambda n=n: verify(n)) for n in sizes.tolist()] + [_timed(draft)])  # type: ignore[misc]
    taken = np.array(rounds)
    whole = taken.sum(axis=1, keepdims=True)
    *verifying, drafting = np.median(taken / whole, axis=0) * np.median(whole)
    rising = np.minimum.accumulate(verifying[::-1])[::-1]  # a GEMM of two rows can take longer than one of four
    return np.interp(np.arange(most + 1), sizes, rising) + drafting


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def chain_of(tokens: Sequence[int], psi: float = 1.0) -> Tree:
    """A draft of one path, each node with `psi` of the one before."""
    n = len(tokens)
    depths = np.arange(n) + 1
    return Tree(np.array(tokens, np.int64), depths - 2, depths, (psi**depths).astype(np.float32))
