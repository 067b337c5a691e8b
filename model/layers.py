"""The transformer blocks that heads are built from.

Shape suffixes: B batch, L positions, W width, H attention heads, S positions attended to.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 10_000.0


@dataclass
class KeyValues:
    """Keys and values of one causal block at inference: preallocated, `length` of them in use."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            grown = max(end, 2 * self.keys.shape[2])
            self.keys, self.values = _grown(self.keys, grown), _grown(self.values, grown)
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def _grown(tensor: Tensor, length: int) -> Tensor:
    out = tensor.new_zeros(*tensor.shape[:2], length, tensor.shape[3])
    out[:, :, : tensor.shape[2]] = tensor
    return out


class Block(nn.Module):
    """Pre-norm attention and SwiGLU. causal=True: rotary positions and an optional cache; else all to all."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        assert width % (2 * heads) == 0
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        inner = -(-8 * width // 3 // 16) * 16
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def new_cache(self, capacity: int) -> KeyValues:
        like = self.out.weight
        shape = (1, self.heads, capacity, like.shape[0] // self.heads)
        return KeyValues(like.new_zeros(shape), like.new_zeros(shape))

    def forward(self, x_BLW: Tensor, cache: KeyValues | None = None, mask: Tensor | None = None) -> Tensor:
        """mask: [B, 1, L, L], added to the attention; None: causal (or all to all)."""
        x_BLW = x_BLW + self._attend(self.attention_norm(x_BLW), cache, mask)
        gate, up = self.gate_up(self.mlp_norm(x_BLW)).chunk(2, dim=-1)
        return x_BLW + self.down(F.silu(gate) * up)

    def _attend(self, x_BLW: Tensor, cache: KeyValues | None, mask: Tensor | None) -> Tensor:
        B, L, W = x_BLW.shape
        q, k, v = self.qkv(x_BLW).view(B, L, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        if self.causal:
            past = 0 if cache is None else cache.length
            cos, sin = _rotary(past, L, W // self.heads, x_BLW)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
            if L > 1 and past:
                mask = torch.ones(L, past + L, dtype=torch.bool, device=x_BLW.device).tril(past)
        whole = self.causal and L > 1 and mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole)
        return self.out(y.transpose(1, 2).reshape(B, L, W))


def _rotary(start: int, length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    frequency = ROPE_BASE ** (-torch.arange(0, width, 2, device=like.device).float() / width)
    angle = torch.arange(start, start + length, device=like.device).float()[:, None] * frequency
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
