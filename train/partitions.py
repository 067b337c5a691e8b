"""Which shares of which parameters the flat tensors are that ZeRO's optimizers step on (DeepSpeed's pinned version).

Stages 1 and 2 lay a group's parameters end to end and give every rank one stretch of that. Stage 3 gives every rank a
stretch of each parameter, the last ones filled up with zeros, and lays a rank's stretches end to end.

Shape suffixes: R ranks, P numbers of a flat tensor.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Place(NamedTuple):
    """A parameter of this shape begins at `start`; stretch: how much of it each rank has (stage 3), else None."""

    shape: torch.Size
    start: int
    stretch: int | None


class Partition(NamedTuple):
    """What one flat tensor is: rank r's row of [R, P], in which parameters of one group lie at their places."""

    group: int
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


class Whole:
    """In a partition's place where a parameter is stepped on as it is."""

    def whole(self, mine: Tensor) -> list[Tensor]:
        return [mine]

    def share(self, values: Sequence[Tensor], like: Tensor) -> Tensor:
        return values[0]


WHOLE = Whole()


def partitions(engine: Any) -> Iterator[tuple[Tensor, Partition]]:
    """The flat tensors that an engine's optimizer steps on, and what they are; none without ZeRO."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage in (1, 2):
        for i, (flat, group, starts) in enumerate(
            zip(
                zero.single_partition_of_fp32_groups,
                zero.round_robin_bit16_groups,
                zero.round_robin_bit16_offsets,
                strict=True,
            )
        ):
            places = [Place(p.shape, start, None) for p, start in zip(group, starts, strict=True)]
            yield flat, Partition(i, places, engine.device)
    elif stage == 3:
        for i, (flat, group) in enumerate(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)):
            start, places = 0, []
            for p in group:
                places.append(Place(p.ds_shape, start, p.partition_numel()))
                start += p.partition_numel()
            yield flat, Partition(zero.sub_group_to_group_id[i], places, engine.device)


def _region(every_RP: Tensor, place: Place) -> Tensor:
    """The numbers of a parameter within all ranks' shares, a view."""
    if place.stretch is None:
        return every_RP.view(-1)[place.start : place.start + place.shape.numel()]
    return every_RP[:, place.start : place.start + place.stretch]
