"""From a corpus to batches of anchors: every choice a function of (seed, step), none of the rank.

So a run resumes from its step number alone, and one rank sees in one step what several share.
Shape suffixes: B sequences, L positions, N anchors, U labels.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.data.store import Corpus, Example

POOL = 16  # batches are made of sequences of like length, sorted within pools of this many batches


class Batch(NamedTuple):
    """ids [B, L], right-padded with 0; anchor n is (batch_N[n], position_N[n]): the base has read
    positions up to it, the root follows, and labels_NU[n, : lengths_N[n]] follow the root."""

    ids_BL: Tensor
    batch_N: Tensor
    position_N: Tensor
    labels_NU: Tensor
    lengths_N: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in self))


class Sampler:
    """Which sequences and anchors a step sees.

    batch: sequences per step, over all ranks. anchors: at most so many per sequence. labels: U.
    max_length: sequences are cut after so many tokens.
    """

    def __init__(self, corpus: Corpus, *, batch: int, anchors: int, labels: int, max_length: int, seed: int) -> None:
        if len(corpus) < 1:
            raise ValueError("the prepared data holds no training sequence: see its rejects.jsonl")
        self.corpus, self.batch, self.anchors = corpus, batch, anchors
        self.labels, self.max_length, self.seed = labels, max_length, seed
        within = np.arange(len(corpus.ids)) - np.repeat(corpus.offsets[:-1], corpus.lengths) < max_length
        if not corpus.mask[within].any():
            raise ValueError(f"no answer lies within the first train.max_length={max_length} tokens of any sequence")
        self.steps_per_epoch = max(1, len(corpus) // batch)
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def sequences(self, step: int) -> NDArray[np.int64]:
        """The `batch` sequence numbers of a step (from 0), of like length."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        return self._order[1][at]

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        """[steps, batch] sequence numbers of an epoch; what does not fill a batch is left out."""
        rng = np.random.default_rng([self.seed, epoch])
        count = self.steps_per_epoch * self.batch
        order = np.resize(rng.permutation(len(self.corpus)), count)
        for start in range(0, count, POOL * self.batch):
            pool = order[start : start + POOL * self.batch]
            pool[:] = pool[np.argsort(self.corpus.lengths[pool], kind="stable")]
        return rng.permutation(order.reshape(self.steps_per_epoch, self.batch))

    def anchor_counts(self, step: int) -> NDArray[np.int64]:
        """How many anchors each sequence of a step has: known to every rank without a word between them."""
        counts = [len(self._positions(self._example(i))[0]) for i in self.sequences(step)]
        return np.minimum(counts, self.anchors)

    def collate(self, step: int, members: slice) -> Batch:
        """The batch of those of a step's sequences that `members` selects."""
        numbers = self.sequences(step)[members]
        examples = [self._example(i) for i in numbers]
        ids_BL = np.zeros((len(examples), max(len(e.ids) for e in examples)), np.int64)
        parts = []
        for row, (number, example) in enumerate(zip(numbers, examples, strict=True)):
            ids_BL[row, : len(example.ids)] = example.ids
            positions, lengths = self._positions(example)
            if len(positions) > self.anchors:
                rng = np.random.default_rng([self.seed, step, number])
                chosen = np.sort(rng.choice(len(positions), self.anchors, replace=False))
                positions, lengths = positions[chosen], lengths[chosen]
            parts.append((np.full(len(positions), row), positions, self._labels(example, positions), lengths))
        arrays = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Batch(torch.from_numpy(ids_BL), *(torch.from_numpy(a.astype(np.int64)) for a in arrays))

    def _example(self, number: int) -> Example:
        return Example(*(column[: self.max_length] for column in self.corpus[number]))

    def _positions(self, example: Example) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return anchor_positions(np.asarray(example.mask), self.labels)

    def _labels(self, example: Example, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        padded = np.concatenate([example.labels, np.zeros(self.labels, np.int32)])
        return padded[positions[:, None] + 2 + np.arange(self.labels)]


def anchor_positions(mask: NDArray[np.uint8], labels: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions from which a draft is made, and how many label tokens (1..labels) each has.

    Position t is an anchor when its root t + 1 and its first label t + 2 lie in one answer; its labels go
    on to the answer's end, never beyond.
    """
    index = np.arange(len(mask))
    next_unmasked = np.minimum.accumulate(np.where(mask > 0, len(mask), index)[::-1])[::-1]
    run = (next_unmasked - index)[2:]  # how many answer tokens start at t + 2
    positions = np.flatnonzero((run > 0) & (mask[1 : len(run) + 1] > 0))
    return positions, np.minimum(run[positions], labels)
