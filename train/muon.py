"""Muon: momentum whose matrix update is made orthogonal (Jordan et al. 2024), beside AdamW for all that is no matrix.

It works on whole matrices. Under ZeRO an optimizer steps on flat shares of them, so the update is gathered, made
orthogonal, and this rank's share of it taken (train/zero.py); ranks divide the work. Of the libraries' own,
`torch.optim.Muon` knows no ZeRO and works in bfloat16, some fifteen times slower on CPUs without bfloat16 units, and
DeepSpeed's measures and clips the gradient's norm after it was made orthogonal.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ctcdraft.train.zero import Shard, Whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that drives singular values towards one
ITERATIONS = 5
ADAM_RMS = 0.2  # scales updates to the size that AdamW's have, so that learning rates compare (Liu et al. 2025, 2.2)


class Muon(torch.optim.AdamW):
    """Muon for the named matrices [..., m, n], AdamW for the other parameters.

    matrix_lr: that of the matrices, if it is another. shards: what the tensors that are stepped on are, where ZeRO has
    put flat ones in the parameters' place. among_ranks: all ranks step together, and each makes a part
    of the matrices orthogonal for all. skips: leave everything as it is.
    """

    def __init__(
        self,
        matrices: dict[str, Tensor],
        others: Iterable[Tensor],
        lr: float,
        *,
        matrix_lr: float | None = None,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [*others], "orthogonal": False},
            {"params": [*matrices.values()], "orthogonal": True, "lr": lr if matrix_lr is None else matrix_lr},
        ]
        filled = [group for group in groups if group["params"]]
        super().__init__(filled, lr=lr, betas=betas, weight_decay=weight_decay)
        self.momentum = momentum
        self.shards: dict[Tensor, Shard | Whole] = {}
        self.among_ranks = self.skips = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all that has a gradient. Collective under ZeRO and among ranks."""
        if self.skips:
            return
        groups = self.param_groups  # ZeRO steps group by group: the others are not there, or empty
        self.param_groups = [group for group in groups if group["params"] and not group["orthogonal"]]
        if self.param_groups:
            super().step()
        self.param_groups = groups
        for group in groups:
            if group["orthogonal"] and group["params"]:
                self._orthogonal_step(group)

    def prepare(self) -> None:
        """Give all that is stepped on the state that its first step would: zeros."""
        whole = {p: Whole(i) for i, group in enumerate(self.param_groups) for p in group["params"]}
        for p, shard in (self.shards or whole).items():
            self._prepare(p, self.param_groups[shard.group]["orthogonal"])

    def _prepare(self, p: Tensor, is_orthogonal: bool) -> None:
        moments = ("exp_avg",) if is_orthogonal else ("exp_avg", "exp_avg_sq")
        self.state[p] = {"step": torch.tensor(0.0), **{key: torch.zeros_like(p) for key in moments}}

    def _orthogonal_step(self, group: dict[str, Any]) -> None:
        stepped = [(p, self.shards.get(p, Whole(0))) for p in group["params"] if p.grad is not None]
        momenta = [shard.whole(self._looked_ahead(p)) for p, shard in stepped]
        updates = iter(updates_of([*chain(*momenta)], self.among_ranks))
        for (p, shard), matrices in zip(stepped, momenta, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(shard.share([*islice(updates, len(matrices))], p), alpha=-group["lr"])

    def _looked_ahead(self, p: Tensor) -> Tensor:
        """Nesterov's look-ahead of the running mean of gradients."""
        if p not in self.state:
            self._prepare(p, True)
        state = self.state[p]
        assert p.grad is not None
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 1 - self.momentum)
        return p.grad.lerp(state["exp_avg"], self.momentum)


def matrices_of(module: nn.Module) -> dict[str, Tensor]:
    """The trained weights that Muon is for: what multiplies a vector from both sides; no bias, norm or embedding."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    weights = {name: p for name, p in module.named_parameters() if name.endswith("weight") and id(p) not in tables}
    return {name: p for name, p in weights.items() if p.requires_grad and p.ndim >= 2 and min(p.shape[-2:]) > 1}


def orthogonal(matrices_BMN: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values near one (about 0.7 to 1.2); in bfloat16 on GPUs."""
    a, b, c = NEWTON_SCHULZ
    x = matrices_BMN / (matrices_BMN.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).to(torch.bfloat16 if x.is_cuda else x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices_BMN.dtype)


def updates_of(momenta: Sequence[Tensor], among_ranks: bool = False) -> list[Tensor]:
    """Momenta [..., m, n] made orthogonal, at the size that AdamW's updates have.

    among_ranks: every rank has the same momenta and does its part of the matrices. Collective; all get the same bits.
    """
    if not momenta:
        return []
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if among_ranks else (0, 1)
    sizes = [momentum.numel() for momentum in momenta]
    flat = torch.zeros(sum(sizes), dtype=momenta[0].dtype, device=momenta[0].device)
    updates = [part.view(momentum.shape) for part, momentum in zip(flat.split(sizes), momenta, strict=True)]
    pairs = [*zip(chain(*map(_single, momenta)), chain(*map(_single, updates)), strict=True)]
    for momentum, update in pairs[rank::ranks]:
        torch.mul(orthogonal(momentum.unsqueeze(0))[0], ADAM_RMS * max(momentum.shape) ** 0.5, out=update)
    if ranks > 1:
        dist.all_reduce(flat)  # a sum with zeros
    return updates


def _single(matrices: Tensor) -> tuple[Tensor, ...]:
    """Views [m, n] of matrices [..., m, n]."""
    return matrices.reshape(-1, *matrices.shape[-2:]).unbind()
