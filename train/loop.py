"""The training loop: one optimizer step at a time, each a function of (seed, step), until done or stopped."""

import json
import math
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ctcdraft.data.batches import Sampler
from ctcdraft.data.features import Features
from ctcdraft.data.store import load_corpus
from ctcdraft.model.base import Base
from ctcdraft.model.decoder import DraftConfig
from ctcdraft.model.head import HeadConfig
from ctcdraft.train import engine as ds
from ctcdraft.train import pulse
from ctcdraft.train.checkpoint import TrainState, load_checkpoint, save_best, save_checkpoint
from ctcdraft.train.files import write_atomically
from ctcdraft.train.log import RunLog
from ctcdraft.train.simulate import Simulator
from ctcdraft.train.task import DraftTask, ObjectiveConfig, Sums, base_features, check_fit, head_for, negatives_for
from ctcdraft.train.watch import Replay, Watch, save_replay

RECENT = 0.9  # weight of what was in the running mean, at each logged step


@dataclass(frozen=True)
class TrainConfig:
    """batch: rows per optimizer step over all ranks, at most micro_batch of them per forward and rank (None: all of a
    rank's share); a run keeps its batch whatever the ranks. A row is one sequence, or with `pack` as many as fit into
    max_length tokens. anchors: at most so many per sequence. max_minutes counts all sittings. keep: newest
    checkpoints that stay; max_skips: steps in a row without a finite loss and gradient that end the run;
    hang_minutes: the same, where no part of a step ends for so long."""

    steps: int = 800
    batch: int = 4
    micro_batch: int | None = None
    anchors: int = 32
    max_length: int = 2048
    pack: bool = False
    precision: str = "auto"
    max_minutes: float | None = None
    log_every: int = 10
    eval_every: int = 400
    eval_anchors: int = 512
    save_every: int = 400
    keep: int = 2
    max_skips: int = 10
    deterministic: bool = False
    hang_minutes: float = 30.0

    def __post_init__(self) -> None:
        if self.precision == "auto":
            half = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            object.__setattr__(self, "precision", "bf16" if half else "fp32")
        if self.precision not in ds.PRECISIONS:
            raise ValueError(f"train.precision={self.precision!r}: choose one of {('auto', *ds.PRECISIONS)}")
        counts = (
            "steps",
            "batch",
            "anchors",
            "max_length",
            "log_every",
            "eval_every",
            "eval_anchors",
            "save_every",
            "keep",
            "max_skips",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 1")
        for name in ("max_minutes", "hang_minutes"):
            minutes = getattr(self, name)
            if minutes is not None and not 0 < minutes < math.inf:
                raise ValueError(f"train.{name}={minutes} must be above 0 and finite")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"train.micro_batch={self.micro_batch} must be at least 1")

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


@dataclass(frozen=True)
class Plan:
    """All that decides a training run's outcome."""

    head: HeadConfig
    objective: ObjectiveConfig
    optim: ds.OptimConfig
    zero: ds.ZeroConfig
    train: TrainConfig
    draft: DraftConfig
    seed: int


def finished(config: TrainConfig, state: TrainState) -> bool:
    """Has training done its steps, or used up its time?"""
    out_of_time = config.max_minutes is not None and state.seconds >= 60 * config.max_minutes
    return state.step >= config.steps or out_of_time


class Trainer:
    """One run: builds the engine, resumes where the run folder left off, trains, keeps the best head."""

    def __init__(
        self, plan: Plan, base: Base, data_folder: Path, run_folder: Path, features: Features | None = None
    ) -> None:
        check_fit(plan.head, plan.objective)
        self.plan, self.base = plan, base
        self.checkpoints, self.skips = run_folder / "checkpoints", run_folder / "skipped"
        micro, self.accumulate = plan.train.split(ds.world_size())
        self.micro = micro
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
            steps=plan.train.steps,
            micro=micro,
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
        self.simulator = Simulator(plan.head, plan.draft, base, data_folder, self.sampler, plan.train.eval_anchors)
        self.state = load_checkpoint(self.engine, self.checkpoints)
        self.task.psi_U = self.state.psi_U
        self._saved = self.state.step or None
        self.seconds: dict[str, float] = defaultdict(float)
        self.grad_norm = 0.0
        self.watch = Watch(blanks=plan.head.band is None)
        self._stop_asked = self.interrupted = False

    def finished(self) -> bool:
        return finished(self.plan.train, self.state)

    def rows(self) -> str:
        """What the rows of a step are, in a sentence."""
        sampler = self.sampler
        kind = f"rows of {sampler.max_length} tokens, first-fit" if sampler.pack else "rows of one sequence each"
        documents = f"{len(sampler.corpus)} sequences in {len(sampler.members)} {kind}"
        return f"rows: {documents}; {sampler.padding:.1%} padding at {sampler.batch} rows per step"

    def run(self, log: RunLog | None) -> TrainState:
        """Train to the end, the time limit or SIGTERM; a checkpoint is saved in each case."""
        with self._signals(), pulse.no_longer_than(60 * self.plan.train.hang_minutes):
            self._steps(log)
            if self.finished() and not self._is_due(self.state.step):  # out of time between two evaluations
                self._evaluate(ds.head_state(self.engine, self.task.head))
            if self._saved != self.state.step:
                self._save(log)
            if ds.rank() == 0:
                write_atomically(self.checkpoints / "state.json", json.dumps(asdict(self.state)).encode())
        return self.state

    def _steps(self, log: RunLog | None) -> None:
        bar = tqdm(
            total=self.plan.train.steps,
            initial=self.state.step,
            desc="training",
            unit="step",
            disable=ds.rank() > 0,
            mininterval=1,
        )
        with bar:
            while not self._stop():
                row = self._one_step()
                if row is not None:
                    loss = row.get("train/loss", math.nan)
                    bar.set_postfix_str(f"loss {loss:.3f} tokens/step {self.state.recent:.2f}")
                    self._warn(self.watch.warnings(row))
                    if log:
                        log.write(row)
                if self.state.step % self.plan.train.save_every == 0:  # after the row: a kill between loses neither
                    self._save(log)
                bar.update()

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
        train, start = self.plan.train, time.perf_counter()
        step = self.state.step
        lr = self.engine.get_lr()[0]
        torch.manual_seed((self.plan.seed << 32) + step)  # whatever draws from it resumes exactly
        sums, tokens = self._accumulated_step(step)
        self.task.observe(sums)
        step += 1
        self._count(step)
        logged = step % train.log_every == 0 or step == train.steps or step == 1
        evaluated = self._is_due(step)
        row = self._row(step, sums, tokens, lr, time.perf_counter() - start) if logged else None
        self.state = replace(self.state, step=step, tokens=self.state.tokens + tokens, psi_U=self.task.psi_U)
        if logged or evaluated:
            weights = ds.head_state(self.engine, self.task.head)
        if evaluated:
            tau = self._evaluate(weights)
            if row is not None:
                row["dev/tokens_per_step"] = tau
        if row is not None:
            tau = self.simulator.on_train(weights, step - 1)  # of one batch, which may hold a loop that drafts itself
            recent = RECENT * self.state.recent + (1 - RECENT) * tau if self.state.recent else tau
            self.state = replace(self.state, recent=recent)
            row |= {"draft/tokens_per_step": tau, "draft/tokens_per_step_mean": recent}
        self.state = replace(self.state, seconds=self.state.seconds + time.perf_counter() - start)
        return row

    def _save(self, log: RunLog | None) -> None:
        pulse.moved(f"saving step {self.state.step}")
        if log:
            log.sync()
        save_checkpoint(self.engine, self.checkpoints, self.state, self.plan.train.keep)
        self._saved = self.state.step

    def _count(self, step: int) -> None:
        """Was the step without an update? Keeps its batches, and ends a run that has too many of them in a row.

        Raises ValueError then, on all ranks.
        """
        if math.isfinite(self.grad_norm):
            self.state = replace(self.state, in_a_row=0)
            return
        name = f"step_{step:06d}_rank{ds.rank()}.safetensors"
        batches = [self.sampler.collate(step - 1, self._members(turn)) for turn in range(self.accumulate)]
        save_replay(self.skips / name, Replay(batches, step, self.plan.seed))
        self.state = replace(self.state, skipped=self.state.skipped + 1, in_a_row=self.state.in_a_row + 1)
        self._warn([f"step {step} is skipped: its loss or gradient is not finite; its batch is in {self.skips}"])
        if self.state.in_a_row >= self.plan.train.max_skips:
            raise ValueError(
                f"{self.state.in_a_row} steps in a row, up to step {step}, gave a loss or gradient that is not finite: "
                f"lower optim.lr (now {self.plan.optim.lr}); their batches are in {self.skips}, and the checkpoint "
                f"before, if there is one, is in {self.checkpoints}"
            )

    def _warn(self, sentences: list[str]) -> None:
        if ds.rank() == 0:
            for sentence in sentences:
                tqdm.write(f"warning: {sentence}", file=sys.stderr)

    def _is_due(self, step: int) -> bool:
        """Is the head evaluated after this step?"""
        return step % self.plan.train.eval_every == 0 or step == self.plan.train.steps

    def _evaluate(self, weights: dict[str, Tensor]) -> float:
        """Simulated tokens per step on the development sequences; the best head is kept. Collective."""
        with self._timed("evaluate"):
            tau = self.simulator.on_dev(weights)
        if tau > self.state.best:
            save_best(self.checkpoints, weights)
            self.state = replace(self.state, best=tau, best_step=self.state.step)
        return tau

    def _accumulated_step(self, step: int) -> tuple[Sums, int]:
        """Forward and backward of the step's micro-batches, then the optimizer. Sums and tokens of all ranks."""
        world, total = ds.world_size(), None
        anchors = int(self.sampler.anchor_counts(step).sum())
        # DeepSpeed averages gradients over ranks and micro-batches: this makes it a mean over all anchors.
        scale = world * self.accumulate / max(1, anchors)
        for turn in range(self.accumulate):
            with self._timed("data"):
                batch = self.sampler.collate(step, self._members(turn)).to(self.base.device)
            with self._timed("base"):
                hidden, roots = base_features(self.base, batch, self.dtype, self.task.head)
            with self._timed("head"):
                loss, sums = self.engine(hidden, roots, batch)
            with self._timed("backward"):
                # A loss that is not finite makes the gradient so, and with it the norm that every rank sees.
                self.engine.backward(loss * torch.where(loss.isfinite(), scale, math.nan))
            with self._timed("optimizer"):
                if turn < self.accumulate - 1:
                    self.engine.step()
                else:
                    self.grad_norm = ds.step_with_norm(self.engine)
            total = sums if total is None else Sums(*(a + b for a, b in zip(total, sums, strict=True)))
        assert total is not None
        return _over_ranks(total), self.sampler.tokens(step)

    def _members(self, turn: int) -> slice:
        """Which of a step's sequences this rank has in its micro-batch of that number."""
        at = (turn * ds.world_size() + ds.rank()) * self.micro
        return slice(at, at + self.micro)

    def _row(self, step: int, sums: Sums, tokens: int, lr: float, seconds: float) -> dict[str, Any]:
        """The figures of a step, those left out that are not finite; shares of `seconds` since the last row."""
        loss, anchors, feasible = float(sums.loss), float(sums.anchors), float(sums.feasible)
        busy = sum(self.seconds.values()) or 1.0
        row = {
            "step": step,
            "train/loss": loss / max(1.0, feasible),
            "train/infeasible": 1 - feasible / max(1.0, anchors),
            "train/tokens": self.state.tokens + tokens,
            "train/skipped": self.state.skipped,
            "optim/lr": lr,
            "optim/grad_norm": self.grad_norm,
            "draft/psi_sum": float(sums.psi_U.sum()) / max(1.0, feasible),
            "perf/tokens_per_second": tokens / seconds,
            "perf/step_seconds": seconds,
            "perf/ranks": ds.world_size(),
            "perf/peak_memory_gb": _peak_gigabytes(self.base.device),
        }
        for t, sum_of_slot in enumerate(sums.blank_T.tolist()):
            row[f"draft/blank_rate/slot_{t + 1}"] = sum_of_slot / max(1.0, feasible)
        row |= {f"time/{part}": spent / busy for part, spent in sorted(self.seconds.items())}
        self.seconds.clear()
        return {key: value for key, value in row.items() if math.isfinite(value)}

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        pulse.moved(f"{part} of step {self.state.step + 1}")
        start = time.perf_counter()
        yield
        if self.base.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[part] += time.perf_counter() - start

    def _stop(self) -> bool:
        """Has any rank been asked to stop? Collective, so that all stop at the same step."""
        if ds.world_size() == 1:
            return self._stop_asked or self.finished()
        asked = torch.tensor([float(self._stop_asked)], device=self.base.device)
        seconds = torch.tensor([self.state.seconds], device=self.base.device)
        ds.sum_over_ranks(asked)
        ds.sum_over_ranks(seconds)  # ranks go by their mean clock: the time limit ends all at once
        self.state = replace(self.state, seconds=seconds.item() / ds.world_size())
        return asked.item() > 0 or self.finished()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: Any) -> None:
            self._stop_asked = True
            self.interrupted = number == signal.SIGINT

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _over_ranks(sums: Sums) -> Sums:
    flat = ds.sum_over_ranks(torch.cat([value.reshape(-1).float() for value in sums]))
    parts = flat.split([value.numel() for value in sums])
    return Sums(*(part.view_as(value) for part, value in zip(parts, sums, strict=True)))


def _peak_gigabytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
