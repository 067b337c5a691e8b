"""The transformer block that heads are built from.

Shape suffixes: B batch, L positions, W width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ..base.context import AttentionMask

ROPE_BASE = 10_000.0


class Block(nn.Module):
    """A layer of Llama: pre-norm attention with rotary positions, and SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        inner = -(-8 * width // 3 // 16) * 16
        config: Any = LlamaConfig(hidden_size=width, intermediate_size=inner, num_attention_heads=heads)
        config._attn_implementation = "sdpa"
        layer: Any = LlamaDecoderLayer(config, layer_idx=0)
        layer.input_layernorm = nn.RMSNorm(width)  # Llama's own count in float32 alone
        layer.post_attention_layernorm = nn.RMSNorm(width)
        self.layer, self.head_width = layer, width // heads

    def forward(self, x_BLW: Tensor, mask: AttentionMask, cache: Cache | None = None) -> Tensor:
        half = torch.arange(0, self.head_width, 2, device=x_BLW.device)
        frequency = ROPE_BASE ** -(half / self.head_width)
        angle = mask.positions_BL.unsqueeze(2) * torch.cat([frequency, frequency])
        turned = angle.cos().to(x_BLW.dtype), angle.sin().to(x_BLW.dtype)
        return self.layer(x_BLW, mask.allowed_BLS, past_key_values=cache, position_embeddings=turned)
