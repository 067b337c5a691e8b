"""A decoder that trains its head on what it has answered, between calls: Online Speculative Decoding (Liu et al. 2024,
ICML, arXiv 2310.07177). A head then follows its users where they leave what it was trained on.

A step takes a few anchors of the newest answers, and as many of others that are still kept. Output stays what it was.

Shape suffixes: B sequences, L positions, X what `Base.hidden` gives per position.
"""

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ctcdraft.data.batches import Sampler
from ctcdraft.data.store import Example, corpus_of
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.decode.request import Request
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.heads import CtcConfig, Head, head_on

from .task import DraftTask, ObjectiveConfig, adamw, negatives_for, roots_of

SEQUENCES, FRESH, ANCHORS = 4, 2, 12  # of a step: sequences, how many of them are the newest, and anchors of each
WARMUP = 16  # steps in which lr rises: AdamW's first ones are as large as lr, whatever the gradient
CLIP = 1.0  # largest norm of a gradient
RENEWED = 4  # steps behind which drafts are made with what was learnt


@dataclass(frozen=True)
class OnlineConfig:
    """What is kept is kept in memory and nowhere else, and so is what was learnt."""

    every: PositiveInt | None = None  # answered tokens from one step of AdamW to the next; null: nothing is learnt
    lr: Annotated[float, Field(gt=0)] = 3e-4  # of AdamW, constant behind the first steps
    buffer: PositiveInt = 8192  # tokens of the newest requests that are kept to learn from


class OnlineDecoder(Decoder):
    """Where a call of `generate` or `stream` has ended its requests, learns from them as long as that is due. The
    seconds stand under `learn` in each `Generation.seconds`.

    finished: the kept requests, with the base's hidden states [L, X], at most `buffer` tokens in all: longer ones are
    not learnt from.
    """

    @torch.inference_mode(False)
    def __init__(self, base: Base, head: Head, draft: DraftConfig, online: OnlineConfig) -> None:
        if online.every is None:
            raise ValueError("online.every is null: say after how many tokens the head is to learn")
        dtype = next(head.parameters()).dtype
        super().__init__(base, _copied(head, base).for_drafting(base, dtype), draft)  # the given one stays as it is
        self.every, self.lr, self.most, self.due = online.every, online.lr, online.buffer, 0
        self.steps = self.taken = 0  # of AdamW; those that drafts know of
        kind = "prefix_ctc" if isinstance(head.config, CtcConfig) else "cross_entropy"
        self.task = DraftTask(_copied(head, base), ObjectiveConfig(kind, labels=head.config.slots), base)  # type: ignore[arg-type]
        self.optimizer = adamw(self.task.parameters(), online.lr, (0.9, 0.95), weight_decay=0.0)
        self.finished: deque[tuple[Example, Tensor]] = deque()

    @torch.inference_mode(False)  # as decoding does, and no step of AdamW is possible in it
    def _steps(self, requests: Sequence[Request]) -> Generator[None, None, None]:
        yield from super()._steps(requests)
        start = time.perf_counter()
        for request in requests:
            self._keep(request)
        if self.due >= self.every:
            devices = [self.base.device] if self.base.device.type == "cuda" else []
            with torch.random.fork_rng(devices):  # who decodes finds torch's generators as they were
                while self.due >= self.every:
                    self._learn()
                    self.due -= self.every
            if self.steps >= self.taken + RENEWED:
                self.renew(self.task.head.state_dict())
                self.taken = self.steps
        requests[0].out.seconds["learn"] = time.perf_counter() - start

    @torch.no_grad()
    def _keep(self, request: Request) -> None:
        ids, answered = request.read, len(request.tokens)
        if answered < 2 or len(ids) > self.most:  # a root, and a label behind it
            return
        ids_1L = torch.from_numpy(ids).to(self.base.device).unsqueeze(0)
        hidden_1LX = self.base.hidden(ids_1L, attended=self.task.head.attended)
        mask = np.arange(len(ids)) >= len(request.prompt)
        self.finished.append((Example(ids.copy(), mask, ids.copy()), hidden_1LX[0]))
        self.due += answered
        while sum(len(hidden_LX) for _, hidden_LX in self.finished) > self.most:
            self.finished.popleft()

    def _learn(self) -> None:
        """One step on some of what is kept: a function of that and of the number of steps before it."""
        older = max(0, len(self.finished) - FRESH)
        drawn = np.random.default_rng(self.steps).permutation(older)[: SEQUENCES - FRESH]
        chosen = [self.finished[number] for number in (*drawn, *range(older, len(self.finished)))]
        sampler = Sampler(
            corpus_of([example for example, _ in chosen]),
            batch=len(chosen),
            anchors=ANCHORS,
            labels=self.task.objective.labels,
            max_length=self.most,
            seed=0,
        )
        batch = sampler.collate(self.steps, slice(None)).to(self.base.device)
        own = next(self.task.parameters()).dtype
        kept = [chosen[number][1] for number in sampler.sequences(self.steps)]
        hidden_BLX, root_BLD = pad_sequence(kept, batch_first=True), self.base.embed(roots_of(batch))
        corpus = corpus_of([example for example, _ in self.finished])
        self.task.negatives = negatives_for(self.task.objective, self.task.vocabulary, corpus)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.steps + 1) / WARMUP)
        torch.manual_seed(self.steps)  # for heads that draw
        with torch.enable_grad():
            loss, metrics = self.task(hidden_BLX.to(own), root_BLD.to(own).detach(), batch)
            (loss / metrics.anchors).backward()
        if torch.nn.utils.clip_grad_norm_(self.task.parameters(), CLIP).isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


def decoder_for(base: Base, head: Head, draft: DraftConfig, online: OnlineConfig) -> Decoder:
    """One that learns, if that is asked for."""
    return Decoder(base, head, draft) if online.every is None else OnlineDecoder(base, head, draft, online)


def _copied(head: Head, base: Base) -> Head:
    """One of the same weights, to be trained, in float32 or wider."""
    wide = torch.promote_types(next(head.parameters()).dtype, torch.float32)
    copy = head_on(base, head.config).to(base.device, wide)
    copy.load_state_dict(head.state_dict())
    return copy
