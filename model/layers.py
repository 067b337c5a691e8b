"""The transformer blocks that heads are built from.

Shape suffixes: B batch, L positions, W width, H attention heads, S positions attended to.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

ROPE_BASE = 10_000.0


class Sight(NamedTuple):
    """Where rows stand, and which of the cached and new entries they see.

    positions [B, L] (or [1, L]); mask [B, 1, L, S], True where a row may look, or None: at itself and those before it.
    """

    positions_BL: Tensor
    mask_BLS: Tensor | None = None

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as numbers to add, for a base: its eager attention takes boolean masks for numbers, silently."""
        if self.mask_BLS is None:
            return None
        return torch.zeros_like(self.mask_BLS, dtype=dtype).masked_fill_(~self.mask_BLS, torch.finfo(dtype).min)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU. With a Sight: rotary positions and an optional cache; without: all to all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        assert width % (2 * heads) == 0
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        inner = -(-8 * width // 3 // 16) * 16
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BLW: Tensor, sight: Sight | None = None, cache: Cache | None = None, layer: int = 0) -> Tensor:
        x_BLW = x_BLW + self._attend(self.attention_norm(x_BLW), sight, cache, layer)
        gate, up = self.gate_up(self.mlp_norm(x_BLW)).chunk(2, dim=-1)
        return x_BLW + self.down(F.silu(gate) * up)

    def _attend(self, x_BLW: Tensor, sight: Sight | None, cache: Cache | None, layer: int) -> Tensor:
        B, L, W = x_BLW.shape
        q, k, v = self.qkv(x_BLW).view(B, L, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        mask, causal = None, False
        if sight is not None:
            cos, sin = _rotary(sight.positions_BL, W // self.heads, x_BLW.dtype)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            mask, causal = sight.mask_BLS, sight.mask_BLS is None and L > 1
        if cache is not None:
            k, v = cache.update(k, v, layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(B, L, W))


def _rotary(positions_BL: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequency = ROPE_BASE ** (-torch.arange(0, width, 2, device=positions_BL.device).float() / width)
    angle = positions_BL[:, None, :, None].float() * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
