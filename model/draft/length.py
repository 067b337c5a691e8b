"""How long the drafts of a batch should be: what each node is worth against the time of the steps as they come.

A step of B requests with n drafted tokens in all yields B + (sum of their psi) tokens and takes the time of drafting
and time(B + n). psi never grows along a draft, so the likeliest n tokens of all are beginnings of drafts. The n with
the most tokens per second is the best. psi counts as much as it was seen to be worth, from the head and from copies
alone. Time is a line through rows for steps with drafts, and another for those without. A head rests where its latest
drafts would not have paid for drafting them, beside what copies alone would have brought; those go on. Where none has
paid in many looks, most steps go without a look: a small base in a large batch is done in the time of a few of them.

Who asks keeps a `Lengths` for each power of two of the requests, which cost more than their rows. In our own decoder
rows are padded to the longest draft: all have their first n nodes, and a step takes time(B + B n). For a sequence
alone, whose steps are timed beforehand: budget.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tree import EMPTY, Tree

KEEP = 0.97  # of what was seen, from one step to the next
NEW = 0.1  # of an observation: the first of its size
OUTLIER = 3.0  # times what was expected: what the machine does besides
SHARE = 0.3  # of the mean time of a row is what one more is taken to cost, until steps of several sizes were seen
PLAIN = 64  # steps from one that goes without drafts to the next
LATEST = 32  # steps by whose chains a head is judged
MARGIN = 1.05  # that drafts must be worth: the likeliest look better than they are
TRYING = 0.01  # of the time goes into drafts of a head that rests
LOOKING = 0.005  # of the time, at least, goes into looks for drafts while none pays
FRUITLESS = 8  # looks in a row, before which every step has one


def whole(rows: int) -> int:
    """The next of the few numbers of rows that steps have: a CPU's GEMMs (oneDNN) get kernels of their own for each."""
    every = 1 if rows <= 16 else 4 if rows <= 64 else 8
    return -(-rows // every) * every


class Line:
    """Seconds by size, as lately seen: weighted least squares, of a slope between nothing and proportional."""

    def __init__(self, seconds: float) -> None:
        self.sums = 1e-6 * np.array([1.0, 1.0, 1.0, seconds, seconds])  # a guess that one observation outweighs
        self.known: set[int] = set()  # sizes that have kernels: the first of each makes them

    def observe(self, size: int, seconds: float) -> None:
        if self.sums[0] > 1:
            seconds = min(seconds, OUTLIER * self.at(size))
        weight = 1.0 if size in self.known else NEW
        self.sums += weight * np.array([1.0, size, size * size, seconds, size * seconds])
        self.known.add(size)

    def at(self, size: Any, other: "Line | None" = None) -> Any:
        """size: a number or an array of them; other: a line of smaller sizes from which this one rises, as far as its
        own do not tell."""
        mean, squares, seconds, products = self.sums[1:] / self.sums[0]
        guess, doubt = SHARE * seconds / mean, mean * mean / self.sums[0]
        if other is not None and mean > (smaller := other.sums[1] / other.sums[0]) + 0.5:
            guess = (seconds - other.at(smaller)) / (mean - smaller)
        slope = (products - mean * seconds + doubt * guess) / (squares - mean * mean + doubt)
        return seconds + min(max(slope, 0.0), seconds / mean) * (size - mean)


class Lengths:
    """Seconds: of steps without drafts, by requests; of those with, by rows; of drafting with the head, by requests.

    padded: all drafts of a step take as many rows as the longest."""

    def __init__(self, padded: bool = False) -> None:
        self.padded = padded
        self.plain, self.drafts = Line(1.0), Line(0.0)
        self.drafted = self.plain  # until there is one
        self.count, self._trying = 0, False  # steps; is this one a try of a head that rests?
        # Made anew at each step, since other threads may look at them:
        self._latest: list[NDArray[np.float32]] = []  # psi of chains of the head and copies
        self._alone: list[NDArray[np.float32]] = []  # and of copies alone
        self._hope = 0.0, False  # psi of the drafts under way, and whether the head made them
        self._seen = {True: np.zeros(2), False: np.zeros(2)}  # by head, of copies alone: psi, accepted; sums that fade
        self._saved = 0.0  # seconds for the next try
        # Looks in a row that found nothing; steps without one from now on; requests of the last one behind many such.
        self._in_vain, self._left_out, self._looked = 0, 0, 0

    def observe(self, requests: int, rows: int, seconds: float, accepted: float) -> None:
        """The step of the drafts that `cut` has returned last."""
        hope, by_head = self._hope
        if hope:
            self._seen[by_head] = KEEP * self._seen[by_head] + (hope, accepted)
        for line in {self.plain, self.drafted, self.drafts}:
            line.sums *= KEEP if line.sums[0] > 0.01 else 1.0
        if rows > requests and self.drafted is self.plain:
            self.drafted = Line(1.0)
        (self.drafted if rows > requests else self.plain).observe(rows, seconds)

    def sleeps(self, requests: int) -> bool:
        """Is this a step without a look? Then `rests` and `cut` are not asked. Half as many requests wake it."""
        self._left_out = self._left_out - 1 if 2 * requests > self._looked else 0
        if self._left_out <= 0:
            return False
        self._saved += TRYING * self.plain.at(requests)
        self._hope, self.count = (0.0, False), self.count + 1
        return True

    def rests(self, requests: int) -> bool:
        """Is the head left out of this step?"""
        self._trying = not self._latest
        if self._trying or self._timed_plainly:
            return self._timed_plainly
        _, copied, without = self._best(requests, len(self._alone), self._gains(self._alone), False)
        gain = self._gains(self._latest)
        for self._trying in (False, True):
            count, tokens, seconds = self._best(requests, len(self._latest), gain, True, some=self._trying)
            lost = seconds - tokens * without / copied
            if count and lost <= 0:
                return False
        self._saved += TRYING * without
        rests = lost > self._saved
        self._saved *= rests
        return rests

    def cut(
        self,
        chains: Sequence[Tree],
        by_head: bool,
        look: float = 0.0,
        alone: Callable[[int], Tree] = lambda request: EMPTY,
    ) -> list[Tree]:
        """The beginnings that pay. by_head: the head has drafted; look: seconds that it took to find these, without
        it; alone: what one of the requests would have without the head, asked of one where it has drafted."""
        psi, tried, requests = [chain.psi for chain in chains], by_head and self._trying, len(chains)
        request = self.count % requests  # one of each step: that many steps are remembered, whatever the batch
        self._alone = [*self._alone, alone(request).psi if by_head else psi[request]][-LATEST:]
        if by_head:  # what it was worth before it rested says little
            self._latest = [*(psi if tried else [*self._latest, psi[request]])][-LATEST:]
        gain = self._gains(psi)
        count = 0 if self._timed_plainly else self._best(requests, requests, gain, by_head, some=tried)[0]
        if not self._timed_plainly and not tried:
            self._in_vain = 0 if count else min(self._in_vain + 1, 2 * FRUITLESS)
            if self._in_vain >= FRUITLESS:  # twice as many steps from one look to the next, until it is LOOKING
                plain_steps = look / self.plain.at(requests)
                self._left_out = 1 + int(min(2 ** (self._in_vain - FRUITLESS), plain_steps / LOOKING))
                self._looked = requests
        if count and not self.padded:
            count = min(whole(requests + count) - requests, len(gain))
        self.count += 1
        self._hope = float(gain[:count].sum()), by_head
        if self.padded:
            return [chain.first(count) for chain in chains]
        chain_N = np.repeat(np.arange(requests), list(map(len, psi)))
        taken = np.argsort(-np.concatenate(psi), kind="stable")[:count]
        counts = np.bincount(chain_N[taken], minlength=requests)
        return [chain.first(int(n)) for chain, n in zip(chains, counts, strict=True)]

    @property
    def _timed_plainly(self) -> bool:
        """Does this step go without drafts, whatever pays?"""
        return self.count % PLAIN == 0

    def _gains(self, psi: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """What another token brings, the likeliest of all chains first; where padded, another one of each of them."""
        psi_N = np.concatenate(psi).astype(np.float64)
        if self.padded:
            places_N = np.concatenate([np.arange(len(own)) for own in psi])
            return np.bincount(places_N, psi_N).astype(np.float64)
        return -np.sort(-psi_N)

    def _best(
        self, requests: int, chains: int, gain: NDArray[np.float64], by_head: bool, *, some: bool = False
    ) -> tuple[int, float, float]:
        """How many tokens of so many chains pay most (of each, where padded), where `requests` have such chains; tokens
        and seconds of that step. some: as many as there are chains at least, so that their time is seen."""
        each = requests / chains
        hoped, accepted = self._seen[by_head]
        worth = (accepted + 1) / (hoped + 1)
        tokens = requests + each * worth * np.concatenate([[0.0], np.cumsum(gain)])
        rows = requests + (requests if self.padded else each) * np.arange(len(gain) + 1)
        seconds = MARGIN * self.drafted.at(rows, self.plain)
        seconds[0] = min(seconds[0], self.plain.at(requests))  # no longer than one of as many rows with drafts
        seconds += self.drafts.at(requests) if by_head else 0.0  # each step has one: the dearer, the more tokens of it
        first = min(1 if self.padded else chains, len(gain)) if some else 0
        best = first + int(np.argmax((tokens / seconds)[first:]))
        return best, tokens[best], seconds[best]
