"""How long the drafts of a batch should be: what each node is worth against the time of the steps as they come.

A step of B requests with n drafted tokens in all yields B + (sum of their psi) tokens and takes the time of drafting
and time(B + n). psi never grows along a draft, so the likeliest n tokens of all are beginnings of drafts. The n with
the most tokens per second is the best. psi counts for what such a psi was lately seen to be worth, from the head and
from copies alone. Where too little is promised, what was cut off so far counts for more as well. Time is a line through
rows for steps with drafts, and another for those without. A head rests where its latest drafts would not have paid for
drafting them, beside what copies alone would have brought; those go on. Where none has paid in many looks, most steps
go without a look: a small base in a large batch is done in the time of a few of them.

In our own decoder rows are padded to the longest draft: all have their first n nodes, and a step takes time(B + B n).
For a sequence alone, whose steps are timed beforehand: budget.py.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
LOG_ODDS = np.linspace(-5.0, 5.0, 11)  # of the nodes that are counted together
PRIOR = 0.3  # nodes of each of them, at first, for which psi was right
STEP = 0.3  # by which either number of a line changes at most: far from the best one Newton's steps lead astray
STEEPEST = 4.0  # log-odds of being accepted for one of psi's


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


class Worth:
    """How often nodes of a psi are accepted, as lately seen: log-odds that are a line of psi's own (Platt scaling).

    Shape suffix: K bins by the log-odds of psi."""

    def __init__(self) -> None:
        prior_K = np.full(len(LOG_ODDS), PRIOR)
        self.prior_3K = np.array([prior_K, prior_K * LOG_ODDS, prior_K * _share(LOG_ODDS)])
        self.seen_3K = np.zeros_like(self.prior_3K)  # nodes, the sum of their log-odds, the accepted; sums that fade
        self.line = np.array([0.0, 1.0])

    def observe(self, psi_N: NDArray[np.floating[Any]], accepted_N: NDArray[Any]) -> None:
        """accepted [N]: was that node?"""
        log_odds_N = _log_odds(psi_N)
        bin_N = np.rint(log_odds_N - LOG_ODDS[0]).astype(int)
        sums = [np.bincount(bin_N, of_N, len(LOG_ODDS)) for of_N in (np.ones(len(psi_N)), log_odds_N, accepted_N)]
        self.seen_3K = KEEP * self.seen_3K + sums
        nodes_K, log_odds_K, accepted_K = self.seen_3K + self.prior_3K
        terms_2K = np.array([np.ones_like(nodes_K), log_odds_K / nodes_K])
        share_K = _share(self.line @ terms_2K)
        curvature_22 = (terms_2K * nodes_K * share_K * (1 - share_K)) @ terms_2K.T
        newton = np.linalg.solve(curvature_22, terms_2K @ (accepted_K - nodes_K * share_K))
        line = self.line + np.clip(newton, -STEP, STEP)  # once: the sums change little at a time
        self.line = np.clip(line, [LOG_ODDS[0], 0.0], [LOG_ODDS[-1], STEEPEST])

    def of(self, psi_N: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Never grows where psi falls."""
        return _share(self.line[0] + self.line[1] * _log_odds(psi_N))


def _share(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-log_odds))


LEAST, MOST = _share(LOG_ODDS[[0, -1]])


def _log_odds(share: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    share = np.minimum(np.maximum(share, LEAST, dtype=np.float64), MOST)
    return np.log(share / (1 - share))


class Lengths:
    """Seconds: of steps without drafts, by requests; of those with, by rows; of drafting with the head, by requests.

    padded: all drafts of a step take as many rows as the longest. worth: of what the head makes (True), and of copies
    alone."""

    def __init__(self, padded: bool = False, worth: Mapping[bool, Worth] | None = None) -> None:
        self.padded, self.worth = padded, defaultdict(Worth) if worth is None else worth
        self.plain, self.drafts = Line(1.0), Line(0.0)
        self.drafted = self.plain  # until there is one
        self.count, self._trying = 0, False  # steps; is this one a try of a head that rests?
        # Made anew at each step, since other threads may look at them:
        self._latest: list[NDArray[np.float32]] = []  # psi of chains of the head and copies
        self._alone: list[NDArray[np.float32]] = []  # and of copies alone
        self._by_head = False  # were the drafts under way made by it?
        self._saved = 0.0  # seconds for the next try
        # Looks in a row that found nothing; steps without one from now on; requests of the last one behind many such.
        self._in_vain, self._left_out, self._looked = 0, 0, 0

    def observe(
        self, requests: int, rows: int, seconds: float, psi_N: NDArray[np.floating[Any]], accepted_N: NDArray[Any]
    ) -> None:
        """The step of the drafts that `cut` has returned last: psi of all their nodes, and which were accepted."""
        if len(psi_N):
            self.worth[self._by_head].observe(psi_N, accepted_N)
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
        self.count += 1
        return True

    def rests(self, requests: int) -> bool:
        """Is the head left out of this step?"""
        self._trying = not self._latest
        if self._trying or self._timed_plainly:
            return self._timed_plainly
        _, copied, without = self._best(requests, len(self._alone), self._gains(self._alone, False), False)
        gain = self._gains(self._latest, True)
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
        gain = self._gains(psi, by_head)
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
        self._by_head = by_head
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

    def _gains(self, psi: Sequence[NDArray[np.float32]], by_head: bool) -> NDArray[np.float64]:
        """What another token brings, the likeliest of all chains first; where padded, another one of each of them."""
        gain_N = self.worth[by_head].of(np.concatenate(psi))
        if self.padded:
            places_N = np.concatenate([np.arange(len(own)) for own in psi])
            return np.bincount(places_N, gain_N).astype(np.float64)
        return -np.sort(-gain_N)

    def _best(
        self, requests: int, chains: int, gain: NDArray[np.float64], by_head: bool, *, some: bool = False
    ) -> tuple[int, float, float]:
        """How many tokens of so many chains pay most (of each, where padded), where `requests` have such chains; tokens
        and seconds of that step. some: as many as there are chains at least, so that their time is seen."""
        each = requests / chains
        tokens = requests + each * np.concatenate([[0.0], np.cumsum(gain)])
        rows = requests + (requests if self.padded else each) * np.arange(len(gain) + 1)
        seconds = MARGIN * self.drafted.at(rows, self.plain)
        seconds[0] = min(seconds[0], self.plain.at(requests))  # no longer than one of as many rows with drafts
        seconds += self.drafts.at(requests) if by_head else 0.0  # each step has one: the dearer, the more tokens of it
        first = min(1 if self.padded else chains, len(gain)) if some else 0
        best = first + int(np.argmax((tokens / seconds)[first:]))
        return best, tokens[best], seconds[best]


class LengthsBySize(defaultdict[int, Lengths]):
    """A `Lengths` for each power of two of the requests, which cost more than their rows; what psi is worth is the same
    for all."""

    def __init__(self, padded: bool = False) -> None:
        super().__init__(partial(Lengths, padded, defaultdict(Worth)))

    def of(self, requests: int) -> Lengths:
        return self[requests.bit_length()]
