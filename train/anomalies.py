"""Numbers that a person should see while there is time: loss spikes, a head that drafts blanks."""

import statistics
from collections import deque
from typing import Any

WINDOW = 20  # logged rows that a loss is held against
FEWEST = 5
SPIKE = 1.5  # times their median, and above all of them
LASTING = 3  # rows in a row: the loss of one batch says little
BLANK_HIGH, BLANK_LOW = 0.95, 0.9


class AnomalyChecks:
    """Reads the logged rows of a run, in order; a warning is given once, and again only after things were well.

    blanks: a draft may hold nothing else, since no band limits them.
    """

    def __init__(self, *, blanks: bool = True) -> None:
        self.blanks = blanks
        self._losses: deque[float] = deque(maxlen=WINDOW + LASTING)
        self._spiking = self._blank = False  # in the row before

    def warnings(self, row: dict[str, Any]) -> list[str]:
        """Sentences about this row: what is wrong, and what to try."""
        found = []
        if "train/loss" in row:
            self._losses.append(row["train/loss"])
        before, last = [*self._losses][:-LASTING], [*self._losses][-LASTING:]
        usual = statistics.median(before) if len(before) >= FEWEST else float("inf")
        spiking = min(last, default=0.0) > SPIKE * usual and max(last) > max(before)
        if spiking and not self._spiking:
            found.append(
                f"the loss jumped to {min(last):.3f} and stayed there for {LASTING} logged steps, up to step "
                f"{row['step']} (before: about {usual:.3f}): lower optim.lr or optim.clip, or lengthen optim.warmup"
            )
        rates = [rate for key, rate in row.items() if key.startswith("draft/blank_rate/")]
        rate = sum(rates) / max(1, len(rates))
        blank = self.blanks and rate > (BLANK_LOW if self._blank else BLANK_HIGH)
        if blank and not self._blank:
            found.append(
                f"the head writes blanks into {rate:.0%} of its slots at step {row['step']}, so it drafts nothing: "
                "lower optim.lr, use objective=prefix_ctc, or fewer head.slots for as many objective.labels"
            )
        self._spiking, self._blank = spiking, blank
        return found
