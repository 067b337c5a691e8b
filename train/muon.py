"""Muon: momentum whose matrix update is made orthogonal (Jordan et al. 2024), in float32.

For a small base on a short budget it reaches a loss for which AdamW needs more than twice the tokens.
`torch.optim.Muon` works in bfloat16, which is some fifteen times slower on CPUs without bfloat16 units.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that drives singular values towards one
ITERATIONS = 5
ADAM_RMS = 0.2  # scales updates to the size that AdamW's have, so that learning rates compare


class Muon(torch.optim.Optimizer):
    """For weight matrices only; embeddings and norms belong to AdamW."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates = orthogonal(torch.stack([self._momentum(m, group["momentum"]) for m in matrices]))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-group["lr"] * ADAM_RMS * max(shape) ** 0.5)

    def _momentum(self, matrix: Tensor, decay: float) -> Tensor:
        """Nesterov's look-ahead of the running mean of gradients."""
        state = self.state[matrix]
        assert matrix.grad is not None
        if "mean" not in state:
            state["mean"] = torch.zeros_like(matrix)
        state["mean"].lerp_(matrix.grad, 1 - decay)
        return matrix.grad.lerp(state["mean"], decay)


def orthogonal(matrices_BMN: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values near one (about 0.7 to 1.2)."""
    a, b, c = NEWTON_SCHULZ
    x = matrices_BMN / (matrices_BMN.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
