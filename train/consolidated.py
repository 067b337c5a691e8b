"""What an engine has learnt, whole: weights and moments gathered from ZeRO's partitions, and put back onto any ranks.

Two engines that differ in ranks or ZeRO stage alone hold the same state in other pieces, so a run that is saved whole
goes on anywhere. Pieces are reached through DeepSpeed's functions for them (pinned version, tested).
"""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from ctcdraft.train.engine import rank, world_size, zero_stage
from ctcdraft.train.muon import Muon

UPDATES = "updates"  # how often the optimizer has stepped


def prepare_moments(engine: Any) -> None:
    """Give every stepped tensor the moments that its first step would: zeros. Call it once, on a fresh engine."""
    optimizer_of(engine).prepare()
    if zero_stage(engine) in (1, 2):
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def whole_state(engine: Any) -> dict[str, Tensor]:
    """fp32 weights and moments of every parameter (`weight/<name>`, `exp_avg/<name>`, ...) and the number of updates,
    on the CPU; rank 0 has all of it, the others nothing. Collective."""
    optimizer = optimizer_of(engine)
    first, _ = next(optimizer.stepped())
    found = {UPDATES: optimizer.state[first]["step"].clone()}
    for name, parameter in engine.module.named_parameters():
        for kind in _kinds(engine, name):
            value = _get(engine, parameter, kind)
            if rank() == 0:
                found[f"{kind}/{name}"] = value.detach().float().cpu().clone()
    return found if rank() == 0 else {}


def shapes_of(engine: Any) -> dict[str, torch.Size]:
    """Name and shape of all that `whole_state` gives."""
    named = engine.module.named_parameters()
    shapes = {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in named}  # ZeRO-3 leaves p itself empty
    every = {f"{kind}/{name}": shape for name, shape in shapes.items() for kind in _kinds(engine, name)}
    return every | {UPDATES: torch.Size([])}


def restore_state(engine: Any, state: dict[str, Tensor], step: int) -> None:
    """Put what `whole_state` gave, on rank 0, into a fresh engine of any ranks and stage; the next step is number
    `step` (from 0). It must have the shapes of `shapes_of`. Collective."""
    shapes, device = shapes_of(engine), next(engine.module.parameters()).device
    for name, parameter in engine.module.named_parameters():
        for kind in _kinds(engine, name):
            key = f"{kind}/{name}"
            _set(engine, parameter, kind, _spread(state.get(key), shapes[key], device))
    updates = _spread(state.get(UPDATES), shapes[UPDATES], device)
    optimizer = optimizer_of(engine)
    for stepped, _ in optimizer.stepped():
        optimizer.state[stepped]["step"].copy_(updates)
    _resume_schedule(engine.lr_scheduler, step)


def _resume_schedule(scheduler: Any, step: int) -> None:
    scheduler.last_epoch = step
    scheduler._step_count = step + 1
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def optimizer_of(engine: Any) -> Muon:
    """The optimizer within whatever DeepSpeed has put around it."""
    return engine.optimizer if zero_stage(engine) == 0 else engine.optimizer.optimizer


def _kinds(engine: Any, name: str) -> tuple[str, ...]:
    return "weight", *optimizer_of(engine).moments(name)


def _get(engine: Any, parameter: nn.Parameter, kind: str) -> Tensor:
    if zero_stage(engine) == 0:
        return parameter if kind == "weight" else engine.optimizer.state[parameter][kind]
    if kind == "weight":
        return safe_get_full_fp32_param(parameter)
    return safe_get_full_optimizer_state(parameter, kind)


def _set(engine: Any, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
    stage = zero_stage(engine)
    if kind == "weight":
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3), torch.no_grad():
            parameter.copy_(value)  # what the forward sees; ZeRO steps on an fp32 copy of its own
    if stage == 0 and kind != "weight":
        engine.optimizer.state[parameter][kind].copy_(value)
    elif stage == 3:
        _set_partition(parameter, kind, value)
    elif stage and kind == "weight":
        safe_set_full_fp32_param(parameter, value)
    elif stage:
        safe_set_full_optimizer_state(parameter, value, kind)


def _set_partition(parameter: Any, kind: str, value: Tensor) -> None:
    """ZeRO-3 gives every rank an equal share of a parameter, the last ones filled up with zeros."""
    share = parameter.ds_tensor.ds_numel
    padded = torch.zeros(share * world_size(), dtype=value.dtype, device=value.device)
    padded[: value.numel()] = value.flatten()
    mine = padded[share * rank() : share * (rank() + 1)]
    if kind == "weight":
        safe_set_local_fp32_param(parameter, mine)
    else:
        safe_set_local_optimizer_state(parameter, mine, kind)


def _spread(value: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    """Rank 0's tensor on every rank: only its host needs to have the file."""
    held = torch.empty(shape, device=device) if value is None else value.to(device)
    if world_size() > 1:
        dist.broadcast(held, src=0)
    return held
