"""What a head's psi, and copied tokens, are worth on held-out text whose continuation by the base is known."""

from pathlib import Path

import numpy as np

from ctcdraft.data.store import load_corpus
from ctcdraft.model.base import Base
from ctcdraft.model.budget import Calibration, fit_calibration
from ctcdraft.model.decoder import Decoder, DraftConfig
from ctcdraft.model.head import Head
from ctcdraft.model.prompt_lookup import CopyRates, fit_rates
from ctcdraft.train.simulate import dev_batches, known_drafts

NODES = 64
SEQUENCES = 64
ANCHORS_PER_SEQUENCE = 16


def calibrate(head: Head, base: Base, data_folder: Path, labels: int, max_length: int) -> Calibration | None:
    """Fit acceptance to psi per depth on development sequences, as the best head was chosen by.

    None where there are none, or the prepared data is gone.
    """
    if not data_folder.is_dir():
        return None
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
    if not psi:
        return None
    return fit_calibration(np.concatenate(psi), np.concatenate(depth), np.concatenate(accepted))


def copy_rates(data_folder: Path) -> CopyRates | None:
    """How likely copied tokens are on the development sequences; None where the prepared data is gone."""
    if not data_folder.is_dir():
        return None
    dev = load_corpus(data_folder, "dev")
    rows = (dev[i] for i in range(len(dev)))
    return fit_rates((np.asarray(row.ids, np.int64), np.asarray(row.mask, bool)) for row in rows)
