"""From a corpus to batches of anchors: every choice a function of (seed, step), none of the rank.

So a run resumes from its step number alone, and one rank sees in one step what several share.
Shape suffixes: B sequences, L positions, N anchors, U labels.
"""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .features import Features
from .packing import first_fit
from .store import Corpus, Example

POOL = 16  # batches are made of sequences of like length, sorted within pools of this many batches


class Batch(NamedTuple):
    """ids [B, L], right-padded with 0; anchor n is (batch_N[n], position_N[n]): the base has read
    positions up to it, the root follows, and labels_NU[n, : lengths_N[n]] follow the root.

    Where a row holds several documents, document_BL says which (from 0; -1 on padding), and place_BL counts
    each document's positions from 0. Both are None where a row is one document. stored_BLX: the base's hidden states
    with the attended layers' keys and values behind them, and stored_scale_BL their scale, where they were stored.
    """

    ids_BL: Tensor
    batch_N: Tensor
    position_N: Tensor
    labels_NU: Tensor
    lengths_N: Tensor
    document_BL: Tensor | None = None
    place_BL: Tensor | None = None
    stored_BLX: Tensor | None = None
    stored_scale_BL: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch._make(None if tensor is None else tensor.to(device) for tensor in self)


@dataclass(eq=False)
class Sampler:
    """Which rows and anchors a step sees.

    batch: rows per step, over all ranks. A row is one document, or with `pack` as many as fit, first-fit, into
    max_length tokens. anchors: at most so many per document. labels: U. max_length: rows, and so documents,
    are cut after so many tokens. features: the base's hidden states of every document, where they were stored.
    """

    corpus: Corpus
    _: KW_ONLY
    batch: int
    anchors: int
    labels: int
    max_length: int
    seed: int
    pack: bool = False
    features: Features | None = None

    def __post_init__(self) -> None:
        corpus, longest = self.corpus, self.max_length
        if len(corpus) < 1:
            raise ValueError("the prepared data holds no training sequence: see its rejects.jsonl")
        if not any(corpus.mask[start : start + longest].any() for start in corpus.offsets[:-1]):
            raise ValueError(f"no answer lies within the first train.max_length={longest} tokens of any sequence")
        self.members = self._packed() if self.pack else list(np.arange(len(corpus))[:, None])
        lengths = corpus.lengths.clip(max=longest)
        self.row_lengths = np.array([lengths[row].sum() for row in self.members])
        self.steps_per_epoch = max(1, len(self.members) // self.batch)
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def _packed(self) -> list[NDArray[np.int64]]:
        """The documents of each row, packed in an order of their own: the same in every epoch."""
        order = np.random.default_rng([self.seed, 0]).permutation(len(self.corpus))
        return [order[row] for row in first_fit(self.corpus.lengths[order], self.max_length)]

    @property
    def padding(self) -> float:
        """Share of padding when every row is filled up to the longest of its step (packed: to max_length)."""
        rows = [self.row_lengths[self.sequences(step)] for step in range(self.steps_per_epoch)]
        full = sum(len(row) * (self.max_length if self.pack else int(row.max())) for row in rows)
        return 1 - sum(int(row.sum()) for row in rows) / max(1, full)

    def sequences(self, step: int) -> NDArray[np.int64]:
        """The `batch` row numbers of a step (from 0), of like length."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        return self._order[1][at]

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        """[steps, batch] row numbers of an epoch; what does not fill a batch is left out."""
        rng = np.random.default_rng([self.seed, epoch])
        count = self.steps_per_epoch * self.batch
        order = np.resize(rng.permutation(len(self.members)), count)
        for start in range(0, count, POOL * self.batch):
            pool = order[start : start + POOL * self.batch]
            pool[:] = pool[np.argsort(self.row_lengths[pool], kind="stable")]
        return rng.permutation(order.reshape(self.steps_per_epoch, self.batch))

    def tokens(self, step: int) -> int:
        """How many tokens a step sees, all ranks together, padding left out."""
        return int(self.row_lengths[self.sequences(step)].sum())

    def anchor_counts(self, step: int) -> NDArray[np.int64]:
        """How many anchors each row of a step has: known to every rank without a word between them."""
        counts = [
            sum(min(len(self._positions(self._example(i))[0]), self.anchors) for i in self.members[row])
            for row in self.sequences(step)
        ]
        return np.asarray(counts, np.int64)

    def collate(self, step: int, members: slice) -> Batch:
        """The batch of those of a step's rows that `members` selects."""
        rows = [self.members[number] for number in self.sequences(step)[members]]
        examples = [[self._example(i) for i in row] for row in rows]
        shape = len(rows), max(sum(len(e.ids) for e in row) for row in examples)
        ids_BL, place_BL = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        document_BL = np.full(shape, -1)
        parts = []
        for b, (numbers, row) in enumerate(zip(rows, examples, strict=True)):
            start = 0
            for document, (number, example) in enumerate(zip(numbers, row, strict=True)):
                span = slice(start, start + len(example.ids))
                ids_BL[b, span] = example.ids
                document_BL[b, span] = document
                place_BL[b, span] = np.arange(len(example.ids))
                parts.append(self._anchors(step, number, example, b, start))
                start = span.stop
        arrays = [np.concatenate(column) for column in zip(*parts, strict=True)]
        batch = Batch(torch.from_numpy(ids_BL), *(torch.from_numpy(a.astype(np.int64)) for a in arrays))
        if self.features:
            stored = self.features.rows([row.tolist() for row in rows], self.max_length)
            batch = batch._replace(stored_BLX=stored.values, stored_scale_BL=stored.scale)
        if not self.pack:
            return batch
        return batch._replace(document_BL=torch.from_numpy(document_BL), place_BL=torch.from_numpy(place_BL))

    def _anchors(self, step: int, number: int, example: Example, row: int, start: int) -> tuple[NDArray[np.int64], ...]:
        """(row, position in it, labels, their number) of the anchors of a document that starts there."""
        positions, lengths = self._positions(example)
        if len(positions) > self.anchors:
            rng = np.random.default_rng([self.seed, step, number])
            chosen = np.sort(rng.choice(len(positions), self.anchors, replace=False))
            positions, lengths = positions[chosen], lengths[chosen]
        return np.full(len(positions), row), positions + start, self._labels(example, positions), lengths

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
