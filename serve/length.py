"""How long the chains of a batch should be: what each token is worth against the measured time of the engine's steps.

A step of B requests with n drafted tokens in all yields B + (sum of their psi) tokens and takes time(B + n). psi never
grows along a chain, so the likeliest n tokens of all chains are beginnings of them, and the n with the most tokens per
second is the best. psi counts as much as it was seen to be worth in batches of that size. Large batches make rows dear:
there chains get short. Where even the draft itself costs more than it brings, the head rests, and copies, which cost
nothing, are all that is drafted.

`draft.budget=measured` does this for one sequence of our own decoder (model/draft/budget.py).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctcdraft.model.draft.tree import Tree

WEIGHT = 0.15  # of a new observation
OUTLIER = 3.0  # times the average: what the machine does besides
TRIES = (0.0, 1.0, 0.5, 0.25)  # shares of the longest chains with which a batch size begins
ROUNDS = 3  # of these
AGAIN = 128  # steps from one such try to the next
REST, LONGEST_REST = 32, 512  # steps that a head rests for, twice as many each time
MARGIN = 1.02  # that drafting must be faster by


class StepTimes:
    """Seconds of steps of one batch size by their rows, in buckets of an eighth, and of a head's drafts; and how many
    drafted tokens were accepted, beside the psi that they had. All of it averages."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[float, float]] = {}  # bucket -> rows, seconds
        self.draft: float | None = None
        self.steps = 0
        self.hope = self.hoped = self.accepted = 0.0

    def observe(self, rows: int, seconds: float, accepted: int) -> None:
        """A step whose drafts were accepted to that extent."""
        self.hoped += WEIGHT * (self.hope - self.hoped)
        self.accepted += WEIGHT * (accepted - self.accepted)
        bucket = round(8 * np.log2(rows))
        old_rows, old = self.known.get(bucket, (float(rows), seconds))
        self.known[bucket] = _averaged(old_rows, rows), _averaged(old, seconds)

    def observe_draft(self, seconds: float) -> None:
        self.draft = _averaged(self.draft or seconds, seconds)

    def of(self, rows_N: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of steps of so many rows: on a rising line through what was observed, and straight on beyond it."""
        sizes, seconds = np.array(sorted(self.known.values())).T
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        found = np.interp(rows_N, sizes, seconds)
        if len(sizes) > 1:
            slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
            found += slope * np.maximum(rows_N - sizes[-1], 0)
        return found


def _averaged(old: float, new: float) -> float:
    return old + WEIGHT * (min(new, OUTLIER * old) - old)


class Lengths:
    """most: tokens of a chain, at most."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._times: dict[int, StepTimes] = {}
        self._resting, self._rest = 0, REST

    def times(self, requests: int) -> StepTimes:
        """Batches of like sizes share theirs."""
        return self._times.setdefault(requests.bit_length(), StepTimes())

    def rests(self, requests: int) -> bool:
        """Is the head left out of this step? Not where a length is to be tried."""
        self._resting = max(0, self._resting - 1)
        return self._resting > 0 and self._tried(self.times(requests)) is None

    def cut(self, chains: Sequence[Tree], by_head: bool) -> list[Tree]:
        """The beginnings that pay. by_head: the head has drafted, which took times(...).draft."""
        times, B = self.times(len(chains)), len(chains)
        tried = self._tried(times)
        times.steps += 1
        if tried is not None or not times.known:  # nothing is known while prompts are read in every step
            cut = [chain.first(self.most if tried is None else tried) for chain in chains]
            times.hope = float(sum(chain.psi.sum() for chain in cut))
            return cut
        psi_N = np.concatenate([chain.psi for chain in chains])
        order_N = np.argsort(-psi_N, kind="stable")
        hope = np.concatenate([[0.0], np.cumsum(psi_N[order_N], dtype=np.float64)])
        tokens = B + hope * (times.accepted / times.hoped if times.hoped else 1.0)
        seconds = times.of(B + np.arange(len(psi_N) + 1))
        best = int(np.argmax(tokens / seconds))
        if by_head:
            pays = tokens[best] / (seconds[best] + (times.draft or 0.0)) * seconds[0] >= MARGIN * B
            self._resting = 0 if pays else self._rest
            self._rest = REST if pays else min(2 * self._rest, LONGEST_REST)
        times.hope = hope[best]
        of_chain_N = np.repeat(np.arange(B), [len(chain) for chain in chains])
        counts = np.bincount(of_chain_N[order_N[:best]], minlength=B)
        return [chain.first(int(count)) for chain, count in zip(chains, counts, strict=True)]

    def _tried(self, times: StepTimes) -> int | None:
        """The length of chains that this step is to be timed with, if it is one of those."""
        if times.steps < ROUNDS * len(TRIES):
            return round(TRIES[times.steps % len(TRIES)] * self.most)
        again, rest = divmod(times.steps, AGAIN)
        return round(TRIES[again % len(TRIES)] * self.most) if rest == 0 else None
