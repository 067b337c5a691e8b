"""How many nodes a draft should have: psi against the measured time of a step.

A step with a tree of n nodes yields 1 + (expected accepted tokens) and takes time(n). Best-first search hands out nodes
by falling psi, so the first n are the best tree of n nodes, and the budget that pays most is the n that maximises
(1 + sum of the first n psi) / time(n).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tree import Tree

SIZES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ENOUGH = 2.0  # seconds of measuring, and how often each size is timed in them
ROUNDS, MOST_ROUNDS = 3, 9


def best_size(tree: Tree, seconds: NDArray[np.float64]) -> int:
    """How many of the tree's first nodes give the most expected tokens per second; seconds[n]: a whole step with n."""
    gain = 1.0 + np.concatenate([[0.0], np.cumsum(tree.psi, dtype=np.float64)])
    return int(np.argmax(gain / seconds[: len(tree) + 1]))


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
