"""From a corpus to batches of anchors: every choice a function of (seed, step), none of the rank.

So a run resumes from its step number alone, and one rank sees in one step what several share.
Shape suffixes: B sequences, L positions, N anchors, U labels.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .features import Features
from .store import Corpus, Example

POOL = 16  # batches are made of sequences of like length, sorted within pools of this many batches


class Batch(NamedTuple):
    """ids [B, L], right-padded with 0; anchor n is (batch_N[n], position_N[n]): the base has read
    positions up to it, the root follows, and labels_NU[n, : lengths_N[n]] follow the root.

    Where a row holds several documents, document_BL says which (from 0; -1 on padding), and place_BL counts
    each document's positions from 0. Both are None where a row is one document. stored_BLX: the base's hidden states
    with the attended layers' keys and values behind them, where they were stored. said_NUD: the base's states that say
    each label, where the labels are none of the row (train/policy.py).
    """

    ids_BL: Tensor
    batch_N: Tensor
    position_N: Tensor
    labels_NU: Tensor
    lengths_N: Tensor
    document_BL: Tensor | None = None
    place_BL: Tensor | None = None
    stored_BLX: Tensor | None = None
    said_NUD: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch._make(None if t is None else t.to(device, non_blocking=True) for t in self)

    def pinned(self) -> "Batch":
        """In memory that a GPU copies from by itself."""
        return Batch._make(None if tensor is None else tensor.pin_memory() for tensor in self)


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
        if not any(len(self._document(number)[1]) for number in range(len(corpus))):
            raise ValueError(f"no answer has two tokens within the first train.max_length={longest} of any sequence")
        lengths = corpus.lengths.clip(max=longest)
        self.members = list(np.arange(len(corpus))[:, None])
        if self.pack:  # in an order of their own: the same in every epoch
            order = np.random.default_rng([self.seed, 0]).permutation(len(corpus))
            self.members = [order[row] for row in first_fit(lengths[order], longest)]
        self.row_lengths = np.array([lengths[row].sum() for row in self.members])
        self.steps_per_epoch = max(1, len(self.members) // self.batch)
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def padding(self) -> float:
        """Share of padding when every row is filled up to the longest of its step (packed: to max_length)."""
        rows = [self.row_lengths[self.sequences(step)] for step in range(self.steps_per_epoch)]
        full = sum(len(row) * (self.max_length if self.pack else int(row.max())) for row in rows)
        return 1 - sum(int(row.sum()) for row in rows) / max(1, full)

    def sequences(self, step: int) -> NDArray[np.int64]:
        """The `batch` row numbers of a step (from 0), of like length. What does not fill a batch is left out of an
        epoch."""
        epoch, at = divmod(step, self.steps_per_epoch)
        known = self._order  # another thread may be an epoch ahead
        if known is None or known[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            count = self.steps_per_epoch * self.batch
            order = np.resize(rng.permutation(len(self.members)), count)
            for start in range(0, count, POOL * self.batch):
                pool = order[start : start + POOL * self.batch]
                pool[:] = pool[np.argsort(self.row_lengths[pool], kind="stable")]
            known = self._order = epoch, rng.permutation(order.reshape(self.steps_per_epoch, self.batch))
        return known[1][at]

    def tokens(self, step: int) -> int:
        """How many tokens a step sees, all ranks together, padding left out."""
        return int(self.row_lengths[self.sequences(step)].sum())

    def anchor_count(self, step: int) -> int:
        """How many anchors a step has: known to every rank without a word between them."""
        documents = np.concatenate([self.members[number] for number in self.sequences(step)])
        return sum(min(len(self._document(number)[1]), self.anchors) for number in documents)

    def collate(self, step: int, members: slice) -> Batch:
        """The batch of those of a step's rows that `members` selects."""
        numbers = self.sequences(step)[members]
        rows = [self.members[number].tolist() for number in numbers]
        shape = len(rows), int(self.row_lengths[numbers].max())
        ids_BL, place_BL = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        document_BL = np.full(shape, -1)
        anchors = []  # of each document: row, position in it, labels, their number
        for b, row in enumerate(rows):
            start = 0
            for document, number in enumerate(row):
                example, positions, lengths = self._document(number)
                span = slice(start, start + len(example.ids))
                ids_BL[b, span] = example.ids
                document_BL[b, span] = document
                place_BL[b, span] = np.arange(len(example.ids))
                if len(positions) > self.anchors:
                    rng = np.random.default_rng([self.seed, step, number])
                    chosen = np.sort(rng.choice(len(positions), self.anchors, replace=False))
                    positions, lengths = positions[chosen], lengths[chosen]
                padded = np.concatenate([example.labels, np.zeros(self.labels, np.int32)])
                labels_NU = padded[positions[:, None] + 2 + np.arange(self.labels)]
                anchors.append((np.full(len(positions), b), positions + start, labels_NU, lengths))
                start = span.stop
        arrays = (np.concatenate(column).astype(np.int64) for column in zip(*anchors, strict=True))
        batch_N, position_N, labels_NU, lengths_N = map(torch.from_numpy, arrays)
        batch = Batch(torch.from_numpy(ids_BL), batch_N, position_N, labels_NU, lengths_N)
        if self.features:
            batch = batch._replace(stored_BLX=self.features.rows(rows, self.max_length))
        if not self.pack:
            return batch
        return batch._replace(document_BL=torch.from_numpy(document_BL), place_BL=torch.from_numpy(place_BL))

    def _document(self, number: int) -> tuple[Example, NDArray[np.int64], NDArray[np.int64]]:
        """A sequence, cut, with its anchors and how many labels each has."""
        example = Example._make(column[: self.max_length] for column in self.corpus[number])
        return example, *anchor_positions(np.asarray(example.mask), self.labels)


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


def first_fit(lengths: NDArray[np.int64] | Sequence[int], capacity: int) -> list[NDArray[np.int64]]:
    """Members (numbers into `lengths`) of each row: every sequence goes into the first row with room for it.

    Lengths above `capacity` count as `capacity`: such a sequence is cut to fill a row alone. The space left in
    rows lies in a tree of maxima, so n sequences take n log n steps.
    """
    clipped = np.minimum(lengths, capacity).tolist()
    leaves = 1 << max(0, len(clipped) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = []
    for number, length in enumerate(clipped):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        row = node - leaves
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [np.asarray(row, np.int64) for row in rows]
