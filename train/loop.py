"""The training loop: one optimizer step at a time, until done or stopped."""

import math
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tqdm import tqdm

from ctcdraft.data.features import Features
from ctcdraft.data.store import load_corpus
from ctcdraft.model.base.llm import Base
from ctcdraft.model.folders import write_atomically
from ctcdraft.model.heads import Head

from . import engine as ds
from .anomalies import AnomalyChecks
from .checkpoint import TrainState, load_checkpoint, save_checkpoint
from .dev import count_dev, dev_sequences
from .log import RunLog
from .step import Plan, Stepped, Stepper
from .watchdog import Watchdog


class Trainer:
    """One run: resumes where the run folder left off, trains, keeps the best head. start: what its head begins as."""

    def __init__(
        self,
        plan: Plan,
        base: Base,
        data_folder: Path,
        run_folder: Path,
        *,
        start: Head | None = None,
        features: Features | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.plan, self.base, self.watchdog = plan, base, watchdog
        self.checkpoints = run_folder / "checkpoints"
        self.seconds: dict[str, float] = defaultdict(float)  # since the last row, by part
        corpus = load_corpus(data_folder, "train")
        self.step = Stepper(plan, base, corpus, features, self._timed, start=start)
        self.dev = dev_sequences(data_folder, plan.train.max_length, plan.train.eval_anchors)
        self.state, self.best = load_checkpoint(self.step.engine, self.checkpoints)
        self.anomalies = AnomalyChecks(blanks=plan.head.topology.band is None)
        self.stopped_by: int | None = None  # a signal
        self.log: RunLog | None = None

    def close(self) -> None:
        """Give back the memory of its engine, which DeepSpeed's own hooks would hold as long as the process lives."""
        self.step.engine.destroy()

    def finished(self) -> bool:
        return self.plan.train.finished(self.state)

    def run(self, log: RunLog | None) -> TrainState:
        """Train to the end, the time limit or SIGTERM; a checkpoint is saved in each case."""
        state, train, self.log = self.state, self.plan.train, log
        saved = (state.step, state.best) if state.step else None
        if not any(end - start > 1 for known in self.dev for start, end in known.answers()):
            self._warn(["no development answer within train.max_length has two tokens: the last head is the best"])
        bar = tqdm(
            total=train.steps,
            initial=state.step,
            desc="training",
            unit="step",
            disable=ds.rank() > 0,
            mininterval=1,
        )
        with ExitStack() as handlers, bar:
            for number in (signal.SIGTERM, signal.SIGINT):
                handlers.callback(signal.signal, number, signal.signal(number, self._ask_to_stop))
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
                if state.step % train.save_every == 0:  # after the row: a kill between loses neither
                    saved = self._save()
            if self.finished() and not self._is_due():  # out of time between two evaluations
                self._evaluate()
            if saved != (state.step, state.best):
                self._save()
        self._doing("what follows training", limited=False)
        return state

    def probe(self, steps: int) -> float:
        """Seconds per step, the first few left out; trains on without a checkpoint or a log. Collective."""
        seconds = []
        for step in tqdm(range(steps), "probe", unit="step", mininterval=1, leave=False, disable=ds.rank() > 0):
            start = time.perf_counter()
            self.step(step)
            seconds.append(time.perf_counter() - start)
        settled = seconds[min(3, steps - 1) :]
        return sum(settled) / len(settled)

    def _one_step(self) -> dict[str, Any] | None:
        """One optimizer step; the row to log, where one is due."""
        state, train, start = self.state, self.plan.train, time.perf_counter()
        tokens, done = self.step.sampler.tokens(state.step), self.step(state.step)
        state.step, state.tokens = state.step + 1, state.tokens + tokens
        if math.isfinite(done.grad_norm):
            state.in_a_row = 0
        else:
            self._skipped()
        row = None
        if state.step % train.log_every == 0 or state.step == 1 or self._is_due():
            row = self._row(done, tokens, time.perf_counter() - start)
            if self._is_due():
                row["dev/tokens_per_step"] = self._evaluate()
        state.seconds += time.perf_counter() - start
        return row

    def _save(self) -> tuple[int, float]:
        """What is on the disk then: the step, and the best head's tokens per step. Collective."""
        self._doing(f"saving step {self.state.step}")
        save_checkpoint(self.step.engine, self.checkpoints, self.state, self.plan.train.keep, self.best)
        return self.state.step, self.state.best

    def _skipped(self) -> None:
        """The step was without an update: keep its batches. Raises ValueError on all ranks where too many were."""
        state, step = self.state, self.state.step
        state.skipped, state.in_a_row = state.skipped + 1, state.in_a_row + 1
        tensors: dict[str, torch.Tensor] = {}  # of each micro-batch in turn
        for turn in range(self.step.accumulate):
            for name, tensor in self.step.batch(step - 1, turn)._asdict().items():
                if tensor is not None:
                    tensors[f"{turn}.{name}"] = tensor.contiguous()
        skips = self.checkpoints.with_name("skipped")
        batches = save(tensors, {"step": str(step), "seed": str(self.plan.seed)})
        write_atomically(skips / f"step_{step:06d}_rank{ds.rank()}.safetensors", batches)
        self._warn([f"step {step} is skipped: its loss or gradient is not finite; its batch is in {skips}"])
        if state.in_a_row >= self.plan.train.max_skips:
            raise ValueError(
                f"{state.in_a_row} steps in a row, up to step {step}, gave a loss or gradient that is not finite: "
                f"lower optim.lr (now {self.plan.optim.lr}); their batches are in {skips}, and the checkpoint "
                f"before, if there is one, is in {self.checkpoints}"
            )

    def _warn(self, sentences: list[str]) -> None:
        if ds.rank() == 0:
            for sentence in sentences:
                tqdm.write(f"warning: {sentence}", file=sys.stderr)
                if self.log:
                    self.log.alert(sentence)

    def _is_due(self) -> bool:
        """Is the head evaluated after the step that is done?"""
        return self.state.step % self.plan.train.eval_every == 0 or self.state.step == self.plan.train.steps

    def _evaluate(self) -> float:
        """Tokens per step counted on development sequences; the best head is kept. Collective."""
        weights = ds.head_state(self.step.engine, self.step.task.head)
        with self._timed("evaluate"):
            self._doing(f"evaluating step {self.state.step}", limited=False)  # it takes as long as it takes
            tau = count_dev(self.base, self.plan.head, weights, self.dev)
        if tau >= self.state.best:  # of equals the one that is trained longest
            self.best = {name: w.cpu() for name, w in weights.items()} if ds.rank() == 0 else {}
            self.state.best, self.state.best_step = tau, self.state.step
        return tau

    def _row(self, done: Stepped, tokens: int, seconds: float) -> dict[str, Any]:
        """The figures of a step, those left out that are not finite; shares of `seconds` since the last row."""
        metrics = done.metrics
        anchors, feasible = max(1.0, float(metrics.anchors)), float(metrics.feasible)
        counted = max(1.0, feasible)
        busy = sum(self.seconds.values()) or 1.0
        row = {
            "step": self.state.step,
            "train/loss": float(metrics.loss) / counted,
            "train/infeasible": 1 - feasible / anchors,
            "train/tokens": self.state.tokens,
            "train/skipped": self.state.skipped,
            "optim/lr": done.rate,
            "optim/grad_norm": done.grad_norm,
            "draft/psi_sum": float(metrics.psi_U.sum()) / counted,
            "perf/tokens_per_second": tokens / seconds,
            "perf/step_seconds": seconds,
            "perf/ranks": ds.world_size(),
            "perf/peak_memory_gb": ds.peak_memory() / 2**30,
        }
        for t, blank in enumerate(metrics.blank_T.tolist()):
            row[f"draft/blank_rate/slot_{t + 1}"] = blank / counted
        row |= {f"time/{part}": spent / busy for part, spent in sorted(self.seconds.items())}
        self.seconds.clear()
        return {key: value for key, value in row.items() if math.isfinite(value)}

    def _doing(self, what: str, *, limited: bool = True) -> None:
        if self.watchdog:
            self.watchdog.moved(what, 60 * self.plan.train.hang_minutes if limited else None)

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

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        self.stopped_by = number
