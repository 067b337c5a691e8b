"""Numbers that a person should see while there is time: loss spikes, a head that drafts blanks, skipped steps."""

import statistics
from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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
        self._checks = (self._spike, self._blanks) if blanks else (self._spike,)
        self._told: set[Any] = set()  # the checks that found something wrong in the row before
        self._losses: deque[float] = deque(maxlen=WINDOW + LASTING)

    def warnings(self, row: dict[str, Any]) -> list[str]:
        """Sentences about this row: what is wrong, and what to try."""
        found = {check: sentence for check in self._checks if (sentence := check(row))}
        new = [sentence for check, sentence in found.items() if check not in self._told]
        self._told = {*found}
        return new

    def _spike(self, row: dict[str, Any]) -> str | None:
        if "train/loss" in row:
            self._losses.append(row["train/loss"])
        before, last = [*self._losses][:-LASTING], [*self._losses][-LASTING:]
        if len(before) < FEWEST or min(last) <= SPIKE * statistics.median(before) or max(last) <= max(before):
            return None
        return (
            f"the loss jumped to {min(last):.3f} and stayed there for {LASTING} logged steps, up to step {row['step']} "
            f"(before: about {statistics.median(before):.3f}): lower optim.lr or optim.clip, or lengthen optim.warmup"
        )

    def _blanks(self, row: dict[str, Any]) -> str | None:
        rates = [rate for key, rate in row.items() if key.startswith("draft/blank_rate/")]
        mean = sum(rates) / max(1, len(rates))
        if mean <= (BLANK_LOW if self._blanks in self._told else BLANK_HIGH):
            return None
        return (
            f"the head writes blanks into {mean:.0%} of its slots at step {row['step']}, so it drafts nothing: lower "
            "optim.lr, use objective=prefix_ctc, or fewer head.slots for as many objective.labels"
        )


def save_replay(path: Path, batches: list[Batch], step: int, seed: int) -> None:
    """Keep what a rank saw in a skipped step, its micro-batches in order, as safetensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    named = ((f"{turn}.{name}", value) for turn, batch in enumerate(batches) for name, value in batch._asdict().items())
    tensors = {name: value.cpu().contiguous() for name, value in named if isinstance(value, torch.Tensor)}
    save_file(tensors, path, metadata={"step": str(step), "seed": str(seed)})


def load_replay(path: Path) -> list[Batch]:
    """The micro-batches of a skipped step, to be run through the head again."""
    tensors = load_file(path)
    turns = sorted({int(name.split(".")[0]) for name in tensors})
    return [Batch(*(tensors.get(f"{turn}.{name}") for name in Batch._fields)) for turn in turns]  # type: ignore[arg-type]
