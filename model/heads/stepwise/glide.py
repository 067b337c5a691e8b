"""`glide`: a small causal LM whose layers look at the keys and values of the base's last ones.

Du et al. 2024 (GliDe with a CaPE, ICML, arXiv 2402.02082, section 3.1): layer l of n looks at layer L - n + l of the
base, between its own attention and MLP, by queries that are turned as the base's keys are. Here words come from the
base's embedding and go to its LM head.

Shape suffixes: B batch, Q rows of one pass, S positions of the base, H heads, W width.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from transformers import Cache

from ...base.cache import PassingCache
from ...base.context import Attended, AttentionMask, KeysAndValues
from ...base.llm import Base
from ..block import Block
from ..head import CHECKED, Layers, Size
from .beam import StepwiseHead
from .eagle import EagleConfig

TRIED = 7  # a position of the trial
CLOSE = 2e-2  # how far a turned key may be from the base's, of its largest number
Turn = Callable[[Tensor, Tensor], Tensor]  # heads [B, H, Q, w] to positions [B, Q]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class GlideConfig(EagleConfig):
    kind: Literal["glide"] = "glide"  # type: ignore[assignment]
    layers: Layers = 1  # each looks at one of the base's last ones
    width: Size = 256  # of these layers
    cross: bool = True  # attention to the base's keys and values; false: a language model of its own, the control


class GlideHead(StepwiseHead):
    """Its states are what meets the LM head; no pass reads them."""

    config: GlideConfig

    def __init__(self, config: GlideConfig, base: Base, attended: Attended | None = None) -> None:
        super().__init__(config, base, attended)
        self.attentions = config.layers
        self.enter = nn.Linear(base.hidden_size, config.width, bias=False)
        crosses: list[CrossAttention | None] = [None] * config.layers
        if attended is not None:
            heads, turns = base.decoder.config.num_attention_heads, [turn_of(base, layer) for layer in attended.layers]
            if not hasattr(base.decoder, "layers"):  # Falcon's have another name
                raise ValueError(f"head=glide: the layers of {base.name} are not found: take head.cross=false")
            crosses = [CrossAttention(config.width, heads, attended.width, turn) for turn in turns]
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, number, cross) for number, cross in enumerate(crosses)
        )
        self.norm = nn.RMSNorm(config.width)
        self.leave = nn.Linear(config.width, base.hidden_size, bias=False)

    def step(
        self, state_BQE: Tensor, token_BQD: Tensor, mask: AttentionMask, cache: Cache, read: KeysAndValues
    ) -> Tensor:
        x_BQW = self.enter(token_BQD)
        for block, pair in zip(self.blocks, read.values() or [None] * len(self.blocks), strict=True):
            x_BQW = block(x_BQW, mask, cache, pair)
        return self.leave(self.norm(x_BQW))


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


def turn_of(base: Base, layer: int) -> Turn:
    """What turns a query as that layer of the base turns its keys: its own class's function, by angles of the whole
    base or of that kind of layer, or nothing. Raises ValueError where none of these does: tried on what the layer makes
    of one token, which stands alone, at two positions."""
    decoder = base.decoder
    own_class = sys.modules[type(decoder).__module__]
    kinds = getattr(decoder.config, "layer_types", None) or ()

    def turned(heads_BHQw: Tensor, positions_BQ: Tensor, **kind: str) -> Tensor:
        cos, sin = decoder.rotary_emb(heads_BHQw, positions_BQ, **kind)
        first, rest = heads_BHQw[..., : cos.shape[-1]], heads_BHQw[..., cos.shape[-1] :]  # rest: of partial rotary
        return torch.cat([own_class.apply_rotary_pos_emb(first, first, cos, sin)[0], rest], dim=-1)

    def key(at: Tensor) -> Tensor:
        watched = PassingCache(watched=[layer])
        base.hidden(torch.ones_like(at), AttentionMask(at), cache=watched)
        return watched.made[layer][0]

    here, there = (torch.full((1, 1), position, device=base.device) for position in (0, TRIED))
    key_here, key_there = key(here), key(there)
    turns: list[Turn] = [turned, *(partial(turned, layer_type=kind) for kind in kinds[layer : layer + 1]), _unturned]
    for turn in turns:
        try:
            near, far = turn(key_here, there), turn(key_there, here)  # both by both, since some angles also scale
            wrong = float((near - far).abs().max() / far.abs().max())
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
            continue
        if wrong < CLOSE:
            return turn
    raise ValueError(f"head=glide: {base.name} turns its keys in a way that the head cannot: take head.cross=false")


def _unturned(heads_BHQw: Tensor, positions_BQ: Tensor) -> Tensor:
    return heads_BHQw
