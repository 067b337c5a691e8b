"""Tokens per step without decoding: draft trees at anchors whose continuation by the base is known."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ctcdraft.data.batches import Batch, Sampler
from ctcdraft.data.store import load_corpus
from ctcdraft.model.base import Base
from ctcdraft.model.decoder import Decoder, DraftConfig
from ctcdraft.model.head import HeadConfig, head_on
from ctcdraft.model.tree import Tree
from ctcdraft.train import engine as ds
from ctcdraft.train.task import base_features, document_sight, read_at, roots_of

ANCHORS_PER_SEQUENCE = 8
LOGGED_ANCHORS = 32


class Simulator:
    """Drafts from a copy of the head, as inference does, and counts accepted labels (at most U) plus one."""

    def __init__(
        self,
        head: HeadConfig,
        draft: DraftConfig,
        base: Base,
        data_folder: Path,
        sampler: Sampler,
        anchors: int,
    ) -> None:
        self.base, self.draft, self.train_sampler = base, draft, sampler
        self.head = head_on(base, head).to(base.device).eval()
        dev = load_corpus(data_folder, "dev")
        self.sampler = Sampler(
            dev,
            batch=len(dev),
            anchors=ANCHORS_PER_SEQUENCE,
            labels=sampler.labels,
            max_length=sampler.max_length,
            seed=0,
        )
        self.sequences = some_rows(self.sampler, -(-anchors // ANCHORS_PER_SEQUENCE))

    def on_dev(self, weights: dict[str, Tensor]) -> float:
        """Mean over the same development anchors every time, shared out over ranks. Collective."""
        self._load(weights)
        totals = torch.zeros(2, dtype=torch.float64, device=self.base.device)
        for row in self.sequences[ds.rank() :: ds.world_size()]:
            batch = self.sampler.collate(0, row)
            totals += totals.new_tensor(self._accepted(batch, len(batch.lengths_N)))
        accepted, anchors = ds.sum_over_ranks(totals).tolist()
        return 1 + accepted / max(1.0, anchors)

    def on_train(self, weights: dict[str, Tensor], step: int) -> float:
        """A cheap look at a few anchors of one sequence of this step's batch."""
        self._load(weights)
        batch = self.train_sampler.collate(step, slice(0, 1))
        accepted, anchors = self._accepted(batch, LOGGED_ANCHORS)
        return 1 + accepted / max(1, anchors)

    def _load(self, weights: dict[str, Tensor]) -> None:
        self.head.load_state_dict(weights)
        self.decoder = Decoder(self.base, self.head, self.draft)  # of a head that no longer changes

    def _accepted(self, batch: Batch, most: int) -> tuple[int, int]:
        """(accepted draft tokens, anchors looked at)"""
        accepted = [tree.accepted(labels) for tree, labels in known_drafts(self.decoder, batch, most)]
        return sum(accepted), len(accepted)


def some_rows(sampler: Sampler, most: int) -> list[slice]:
    """At most so many rows of a sampler's first step, one by one, drawn evenly: its first rows are the shortest."""
    chosen = np.random.default_rng(0).permutation(sampler.batch)[:most]
    return [slice(number, number + 1) for number in sorted(chosen.tolist())]


@torch.no_grad()
def known_drafts(decoder: Decoder, batch: Batch, most: int | None = None) -> list[tuple[Tree, list[int]]]:
    """(draft tree, labels: the base's own continuation) of a batch's first `most` anchors."""
    base, head = decoder.base, decoder.head
    assert head is not None
    batch = batch.to(base.device)
    hidden, _ = base_features(base, batch, torch.float32, head)
    known = zip(batch.labels_NU[:most].tolist(), batch.lengths_N[:most].tolist(), strict=True)
    anchors = batch.batch_N[:most], batch.position_N[:most], document_sight(batch)
    drafted = head.drafts_at(hidden, roots_of(batch), *anchors, decoder.vocabulary)
    found = zip(drafted, read_at(batch), known, strict=False)  # of a batch's first
    return [(decoder.tree_of(one, read), row[:length]) for one, read, (row, length) in found]
