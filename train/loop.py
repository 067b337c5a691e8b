"""The training loop: one optimizer step at a time, each a function of (seed, step), until done or stopped."""

import math
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from safetensors.torch import save_file
from tqdm import tqdm

from ctcdraft.data.batches import Sampler
from ctcdraft.data.features import Features
from ctcdraft.data.store import load_corpus
from ctcdraft.model.base.llm import Base
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.heads import AnyHeadConfig

from . import engine as ds
from .anomalies import AnomalyChecks
from .checkpoint import TrainState, load_checkpoint, save_checkpoint
from .dev import count_dev, dev_sequences
from .log import RunLog
from .options import MayDiffer
from .task import DraftTask, ObjectiveConfig, StepMetrics, base_features, head_for, negatives_for
from .watchdog import Watchdog


@dataclass(frozen=True)
class TrainConfig:
    """A run keeps its batch whatever the ranks. max_minutes counts all sittings."""

    steps: PositiveInt = 800  # optimizer steps
    batch: PositiveInt = 4  # rows (sequences, unless packed) per optimizer step, over all ranks
    # at most so many of them per forward and rank; null: all of a rank's share
    micro_batch: MayDiffer[PositiveInt | None] = None
    # at most so many drafts per sequence and step; more steps of fewer are worth more per minute
    anchors: PositiveInt = 32
    max_length: PositiveInt = 2048  # longest sequence, or row of packed ones, in tokens
    # true: as many sequences per row as fit into max_length (first-fit), for long rows on GPUs
    pack: bool = False
    # of the head: fp32 | bf16; auto: bf16 on a GPU that has it, else fp32
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    max_minutes: MayDiffer[ds.Positive | None] = None  # stop, save, export and evaluate after so long
    log_every: MayDiffer[PositiveInt] = 10  # steps from one logged row to the next
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

    def split(self, world: int) -> tuple[int, int]:
        """(micro-batch, accumulation) that make up the batch on so many ranks. Raises ValueError if none do."""
        share, rest = divmod(self.batch, world)
        if rest:
            raise ValueError(
                f"train.batch={self.batch} does not split over {world} ranks: take a number of ranks that divides it, "
                "or another batch for a new run"
            )
        micro = max(n for n in range(1, min(share, self.micro_batch or share) + 1) if share % n == 0)
        return micro, share // micro

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


class Trainer:
    """One run: builds the engine, resumes where the run folder left off, trains, keeps the best head."""

    def __init__(
        self,
        plan: Plan,
        base: Base,
        data_folder: Path,
        run_folder: Path,
        features: Features | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.plan, self.base, self.watchdog = plan, base, watchdog
        self.checkpoints, self.skips = run_folder / "checkpoints", run_folder / "skipped"
        self.micro, self.accumulate = plan.train.split(ds.world_size())
        torch.manual_seed(plan.seed)
        corpus = load_corpus(data_folder, "train")
        head = head_for(plan.head, base, corpus)
        self.task = DraftTask(head, plan.objective, base, negatives_for(plan.objective, head, base, corpus))
        self.dtype = ds.PRECISIONS[plan.train.precision]
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
            batch=plan.train.batch,
            anchors=plan.train.anchors,
            labels=plan.objective.labels,
            max_length=plan.train.max_length,
            seed=plan.seed,
            pack=plan.train.pack,
            features=features,
        )
        self.dev = dev_sequences(data_folder, plan.train.max_length, plan.train.eval_anchors)
        self.state, self.best = load_checkpoint(self.engine, self.checkpoints)
        self._saved = (self.state.step, self.state.best) if self.state.step else None
        self.seconds: dict[str, float] = defaultdict(float)
        self.rate = self.grad_norm = 0.0
        self.anomalies = AnomalyChecks(blanks=plan.head.topology.band is None)
        self.stopped_by: int | None = None  # a signal

    def finished(self) -> bool:
        return self.plan.train.finished(self.state)

    def rows(self) -> str:
        """What the rows of a step are, in a sentence."""
        sampler = self.sampler
        kind = f"rows of {sampler.max_length} tokens, first-fit" if sampler.pack else "rows of one sequence each"
        documents = f"{len(sampler.corpus)} sequences in {len(sampler.members)} {kind}"
        return f"rows: {documents}; {sampler.padding:.1%} padding at {sampler.batch} rows per step"

    def run(self, log: RunLog | None) -> TrainState:
        """Train to the end, the time limit or SIGTERM; a checkpoint is saved in each case."""
        bar = tqdm(
            total=self.plan.train.steps,
            initial=self.state.step,
            desc="training",
            unit="step",
            disable=ds.rank() > 0,
            mininterval=1,
        )
        with self._signals(), bar:
            self._doing("its start")
            while not self._stop():
                row = self._one_step()
                if row is not None:
                    loss, psi = (row.get(key, math.nan) for key in ("train/loss", "draft/psi_sum"))
                    bar.set_postfix_str(f"loss {loss:.3f} expected tokens/step {1 + psi:.2f}")
                    self._warn(self.anomalies.warnings(row))
                    if log:
                        log.write(row)
                bar.update()
                if self.state.step % self.plan.train.save_every == 0:  # after the row: a kill between loses neither
                    self._save(log)
            if self.finished() and not self._is_due():  # out of time between two evaluations
                self._evaluate()
            if self._saved != (self.state.step, self.state.best):
                self._save(log)
        if self.watchdog:
            self.watchdog.limit = None
        return self.state

    def probe(self, steps: int) -> float:
        """Seconds per step, the first few left out; trains on without a checkpoint or a log. Collective."""
        seconds = []
        for step in tqdm(range(steps), "probe", unit="step", mininterval=1, leave=False, disable=ds.rank() > 0):
            start = time.perf_counter()
            self._accumulated_step(step)
            seconds.append(time.perf_counter() - start)
        settled = seconds[min(3, steps - 1) :]
        return sum(settled) / len(settled)

    def _one_step(self) -> dict[str, Any] | None:
        """One optimizer step; the row to log, where one is due."""
        state, train, start = self.state, self.plan.train, time.perf_counter()
        torch.manual_seed((self.plan.seed << 32) + state.step)  # whatever draws from it resumes exactly
        tokens = self.sampler.tokens(state.step)
        metrics = self._accumulated_step(state.step)
        state.step, state.tokens = state.step + 1, state.tokens + tokens
        self._count_skips()
        logged = state.step % train.log_every == 0 or state.step in (1, train.steps)
        row = self._row(metrics, tokens, time.perf_counter() - start) if logged else None
        if self._is_due():
            tau = self._evaluate()
            if row is not None:
                row["dev/tokens_per_step"] = tau
        state.seconds += time.perf_counter() - start
        return row

    def _save(self, log: RunLog | None) -> None:
        self._doing(f"saving step {self.state.step}")
        if log:
            log.sync()
        save_checkpoint(self.engine, self.checkpoints, self.state, self.plan.train.keep, self.best)
        self._saved = self.state.step, self.state.best

    def _count_skips(self) -> None:
        """Was the step without an update? Keeps its batches, and ends a run that has too many of them in a row.

        Raises ValueError then, on all ranks.
        """
        state, step = self.state, self.state.step
        if math.isfinite(self.grad_norm):
            state.in_a_row = 0
            return
        state.skipped, state.in_a_row = state.skipped + 1, state.in_a_row + 1
        tensors: dict[str, torch.Tensor] = {}  # of each micro-batch in turn
        for turn in range(self.accumulate):
            batch = self.sampler.collate(step - 1, self._members(turn))
            for name, tensor in batch._asdict().items():
                if tensor is not None:
                    tensors[f"{turn}.{name}"] = tensor.contiguous()
        self.skips.mkdir(parents=True, exist_ok=True)
        metadata = {"step": str(step), "seed": str(self.plan.seed)}
        save_file(tensors, self.skips / f"step_{step:06d}_rank{ds.rank()}.safetensors", metadata)
        self._warn([f"step {step} is skipped: its loss or gradient is not finite; its batch is in {self.skips}"])
        if state.in_a_row >= self.plan.train.max_skips:
            raise ValueError(
                f"{state.in_a_row} steps in a row, up to step {step}, gave a loss or gradient that is not finite: "
                f"lower optim.lr (now {self.plan.optim.lr}); their batches are in {self.skips}, and the checkpoint "
                f"before, if there is one, is in {self.checkpoints}"
            )

    def _warn(self, sentences: list[str]) -> None:
        if ds.rank() == 0:
            for sentence in sentences:
                tqdm.write(f"warning: {sentence}", file=sys.stderr)

    def _is_due(self) -> bool:
        """Is the head evaluated after the step that is done?"""
        return self.state.step % self.plan.train.eval_every == 0 or self.state.step == self.plan.train.steps

    def _evaluate(self) -> float:
        """Tokens per step counted on development sequences; the best head is kept. Collective."""
        weights = ds.head_state(self.engine, self.task.head)
        with self._timed("evaluate"):
            tau = count_dev(self.base, self.plan.head, weights, self.plan.draft, self.dev)
        if tau > self.state.best:
            self.best = {name: w.cpu() for name, w in weights.items()} if ds.rank() == 0 else {}
            self.state.best, self.state.best_step = tau, self.state.step
        return tau

    def _accumulated_step(self, step: int) -> StepMetrics:
        """Forward and backward of the step's micro-batches, then the optimizer. The metrics of all ranks together."""
        parts: list[StepMetrics] = []
        self.rate = ds.set_rate(self.engine, self.plan.optim, step, self.plan.train.steps)
        anchors = int(self.sampler.anchor_counts(step).sum())
        # DeepSpeed averages gradients over ranks and micro-batches: this makes it a mean over all anchors.
        scale = ds.world_size() * self.accumulate / max(1, anchors)
        for turn in range(self.accumulate):
            with self._timed("data"):
                batch = self.sampler.collate(step, self._members(turn)).to(self.base.device)
            with self._timed("base"):
                hidden, roots = base_features(self.base, batch, self.dtype, self.task.head)
            with self._timed("head"):
                loss, metrics = self.engine(hidden, roots, batch)
            with self._timed("backward"):
                # A loss that is not finite makes the gradient so, and with it the norm that every rank sees.
                self.engine.backward(loss * torch.where(loss.isfinite(), scale, math.nan))
            with self._timed("optimizer"):
                if turn < self.accumulate - 1:
                    self.engine.step()
                else:
                    self.grad_norm = ds.step_with_norm(self.engine, self.plan.optim.clip)
            parts.append(metrics)
        every = [ds.sum_over_ranks(torch.stack(figures).sum(dim=0)) for figures in zip(*parts, strict=True)]
        return StepMetrics(*every)

    def _members(self, turn: int) -> slice:
        """Which of a step's sequences this rank has in its micro-batch of that number."""
        at = (turn * ds.world_size() + ds.rank()) * self.micro
        return slice(at, at + self.micro)

    def _row(self, metrics: StepMetrics, tokens: int, seconds: float) -> dict[str, Any]:
        """The figures of a step, those left out that are not finite; shares of `seconds` since the last row."""
        anchors, feasible = max(1.0, float(metrics.anchors)), float(metrics.feasible)
        counted, on_gpu = max(1.0, feasible), self.base.device.type == "cuda"
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux
        busy = sum(self.seconds.values()) or 1.0
        row = {
            "step": self.state.step,
            "train/loss": float(metrics.loss) / counted,
            "train/infeasible": 1 - feasible / anchors,
            "train/tokens": self.state.tokens,
            "train/skipped": self.state.skipped,
            "optim/lr": self.rate,
            "optim/grad_norm": self.grad_norm,
            "draft/psi_sum": float(metrics.psi_U.sum()) / counted,
            "perf/tokens_per_second": tokens / seconds,
            "perf/step_seconds": seconds,
            "perf/ranks": ds.world_size(),
            "perf/peak_memory_gb": (torch.cuda.max_memory_allocated() if on_gpu else 1024 * kilobytes) / 2**30,
        }
        for t, blank in enumerate(metrics.blank_T.tolist()):
            row[f"draft/blank_rate/slot_{t + 1}"] = blank / counted
        row |= {f"time/{part}": spent / busy for part, spent in sorted(self.seconds.items())}
        self.seconds.clear()
        return {key: value for key, value in row.items() if math.isfinite(value)}

    def _doing(self, what: str) -> None:
        if self.watchdog:
            self.watchdog.moved(what, 60 * self.plan.train.hang_minutes)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        self._doing(f"{part} of step {self.state.step + 1}")
        start = time.perf_counter()
        yield
        if self.base.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[part] += time.perf_counter() - start

    def _stop(self) -> bool:
        """Has any rank been asked to stop? Collective, so that all stop at the same step."""
        mine = torch.tensor([bool(self.stopped_by), self.state.seconds], dtype=torch.float64, device=self.base.device)
        asked, seconds = ds.sum_over_ranks(mine).tolist()
        # Ranks go by their mean clock: the time limit ends all at once.
        self.state.seconds = seconds / ds.world_size()
        return asked > 0 or self.finished()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: Any) -> None:
            self.stopped_by = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
