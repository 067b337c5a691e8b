"""What a head is worth on held-out text whose continuation by the base is known, without decoding: draft trees at its
anchors give tokens per step, and how far psi, and copied tokens, can be believed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ctcdraft.data.batches import Batch, Sampler
from ctcdraft.data.store import load_corpus
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.decoder import Decoder, DraftConfig
from ctcdraft.model.draft.budget import fit_calibration
from ctcdraft.model.draft.prompt_lookup import fit_rates
from ctcdraft.model.draft.tree import Tree
from ctcdraft.model.heads import Head, HeadConfig, head_on

from . import engine as ds
from .task import anchors_of, base_features, read_at, roots_of

NODES = 64  # of the trees that psi is calibrated on
SEQUENCES = 64
ANCHORS_PER_SEQUENCE = 16


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
        accepted = sum(len(tree.path_of(labels)) for tree, labels in drafts)
        totals += totals.new_tensor((accepted, len(drafts)))
    total, anchors = ds.sum_over_ranks(totals).tolist()
    return 1 + total / max(1.0, anchors)


def dev_batches(
    data_folder: Path, *, sequences: int, anchors: int, labels: int, max_length: int, seed: int
) -> list[Batch]:
    """The same development sequences every time, one by one, each with at most so many anchors."""
    dev = load_corpus(data_folder, "dev")
    if not len(dev):
        return []
    sampler = Sampler(dev, batch=len(dev), anchors=anchors, labels=labels, max_length=max_length, seed=seed)
    return [sampler.collate(0, row) for row in some_rows(sampler, sequences)]


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
    drafted = head.drafts(hidden, roots_of(batch), anchors_of(batch), decoder.vocabulary)
    found = zip(drafted, read_at(batch), batch.labels_NU.tolist(), batch.lengths_N.tolist(), strict=True)
    return [(decoder.tree_of(one, read), row[:length]) for one, read, row, length in found]


def fit_to_dev(head: Head, base: Base, data_folder: Path, labels: int, max_length: int) -> None:
    """Give a head what its psi, per depth, and copied tokens are worth on development sequences. Nothing where there
    are none, or the prepared data is gone."""
    if not data_folder.is_dir():
        return
    decoder = Decoder(base, head, DraftConfig(nodes=NODES, prompt_lookup=0))
    sizes = {"sequences": SEQUENCES, "anchors": ANCHORS_PER_SEQUENCE, "labels": labels, "max_length": max_length}
    psi, depth, accepted = [], [], []
    for batch in dev_batches(data_folder, **sizes, seed=1):
        for tree, continuation in known_drafts(decoder, batch):
            right = np.zeros(len(tree), bool)
            right[tree.path_of(continuation)] = True
            seen = tree.depths <= len(continuation)  # what would follow the labels is not known
            psi.append(tree.psi[seen].astype(np.float64))
            depth.append(tree.depths[seen])
            accepted.append(right[seen])
    if psi:
        head.calibration = fit_calibration(np.concatenate(psi), np.concatenate(depth), np.concatenate(accepted))
    dev = load_corpus(data_folder, "dev")
    rows = (dev[i] for i in range(len(dev)))
    head.copy_rates = fit_rates((np.asarray(row.ids, np.int64), np.asarray(row.mask, bool)) for row in rows)
