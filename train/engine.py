"""DeepSpeed: ranks, precision, ZeRO, accumulation and clipping around one DraftTask."""

import importlib
import logging
import math
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU

import deepspeed
from pydantic import Field
from torch import Tensor

from ctcdraft.model.heads import Head, parameters_of

from .task import DraftTask, adamw
from .watchdog import DEAD_SECONDS, Watchdog
from .zero import optimizer_of, start_moments

Made = TypeVar("Made")
Positive = Annotated[float, Field(gt=0, lt=math.inf)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what every generator takes
PATIENCE = timedelta(hours=24)  # of ranks for each other: the watchdog knows sooner who is lost
BUCKET = 50_000_000  # gradients that ZeRO sums over ranks at a time, unless the head has fewer


@dataclass(frozen=True)
class OptimConfig:
    lr: Positive = 1e-3  # highest learning rate of AdamW
    weight_decay: Annotated[float, Field(ge=0, lt=math.inf)] = 0.01  # of all trained parameters
    # decay of its two moments
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = field(default_factory=lambda: [0.9, 0.95])
    warmup: Share = 0.05  # share of the steps in which lr rises
    floor: Annotated[float, Field(ge=0, le=1)] = 0.02  # lr ends, as a cosine, at floor * lr
    clip: Positive = 1.0  # largest norm of the gradient


@dataclass(frozen=True)
class ZeroConfig:
    # ZeRO: 0: none; shared out over ranks: 1: optimizer, 2: and gradients, 3: and parameters
    stage: Literal[0, 1, 2, 3] = 0
    offload: bool = False  # optimizer (and at 3 parameters) to the CPU

    def __post_init__(self) -> None:
        if self.offload and self.stage == 0:
            raise ValueError("zero.offload=true needs zero=1, 2 or 3")


def init_distributed() -> None:
    """Join the ranks that a launcher started, or be the only one. Call it once, before anything else."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free one
    skip_builds()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif world_size() > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size()))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(backend, verbose=False, timeout=PATIENCE, init_method="ctcdraft://")


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """torch's `env://`, but that each group of a sweep's jobs has names of its own: a rank that is at the next job
    before rank 0, which evaluates, would find its old addresses there, and wait for nobody."""
    yield dist.PrefixStore(f"group {next(_groups)}", _meeting_place()), rank(), world_size()


@cache
def _meeting_place() -> dist.Store:
    """The launcher's store, or one of rank 0 that lives as long as its process."""
    return next(dist.rendezvous("env://", timeout=PATIENCE))[0]


_groups = count()
dist.register_rendezvous_handler("ctcdraft", _rendezvous)


def take_threads_of_all() -> None:
    """The threads of all ranks of this machine, for the one that is left at work."""
    if not torch.cuda.is_available():
        torch.set_num_threads(torch.get_num_threads() * local_world_size())


@contextmanager
def together() -> Iterator[Watchdog]:
    """All that the ranks do together. Where one of them fails, dies or hangs, all end, with 1, and say what failed
    first (watchdog.py)."""
    init_distributed()
    watchdog = Watchdog(rank(), world_size(), socket.gethostname(), _shared_store())
    watchdog.start()
    barrier()
    try:
        yield watchdog
    except Exception as error:
        if world_size() > 1:
            watchdog.failed(error)
        watchdog.stop()
        raise
    barrier()
    watchdog.stop()
    barrier()  # a process that ends with its group still open can abort in gloo's threads, and fail the others
    deepspeed.comm.destroy_process_group()  # with what DeepSpeed remembers of it


def _shared_store() -> dist.Store:
    """A store on rank 0, for the watchdog alone: another thread uses it while this one is in a collective."""
    if world_size() == 1:
        return dist.HashStore()
    host, wait = os.environ["MASTER_ADDR"], timedelta(seconds=DEAD_SECONDS)
    mine = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait) if rank() == 0 else None
    port = from_rank_zero(lambda: cast(dist.TCPStore, mine).port)
    return mine or dist.TCPStore(host, port, is_master=False, timeout=wait)


def peak_memory() -> int:
    """Bytes that this process has held at most: on its GPU, or without one at all."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")  # on Linux; `ru_maxrss` has what the process that started this one held, too
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])  # type: ignore[index]
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def build_engine(
    task: DraftTask,
    optim: OptimConfig,
    zero: ZeroConfig,
    *,
    precision: str,
    micro: int,
    accumulate: int,
) -> Any:
    """The DeepSpeed engine around a task. bf16 without ZeRO runs as stage 1, which keeps fp32 masters."""
    stage = max(zero.stage, 1) if precision == "bf16" else zero.stage
    betas = optim.betas[0], optim.betas[1]
    optimizer = adamw(task.parameters(), optim.lr, betas, optim.weight_decay)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": optim.clip if stage else 0.0,  # at stage 0 `step_with_norm` clips
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True},  # else NaN would be stepped on
        "zero_force_ds_cpu_optimizer": False,
        # a buffer that every rank keeps; DeepSpeed's own is 2 GB, whatever it trains
        "zero_optimization": {"stage": stage, "reduce_bucket_size": min(BUCKET, parameters_of(task))},
    }
    if zero.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(model=task, optimizer=optimizer, config=config)
    if stage == 3 and task.vocabulary.output.requires_grad:  # a weight of the head that the task's own forward uses
        deepspeed.zero.register_external_parameter(task, task.vocabulary.output)
    start_moments(engine)
    return engine


def set_rate(engine: Any, optim: OptimConfig, step: int, steps: int) -> float:
    """Set, and return, the learning rate of a step (from 0): linear warm-up, then a cosine to the floor."""
    warm = max(1, round(optim.warmup * steps))
    done = min(1.0, (step - warm) / max(1, steps - warm))
    falling = optim.floor + (1 - optim.floor) * 0.5 * (1 + math.cos(math.pi * done))
    rate = optim.lr * ((step + 1) / warm if step < warm else falling)
    for group in optimizer_of(engine).param_groups:
        group["lr"] = rate
    return rate


def head_state(engine: Any, head: Head) -> dict[str, Tensor]:
    """A copy of the head's whole weights, gathered where ZeRO-3 has scattered them. Collective."""
    with deepspeed.zero.GatheredParameters(list(head.parameters()), enabled=engine.zero_optimization_stage() == 3):
        return {name: p.detach().clone() for name, p in head.state_dict().items()}


def step_with_norm(engine: Any, clip: float) -> float:
    """The optimizer step of the last micro-batch; the gradient's norm over all parameters, before clipping to `clip`.

    Where the norm is not finite no rank changes a weight or a moment: the norm is that of all ranks together, so all of
    them decide alike.
    """
    if engine.zero_optimization_stage() == 0:  # DeepSpeed clips without a word on the norm, and steps whatever it is
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), clip)
        if not norm.isfinite():
            engine.zero_grad()  # a step without gradients changes nothing
        engine.step()
        return float(norm)
    engine.step()
    return math.inf if engine.optimizer.overflow else float(engine.get_global_grad_norm())


def from_rank_zero(make: Callable[[], Made]) -> Made:
    """What `make` gives on rank 0, or the ValueError that it raises there, on every rank. Collective."""
    outcome: list[Any] = [None]
    if rank() == 0:
        try:
            outcome = [make()]
        except ValueError as error:
            outcome = [error]
    if world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    return outcome[0]


def make_deterministic(seed: int) -> None:
    """Same seed, same machine, same ranks: the same bits. Call it before anything runs on a GPU.

    torch then refuses, with an error that names it, any operation that has no deterministic form.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Element-wise sum over all ranks, in place. Collective."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def skip_builds() -> None:
    """DeepSpeed compiles a shared-memory operator for CPU ranks at start: over a minute, and a build that
    is killed leaves a lock that hangs the next run. gloo does without. Where it shares anything out it imports Muon,
    which nothing here uses, and for that torch's compiler: two seconds."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # the attribute of that name is torch itself
    backend.build_shm_op = lambda: None
    backend.compiler.compile = lambda: lambda function: function
