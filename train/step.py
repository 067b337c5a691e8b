"""One optimizer step, a function of (seed, step), and the options that decide it."""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from pydantic import PositiveInt

from ctcdraft.data.batches import Batch, Sampler
from ctcdraft.data.features import Features
from ctcdraft.data.store import Corpus
from ctcdraft.model.base.llm import Base
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.heads import AnyHeadConfig, Head
from ctcdraft.model.load.pretrained import DTYPES

from . import engine as ds
from .checkpoint import TrainState
from .options import MayDiffer
from .policy import on_policy
from .task import DraftTask, ObjectiveConfig, StepMetrics, base_features, head_for, negatives_for

ROWS = 4  # of a step at least, where no batch is said


@dataclass(frozen=True)
class BatchConfig:
    """What a step sees. A run keeps its batch whatever the ranks."""

    # rows (sequences, unless packed) per optimizer step, over all ranks; null: the run's own, of a new run 4, or the
    # next multiple of the ranks
    batch: PositiveInt | None = None
    # at most so many of them per forward and rank; null: all of a rank's share
    micro_batch: MayDiffer[PositiveInt | None] = None
    # at most so many drafts per sequence and step; more steps of fewer are worth more per minute
    anchors: PositiveInt = 32
    max_length: PositiveInt = 2048  # longest sequence, or row of packed ones, in tokens
    # true: as many sequences per row as fit into max_length (first-fit), for long rows on GPUs
    pack: bool = False

    def rows_over(self, world: int) -> int:
        """Of a step on so many ranks: the batch, or what a new run has where none is said."""
        return self.batch or -(-ROWS // world) * world

    def split(self, world: int) -> tuple[int, int]:
        """(micro-batch, accumulation) that make up the batch on so many ranks. Raises ValueError if none do."""
        share, rest = divmod(self.rows_over(world), world)
        if rest:
            raise ValueError(
                f"train.batch={self.batch} does not split over {world} ranks: take a number of ranks that divides it, "
                "or another batch for a new run"
            )
        micro = max(n for n in range(1, min(share, self.micro_batch or share) + 1) if share % n == 0)
        return micro, share // micro


@dataclass(frozen=True)
class TrainConfig(BatchConfig):
    steps: PositiveInt = 800  # optimizer steps
    # of the head: fp32 | bf16; auto: bf16 on a GPU that has it, else fp32
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    max_minutes: MayDiffer[ds.Positive | None] = None  # stop, save, export and evaluate after so long in all sittings
    log_every: MayDiffer[PositiveInt] = 10  # steps from one logged row to the next
    # a run, whose exported head the weights begin as, its draft tokens too; null: fresh ones
    start_from: str | None = None
    # steps between evaluations on development data; the best head there is exported
    eval_every: PositiveInt = 400
    eval_anchors: PositiveInt = 4096  # drafts of an evaluation, at least: whole development sequences
    save_every: MayDiffer[PositiveInt] = 400  # steps between checkpoints
    keep: MayDiffer[PositiveInt] = 2  # newest checkpoints that stay; each holds the best head too
    # so many steps in a row without a finite loss and gradient end the run
    max_skips: MayDiffer[PositiveInt] = 10
    deterministic: MayDiffer[bool] = False  # same seed, machine and ranks: the same bits (slower on GPUs)
    # where nothing moves for so long on any rank, the run ends and says which it was
    hang_minutes: MayDiffer[ds.Positive] = 30.0

    def __post_init__(self) -> None:
        if self.precision == "auto":
            half = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            object.__setattr__(self, "precision", "bf16" if half else "fp32")

    def finished(self, state: TrainState) -> bool:
        """Has training done its steps, or used up its time?"""
        out_of_time = self.max_minutes is not None and state.seconds >= 60 * self.max_minutes
        return state.step >= self.steps or out_of_time


@dataclass(frozen=True)
class Plan:
    """All that decides a training run's outcome."""

    head: AnyHeadConfig
    objective: ObjectiveConfig
    optim: ds.OptimConfig
    zero: MayDiffer[ds.ZeroConfig]
    train: TrainConfig
    draft: MayDiffer[DraftConfig]
    seed: ds.Seed = 0  # of everything random


class Stepped(NamedTuple):
    """What a step came to: the metrics of all ranks together, its learning rate and the gradient's norm."""

    metrics: StepMetrics
    rate: float
    grad_norm: float


class Stepper:
    """Builds the engine, and steps. timed: a context for each part of a step, by its name."""

    def __init__(
        self,
        plan: Plan,
        base: Base,
        corpus: Corpus,
        features: Features | None,
        timed: Callable[[str], AbstractContextManager[None]],
        *,
        start: Head | None = None,
    ) -> None:
        self.plan, self.base, self.timed = plan, base, timed
        self.micro, self.accumulate = plan.train.split(ds.world_size())
        torch.manual_seed(plan.seed)
        head = head_for(plan.head, base, corpus)
        if start is not None:
            head.load_state_dict(start.state_dict())
        self.task = DraftTask(head, plan.objective, base)
        self.task.negatives = negatives_for(plan.objective, self.task.vocabulary, corpus)
        self.dtype = DTYPES[plan.train.precision]
        self.engine = ds.build_engine(
            self.task,
            plan.optim,
            plan.zero,
            precision=plan.train.precision,
            micro=self.micro,
            accumulate=self.accumulate,
        )
        self.sampler = Sampler(
            corpus,
            batch=plan.train.rows_over(ds.world_size()),
            anchors=plan.train.anchors,
            labels=plan.objective.labels,
            max_length=plan.train.max_length,
            seed=plan.seed,
            pack=plan.train.pack,
            features=features,
        )
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead: dict[tuple[int, int], Future[Batch]] = {}

    def __call__(self, step: int) -> Stepped:
        """Forward and backward of the step's micro-batches, then the optimizer. Collective."""
        torch.manual_seed((self.plan.seed << 32) + step)  # whatever draws from it resumes exactly
        parts: list[StepMetrics] = []
        rate, grad_norm = ds.set_rate(self.engine, self.plan.optim, step, self.plan.train.steps), 0.0
        anchors = self.sampler.anchor_count(step)
        # DeepSpeed averages gradients over ranks and micro-batches: this makes it a mean over all anchors.
        scale = ds.world_size() * self.accumulate / max(1, anchors)
        for turn in range(self.accumulate):
            with self.timed("data"):
                batch = self._next_batch(step, turn)
            with self.timed("base"):
                hidden, roots = base_features(self.base, batch, self.dtype, self.task.head)
            with self.timed("policy"):
                batch = on_policy(self.plan.objective.policy, self.task.head, self.base, batch, hidden)
            with self.timed("head"):
                loss, metrics = self.engine(hidden, roots, batch)
            with self.timed("backward"):
                # A loss that is not finite makes the gradient so, and with it the norm that every rank sees.
                self.engine.backward(loss * torch.where(loss.isfinite(), scale, math.nan))
            with self.timed("optimizer"):
                if turn < self.accumulate - 1:
                    self.engine.step()
                else:
                    grad_norm = ds.step_with_norm(self.engine, self.plan.optim.clip)
            parts.append(metrics)
        summed = (ds.sum_over_ranks(torch.stack(figures).sum(dim=0)) for figures in zip(*parts, strict=True))
        return Stepped(StepMetrics._make(summed), rate, grad_norm)

    def batch(self, step: int, turn: int) -> Batch:
        """What this rank has in the micro-batch of that number."""
        at = (turn * ds.world_size() + ds.rank()) * self.micro
        batch = self.sampler.collate(step, slice(at, at + self.micro))
        return batch.pinned() if self.base.device.type == "cuda" else batch

    def _next_batch(self, step: int, turn: int) -> Batch:
        """The same, on the device. The one behind it is read while this one is trained on."""
        ahead = self._ahead.pop((step, turn), None)
        batch = ahead.result() if ahead else self.batch(step, turn)
        last = turn == self.accumulate - 1
        behind = (step + 1, 0) if last else (step, turn + 1)
        self._ahead = {behind: self._reader.submit(self.batch, *behind)}
        return batch.to(self.base.device)

    def rows(self) -> str:
        """What the rows of a step are, in a sentence."""
        sampler = self.sampler
        kind = f"rows of {sampler.max_length} tokens, first-fit" if sampler.pack else "rows of one sequence each"
        documents = f"{len(sampler.corpus)} sequences in {len(sampler.members)} {kind}"
        return f"rows: {documents}; {sampler.padding:.1%} padding at {sampler.batch} rows per step"
