"""Tokens per step without decoding: draft trees at anchors whose continuation by the base is known."""

from collections.abc import Iterator, Sequence
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


def simulate(
    base: Base, config: HeadConfig, weights: dict[str, Tensor], draft: DraftConfig, dev: Sequence[Batch]
) -> float:
    """Mean of accepted labels (at most U) plus one at the development anchors, shared out over ranks. It drafts as
    inference does, with a second head. Collective."""
    head = head_on(base, config)
    head.load_state_dict(weights)
    head = head.for_drafting(base)
    decoder, totals = Decoder(base, head, draft), torch.zeros(2, dtype=torch.float64, device=base.device)
    for batch in dev[ds.rank() :: ds.world_size()]:
        drafts = known_drafts(decoder, batch)
        accepted = sum(tree.accepted(labels) for tree, labels in drafts)
        totals += totals.new_tensor((accepted, len(drafts)))
    total, anchors = ds.sum_over_ranks(totals).tolist()
    return 1 + total / max(1.0, anchors)


def dev_batches(
    data_folder: Path, *, sequences: int, anchors: int, labels: int, max_length: int, seed: int
) -> Iterator[Batch]:
    """The same development sequences every time, one by one, each with at most so many anchors."""
    dev = load_corpus(data_folder, "dev")
    if len(dev):
        sampler = Sampler(dev, batch=len(dev), anchors=anchors, labels=labels, max_length=max_length, seed=seed)
        yield from (sampler.collate(0, row) for row in some_rows(sampler, sequences))


def some_rows(sampler: Sampler, most: int) -> list[slice]:
    """At most so many rows of a sampler's first step, one by one, drawn evenly: its first rows are the shortest."""
    chosen = np.random.default_rng(0).permutation(sampler.batch)[:most]
    return [slice(number, number + 1) for number in sorted(chosen.tolist())]


@torch.no_grad()
def known_drafts(decoder: Decoder, batch: Batch) -> list[tuple[Tree, list[int]]]:
    """(draft tree, labels: the base's own continuation) of a batch's anchors."""
    base, head = decoder.base, decoder.head
    assert head is not None
    batch = batch.to(base.device)
    hidden, _ = base_features(base, batch, torch.float32, head)
    anchors = batch.batch_N, batch.position_N, document_sight(batch)
    drafted = head.drafts_at(hidden, roots_of(batch), *anchors, decoder.vocabulary)
    found = zip(drafted, read_at(batch), batch.labels_NU.tolist(), batch.lengths_N.tolist(), strict=True)
    return [(decoder.tree_of(one, read), row[:length]) for one, read, row, length in found]
