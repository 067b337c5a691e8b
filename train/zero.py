"""The whole state of an engine (weights and moments), gathered from ZeRO's shards, and put back onto any ranks.

An optimizer steps on flat tensors under ZeRO. Stages 1 and 2 lay a group's parameters end to end and give every rank
one stretch of that. Stage 3 gives every rank a stretch of each parameter, the last ones filled up with zeros, and lays
a rank's stretches end to end (DeepSpeed's pinned version, tested). Engines that differ in ranks or stage alone hold the
same state in other pieces, so a run that is saved whole goes on anywhere.

Shape suffixes: R ranks, P numbers of a flat tensor.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

UPDATES = "updates"  # how often the optimizer has stepped


class Place(NamedTuple):
    """A parameter begins at `start`; stretch: how much of it each rank has (stage 3), else None."""

    name: str
    shape: torch.Size
    start: int
    stretch: int | None


class Shard(NamedTuple):
    """What one flat tensor is: rank r's row of [R, P], in which parameters lie at their places."""

    places: Sequence[Place]
    device: torch.device

    def whole(self, mine_P: Tensor) -> list[Tensor]:
        """The parameters' values, from every rank's share of them. Collective."""
        every = torch.empty(dist.get_world_size() * len(mine_P), dtype=mine_P.dtype, device=self.device)
        dist.all_gather_into_tensor(every, mine_P.to(self.device))
        every_RP = every.view(-1, len(mine_P))
        return [_region(every_RP, place).flatten()[: place.shape.numel()].view(place.shape) for place in self.places]

    def share(self, values: Sequence[Tensor], like_P: Tensor) -> Tensor:
        """This rank's share of the parameters' values: `whole` the other way round."""
        every_RP = torch.zeros(dist.get_world_size(), len(like_P), dtype=like_P.dtype, device=self.device)
        for place, value in zip(self.places, values, strict=True):
            region = _region(every_RP, place)
            filling = region.numel() - value.numel()
            region.copy_(F.pad(value.flatten(), (0, filling)).view_as(region))
        return every_RP[dist.get_rank()].to(like_P.device)


class Whole(NamedTuple):
    """In a shard's place where a parameter is stepped on as it is."""

    places: Sequence[Place]

    def whole(self, mine: Tensor) -> list[Tensor]:
        return [mine]

    def share(self, values: Sequence[Tensor], like: Tensor) -> Tensor:
        return values[0]


def shards(engine: Any) -> Iterator[tuple[Tensor, Shard | Whole]]:
    """What an engine's optimizer steps on, and what it is."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    names = {p: name for name, p in engine.module.named_parameters()}
    if stage == 0:
        for group in zero.param_groups:
            yield from ((p, Whole([Place(names[p], p.shape, 0, None)])) for p in group["params"])
    elif stage == 3:
        for flat, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
            start, places = 0, []
            for p in group:
                places.append(Place(names[p], p.ds_shape, start, p.partition_numel()))
                start += p.partition_numel()
            yield flat, Shard(places, engine.device)
    else:
        flats, groups, starts = (
            zero.single_partition_of_fp32_groups,
            zero.round_robin_bit16_groups,
            zero.round_robin_bit16_offsets,
        )
        for flat, group, begins in zip(flats, groups, starts, strict=True):
            places = [Place(names[p], p.shape, start, None) for p, start in zip(group, begins, strict=True)]
            yield flat, Shard(places, engine.device)


def start_moments(engine: Any) -> None:
    """Give AdamW the state that its first step would: zeros, which a checkpoint then replaces."""
    state = optimizer_of(engine).state
    for stepped, _ in shards(engine):
        moments = {kind: torch.zeros_like(stepped) for kind in ("exp_avg", "exp_avg_sq")}
        state[stepped] = {"step": torch.tensor(0.0), **moments}


def whole_state(engine: Any) -> dict[str, Tensor]:
    """fp32 weights and moments of every parameter (`weight/<name>`, `exp_avg/<name>`, ...) and the number of updates,
    on the CPU; rank 0 has all of it, the others nothing. Collective."""
    found = {}
    for kind, mine, shard in _pieces(engine):
        for place, value in zip(shard.places, shard.whole(mine.detach()), strict=True):
            if dist.get_rank() == 0:
                found[f"{kind}/{place.name}"] = value.float().cpu().clone()
    return found | {UPDATES: _updates(engine)[0].clone()} if found else {}


def shapes_of(engine: Any) -> dict[str, torch.Size]:
    """Name and shape of all that `whole_state` gives."""
    every = {f"{kind}/{place.name}": place.shape for kind, _, shard in _pieces(engine) for place in shard.places}
    return every | {UPDATES: torch.Size([])}


@torch.no_grad()
def restore_state(engine: Any, state: dict[str, Tensor], step: int) -> None:
    """Put what `whole_state` gave, on rank 0, into a fresh engine of any ranks and stage; the next step is number
    `step` (from 0). It must have the shapes of `shapes_of`. Collective."""
    wanted, stage = shapes_of(engine), engine.zero_optimization_stage()

    def spread(key: str) -> Tensor:
        """Rank 0's tensor on every rank: only its host needs to have the file."""
        value = state[key].to(engine.device) if key in state else torch.empty(wanted[key], device=engine.device)
        if dist.get_world_size() > 1:
            dist.broadcast(value, src=0)
        return value

    for kind, mine, shard in _pieces(engine):
        mine.copy_(shard.share([spread(f"{kind}/{place.name}") for place in shard.places], mine))
    for name, parameter in engine.module.named_parameters():  # what the forward sees, beside ZeRO's fp32 copy
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3):
            parameter.copy_(spread(f"weight/{name}"))
    updates = spread(UPDATES)
    for count in _updates(engine):
        count.copy_(updates)
    scheduler = engine.lr_scheduler
    scheduler.last_epoch, scheduler._step_count = step - 1, step + 2  # the first step of all, it would warn of
    scheduler.step()


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """The optimizer within whatever DeepSpeed has put around it."""
    return engine.optimizer if engine.zero_optimization_stage() == 0 else engine.optimizer.optimizer


def _pieces(engine: Any) -> Iterator[tuple[str, Tensor, Shard | Whole]]:
    """(kind, this rank's numbers, of which parameters): weights, then the moments that `start_moments` made."""
    state = optimizer_of(engine).state
    for stepped, shard in shards(engine):
        yield "weight", stepped, shard
        yield from ((kind, value, shard) for kind, value in state[stepped].items() if kind != "step")


def _updates(engine: Any) -> list[Tensor]:
    return [optimizer_of(engine).state[stepped]["step"] for stepped, _ in shards(engine)]


def _region(every_RP: Tensor, place: Place) -> Tensor:
    """The numbers of a parameter within all ranks' shares, a view."""
    if place.stretch is None:
        return every_RP.view(-1)[place.start : place.start + place.shape.numel()]
    return every_RP[:, place.start : place.start + place.stretch]
