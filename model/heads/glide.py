"""`glide`: a small causal LM whose layers look at the keys and values of the base's last ones.

Du et al. 2024 (GliDe with a CaPE, ICML, arXiv 2402.02082, section 3.1): layer l of n looks at layer L - n + l of the
base, between its own attention and MLP, by queries that are turned as the base's keys are. What it knows of the base is
these alone, up to the anchor; so no block of keys has to be hidden in training. Here words come from the base's
embedding and go to its LM head.

Shape suffixes: B batch, Q rows of one pass, S positions of the base, H heads, W width.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import rotate_half

from ..base.cache import PassingCache
from ..base.context import Attended, AttentionMask, KeysAndValues
from ..base.llm import Base
from .block import Block, check_heads
from .head import CHECKED, Layers, Size
from .stepwise import StepwiseConfig, StepwiseHead

TRIED = 7  # a position of the trial
CLOSE = 2e-2  # how far a turned key may be from the base's, of its largest number
Turn = Callable[[Tensor, Tensor], Tensor]  # heads [B, H, Q, w] to positions [B, Q]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class GlideConfig(StepwiseConfig):
    kind: Literal["glide"] = "glide"
    layers: Layers = 1  # each looks at one of the base's last ones
    width: Size = 256  # of these layers
    heads: Size = 4  # of their own attention
    cross: bool = True  # attention to the base's keys and values; false: a language model of its own, the control

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads)


class GlideHead(StepwiseHead):
    """Its states are what meets the LM head; no pass reads them."""

    config: GlideConfig

    def __init__(self, config: GlideConfig, base: Base, attended: Attended | None) -> None:
        super().__init__(config, base.hidden_size)
        self.attended, self.attentions = attended, config.layers
        self.enter = nn.Linear(base.hidden_size, config.width, bias=False)
        crosses: list[CrossAttention | None] = [None] * config.layers
        if attended is not None:
            heads, turn = base.decoder.config.num_attention_heads, turn_of(base, attended)
            crosses = [CrossAttention(config.width, heads, attended.width, turn) for _ in crosses]
        self.blocks = nn.ModuleList(GlideBlock(config, number, cross) for number, cross in enumerate(crosses))
        self.norm = nn.RMSNorm(config.width)
        self.leave = nn.Linear(config.width, base.hidden_size, bias=False)

    def step(
        self, state_BQE: Tensor, token_BQD: Tensor, mask: AttentionMask, cache: Cache, read: KeysAndValues
    ) -> Tensor:
        x_BQW = self.enter(token_BQD)
        for block, pair in zip(self.blocks, read.values() or [None] * len(self.blocks), strict=True):
            x_BQW = block(x_BQW, mask, cache, pair)
        return self.leave(self.norm(x_BQW))


class GlideBlock(Block):
    """A layer of Llama, with attention to the base between its own and the MLP: `cross`, where there is any."""

    def __init__(self, config: GlideConfig, number: int, cross: "CrossAttention | None") -> None:
        super().__init__(config.width, config.heads, number)
        self.cross = cross

    def forward(
        self,
        x_BLW: Tensor,
        mask: AttentionMask,
        cache: Cache | None = None,
        read: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        layer = self.layer
        x_BLW = x_BLW + layer.self_attn(layer.input_layernorm(x_BLW), **self.attending(x_BLW, mask, cache))[0]
        if self.cross is not None and read is not None:
            x_BLW = x_BLW + self.cross(x_BLW, mask, *read)
        return x_BLW + layer.mlp(layer.post_attention_layernorm(x_BLW))


class CrossAttention(nn.Module):
    """From rows to the base's keys and values of the positions that they see, in as many heads as the base has."""

    def __init__(self, width: int, heads: int, head_width: int, turn: Turn) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.merge = nn.Linear(heads * head_width, width, bias=False)
        self.head_width, self.turn = head_width, turn

    def forward(self, x_BQW: Tensor, mask: AttentionMask, keys_BHSw: Tensor, values_BHSw: Tensor) -> Tensor:
        """What is added to the rows. A row reads the token behind its position, so there stands its query."""
        query_BHQw = self.query(self.norm(x_BQW)).unflatten(2, (-1, self.head_width)).transpose(1, 2)
        query_BHQw, allowed = self.turn(query_BHQw, mask.positions_BL + 1), None
        if mask.allowed_BLS is not None:
            allowed = mask.allowed_BLS[..., : keys_BHSw.shape[2]]  # its own entries begin with these positions
            allowed = allowed | ~allowed.any(dim=-1, keepdim=True)  # of rows that nobody asks for: no NaN
        found = F.scaled_dot_product_attention(
            query_BHQw,
            keys_BHSw.to(x_BQW.dtype),
            values_BHSw.to(x_BQW.dtype),
            attn_mask=allowed,
            is_causal=allowed is None and x_BQW.shape[1] > 1,
            enable_gqa=True,
        )
        return self.merge(found.transpose(1, 2).flatten(2))


def turn_of(base: Base, attended: Attended) -> Turn:
    """What turns a query as the base's keys are turned, by the angles of its own class. Raises ValueError where that
    does not hold: tried on what these layers make of one token, which stands alone, at two positions."""

    def turn(heads_BHQw: Tensor, positions_BQ: Tensor) -> Tensor:
        cos, sin = (part.unsqueeze(1) for part in base.decoder.rotary_emb(heads_BHQw, positions_BQ))
        return heads_BHQw * cos + rotate_half(heads_BHQw) * sin

    def keys(position: int) -> Tensor:
        watched, at = PassingCache(watched=attended.layers), torch.full((1, 1), position, device=base.device)
        base.hidden(torch.ones_like(at), AttentionMask(at), cache=watched)
        return torch.cat([watched.made[layer][0] for layer in attended.layers])

    try:
        near, far = keys(0), keys(TRIED)
        wrong = float((turn(near, torch.full((1, 1), TRIED, device=base.device)) - far).abs().max() / far.abs().max())
    except (RuntimeError, TypeError, AttributeError):
        wrong = 1.0
    if not wrong < CLOSE:
        raise ValueError(f"head=glide: {base.name} turns its keys otherwise than Llama does: take head.cross=false")
    return turn
