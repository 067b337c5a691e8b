"""The whole state of an engine (weights and moments), gathered from ZeRO's shards, and put back onto any ranks.

Under ZeRO an optimizer steps on flat shares of the parameters, and DeepSpeed knows what they are shares of.
"""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS: dict[str, str | None] = {"weight": None, **{kind: kind for kind in MOMENTS}}  # and DeepSpeed's keys for them
UPDATES = "updates"  # how often the optimizer has stepped


def start_moments(engine: Any) -> None:
    """Give AdamW the state that its first step would: zeros, which a checkpoint then replaces."""
    optimizer, stage = optimizer_of(engine), engine.zero_optimization_stage()
    if stage == 3:
        stepped = engine.optimizer.fp32_partitioned_groups_flat
    else:  # the parameters, or at stages 1 and 2 this rank's flat shares of them
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
    for p in stepped:
        moments = {kind: torch.zeros_like(p) for kind in MOMENTS}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    if stage in (1, 2):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # which its first step would


def whole_state(engine: Any) -> dict[str, Tensor]:
    """fp32 weights and moments of every parameter (`weight/<name>`, `exp_avg/<name>`, ...) and the number of updates,
    on the CPU; rank 0 has all of it, the others nothing. Collective."""
    found, sharded = {}, engine.zero_optimization_stage() > 0
    for name, p in engine.module.named_parameters():
        for kind in KINDS:
            if sharded:
                value = safe_get_full_optimizer_state(p, KINDS[kind])
            else:
                value = p if kind == "weight" else engine.optimizer.state[p][kind]
            if dist.get_rank() == 0:
                found[f"{kind}/{name}"] = value.detach().float().cpu().clone()
    updates = next(iter(optimizer_of(engine).state.values()))["step"]
    return found | {UPDATES: updates.clone()} if found else {}


def shapes_of(engine: Any) -> dict[str, torch.Size]:
    """Name and shape of all that `whole_state` gives."""
    shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in engine.module.named_parameters()}
    return {f"{kind}/{name}": shape for name, shape in shapes.items() for kind in KINDS} | {UPDATES: torch.Size([])}


@torch.no_grad()
def restore_state(engine: Any, state: dict[str, Tensor]) -> None:
    """Put what `whole_state` gave, on rank 0, into a fresh engine of any ranks and stage. It must have the shapes of
    `shapes_of`. Collective."""
    wanted, stage, ranks = shapes_of(engine), engine.zero_optimization_stage(), dist.get_world_size()

    def spread(key: str) -> Tensor:
        """Rank 0's tensor on every rank: only its host needs to have the file."""
        value = state[key].to(engine.device) if key in state else torch.empty(wanted[key], device=engine.device)
        dist.broadcast(value, src=0)
        return value

    for name, p in engine.module.named_parameters():
        whole = {kind: spread(f"{kind}/{name}") for kind in KINDS}
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0, enabled=stage == 3):
            p.copy_(whole["weight"])  # what the forward sees; under ZeRO there is an fp32 copy beside it
        for kind, value in whole.items():
            if stage == 3:  # whose setter of whole values wants them to divide by the ranks
                size = p.partition_numel()
                padded = F.pad(value.flatten(), (0, size * ranks - value.numel()))
                safe_set_local_optimizer_state(p, padded[size * dist.get_rank() :][:size], KINDS[kind])
            elif stage > 0:
                safe_set_full_optimizer_state(p, value, KINDS[kind])
            elif kind in MOMENTS:
                engine.optimizer.state[p][kind].copy_(value)
    updates = spread(UPDATES)
    for moments in optimizer_of(engine).state.values():
        moments["step"].copy_(updates)


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """The optimizer within whatever DeepSpeed has put around it."""
    return engine.optimizer if engine.zero_optimization_stage() == 0 else engine.optimizer.optimizer
