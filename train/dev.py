"""What a head is worth on development sequences, whose answers are the base's own: tokens per step counted along them,
by which the best head is chosen."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ctcdraft.data.store import load_corpus
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.heads import HeadConfig, head_on
from ctcdraft.model.replay import Transcript, replay

from . import engine as ds

DRAFT = DraftConfig(budget="fixed")  # that heads are scored with: `draft` may differ from sitting to sitting


def dev_sequences(data_folder: Path, max_length: int, drafts: int) -> list[Transcript]:
    """The development sequences, cut to max_length, in one random order: the first of them that hold as many roots as
    drafts. With data.labels=argmax an answer is what the base chose along it."""
    dev, found = load_corpus(data_folder, "dev"), list[Transcript]()
    for number in np.random.default_rng(0).permutation(len(dev)):
        ids, mask, labels = (np.asarray(column[:max_length], np.int64) for column in dev[number])
        found.append(Transcript(np.where(mask > 0, labels, ids), mask > 0))
        drafts -= sum(end - start - 1 for start, end in found[-1].answers())
        if drafts <= 0:
            break
    return found


def count_dev(base: Base, config: HeadConfig, weights: dict[str, Tensor], dev: Sequence[Transcript]) -> float:
    """Tokens per step of a head of these weights along the answers, shared out over ranks: what greedy decoding with
    `DRAFT` would count (`replay`). 1.0 where there are none. It drafts as inference does, with a second head.
    Collective."""
    head = head_on(base, config)
    head.load_state_dict(weights)
    decoder = Decoder(base, head.for_drafting(base), DRAFT)
    replayed = replay(base, {"": decoder}, dev[ds.rank() :: ds.world_size()], progress=False)[""]
    outs = [answer.generation() for answers in replayed for answer in answers]
    totals = torch.tensor([sum(len(out.tokens) - 1 for out in outs), sum(out.steps for out in outs)])
    tokens, steps = ds.sum_over_ranks(totals.double().to(base.device)).tolist()
    return tokens / steps if steps else 1.0
