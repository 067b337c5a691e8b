"""Numbers that a person should see while there is time: loss spikes, a head that drafts blanks, skipped steps."""

import statistics
from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctcdraft.data.batches import Batch

WINDOW = 20  # logged rows that a loss is held against
FEWEST = 5
SPIKE = 1.5  # times their median, and above all of them
LASTING = 3  # rows in a row: the loss of one batch says little
BLANK_HIGH, BLANK_LOW = 0.95, 0.9


class Watch:
    """Reads the logged rows of a run, in order; a warning is given once, and again only after things were well.

    blanks: a draft may hold nothing else, since no band limits them.
    """

    def __init__(self, *, blanks: bool = True) -> None:
        self._may_be_blank = blanks
        self._losses: deque[float] = deque(maxlen=WINDOW + LASTING)
        self._spiking = self._blank = False

    def warnings(self, row: dict[str, Any]) -> list[str]:
        """Sentences about this row: what is wrong, and what to try."""
        found = [self._spike(row), self._blanks(row) if self._may_be_blank else None]
        return [sentence for sentence in found if sentence]

    def _spike(self, row: dict[str, Any]) -> str | None:
        loss = row.get("train/loss")
        if loss is None:
            return None
        self._losses.append(loss)
        before, last = [*self._losses][:-LASTING], [*self._losses][-LASTING:]
        usual = statistics.median(before) if len(before) >= FEWEST else float("inf")
        high = min(last) > SPIKE * usual and max(last) > max(before)
        new, self._spiking = high and not self._spiking, high
        if not new:
            return None
        return (
            f"the loss jumped to {min(last):.3f} and stayed there for {LASTING} logged steps, up to step {row['step']} "
            f"(before: about {usual:.3f}): lower optim.lr or optim.clip, or lengthen optim.warmup"
        )

    def _blanks(self, row: dict[str, Any]) -> str | None:
        rates = [rate for key, rate in row.items() if key.startswith("draft/blank_rate/")]
        mean = sum(rates) / max(1, len(rates))
        new = mean > BLANK_HIGH and not self._blank
        self._blank = mean > BLANK_HIGH or (self._blank and mean > BLANK_LOW)
        if not new:
            return None
        return (
            f"the head writes blanks into {mean:.0%} of its slots at step {row['step']}, so it drafts nothing: lower "
            "optim.lr, use objective=prefix_ctc, or fewer head.slots for as many objective.labels"
        )


def save_replay(path: Path, batches: list[Batch], step: int, seed: int) -> None:
    """Keep what a rank saw in a skipped step, its micro-batches in order, as safetensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for turn, batch in enumerate(batches):
        values = batch._asdict().items()
        tensors |= {f"{turn}.{k}": v.cpu().contiguous() for k, v in values if isinstance(v, torch.Tensor)}
    save_file(tensors, path, metadata={"step": str(step), "seed": str(seed)})


def load_replay(path: Path) -> list[Batch]:
    """The micro-batches of a skipped step, to be run through the head again."""
    tensors = load_file(path)
    turns = 1 + max(int(name.split(".")[0]) for name in tensors)
    fields = [{n.split(".")[1]: t for n, t in tensors.items() if n.startswith(f"{i}.")} for i in range(turns)]
    return [Batch(**{name: found.get(name) for name in Batch._fields}) for found in fields]  # type: ignore[arg-type]
