"""The transformer block that heads are built from, and what its rows see.

Shape suffixes: B batch, L positions, W width, H attention heads, S positions attended to, N anchors.
"""

from collections.abc import Sequence
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

    @staticmethod
    def one_document(x_BLD: Tensor) -> "Sight":
        """Rows of one document each, from its beginning."""
        return Sight(torch.arange(x_BLD.shape[1], device=x_BLD.device).unsqueeze(0))

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as numbers to add, for a base: its eager attention takes boolean masks for numbers, silently."""
        if self.mask_BLS is None:
            return None
        return torch.zeros_like(self.mask_BLS, dtype=dtype).masked_fill_(~self.mask_BLS, torch.finfo(dtype).min)

    def position_of(self, anchors: "Anchors", rows: int) -> Tensor:
        """Where each anchor stands [N], of that many rows."""
        return anchors.own(self.positions_BL.expand(rows, -1))

    def seen_by(self, anchors: "Anchors", rows: int, entries: int) -> Tensor:
        """Which of so many entries each anchor sees [N, S]."""
        if self.mask_BLS is None:
            position_N = self.position_of(anchors, rows)
            return torch.arange(entries, device=position_N.device) <= position_N.unsqueeze(1)
        return anchors.own(self.mask_BLS[:, 0, :, :entries].expand(rows, -1, -1))


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
        qkv = self.qkv(x_BLW).view(B, L, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        qk, v = qkv[:2], qkv[2]
        mask, causal = None, False
        if sight is not None:
            qk = _rotate(qk, *_rotary(sight.positions_BL, W // self.heads, x_BLW.dtype))
            mask, causal = sight.mask_BLS, sight.mask_BLS is None and L > 1
        q, k = qk.unbind()
        if cache is not None:
            k, v = cache.update(k, v, layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(B, L, W))


class Anchors(NamedTuple):
    """Positions that are drafted from: position[n] of row batch[n], the place[n]-th of at most `most` anchors there;
    one_each: anchor n is the only one of row n."""

    batch_N: Tensor
    position_N: Tensor
    place_N: Tensor
    most: int
    one_each: bool = False

    @staticmethod
    def of(batch_N: Tensor, position_N: Tensor) -> "Anchors":
        counts_B = torch.bincount(batch_N, minlength=1)
        order_N = batch_N.argsort(stable=True)
        sorted_N = torch.arange(len(batch_N), device=batch_N.device)
        sorted_N = sorted_N - (counts_B.cumsum(0) - counts_B)[batch_N[order_N]]
        place_N = torch.empty_like(sorted_N).index_put((order_N,), sorted_N)
        return Anchors(batch_N, position_N, place_N, max(1, int(counts_B.max())))

    @staticmethod
    def one_per_row(position_B: Tensor) -> "Anchors":
        """Without a wait for the device."""
        rows_B = torch.arange(len(position_B), device=position_B.device)
        return Anchors(rows_B, position_B, torch.zeros_like(rows_B), 1, one_each=True)

    @staticmethod
    def last_of(counts: Sequence[int], rows_BLX: Tensor) -> "Anchors":
        """The last of the first counts[b] positions of each row of [B, L, ...]."""
        return Anchors.one_per_row(torch.tensor(counts, device=rows_BLX.device) - 1)

    def own(self, values_BL: Tensor) -> Tensor:
        """Of each anchor what stands at its position: [N, ...] of [B, L, ...]."""
        return values_BL[self.batch_N, self.position_N]

    def spread(self, values_N: Tensor, rows: int) -> Tensor:
        """[rows, most, ...] of [N, ...], 0 where a row has no such anchor."""
        if self.one_each:
            return values_N.unsqueeze(1)
        spread = values_N.new_zeros(rows, self.most, *values_N.shape[1:])
        return spread.index_put((self.batch_N, self.place_N), values_N)

    def gathered(self, values_BA: Tensor) -> Tensor:
        """What `spread` spread: [N, ...] of [rows, most, ...]."""
        if self.one_each:
            return values_BA.squeeze(1)
        return values_BA[self.batch_N, self.place_N]


class Memory(NamedTuple):
    """Keys and values [B, H, S, width] of the positions that slots may look at."""

    keys: Tensor
    values: Tensor


class Attended(NamedTuple):
    """The base's last layers that a head copies: what it needs of each position is the state [D] that enters the first
    of them, and the keys and values that each of them has, of that many heads of that width. scale: how large such
    states are (root mean square)."""

    layers: tuple[int, ...]
    heads: int
    width: int
    hidden_size: int
    scale: float = 1.0

    @property
    def size(self) -> int:
        """Numbers of a position: the entering state, then keys and values of all layers."""
        return self.hidden_size + 2 * len(self.layers) * self.heads * self.width

    def memories(self, states_BLX: Tensor) -> dict[int, Memory]:
        """Keys and values of each layer from what `Base.hidden` puts behind the hidden and the entering states."""
        B, L, _ = states_BLX.shape
        both = states_BLX[..., 2 * self.hidden_size :].view(B, L, 2, len(self.layers), self.heads, self.width)
        return {
            layer: Memory(*both[:, :, :, number].permute(2, 0, 3, 1, 4)) for number, layer in enumerate(self.layers)
        }


def _rotary(positions_BL: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, L, width] for `_rotate`; the first half of the sines is negated."""
    last = 2.0 / width - 1.0
    frequency = torch.logspace(0.0, last, width // 2, ROPE_BASE, dtype=torch.float32, device=positions_BL.device)
    angle = positions_BL[:, None, :, None].float() * torch.cat([-frequency, frequency])
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Number i and number i + width / 2 of x are the two of a plane (as in Llama)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
