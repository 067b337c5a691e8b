"""Attention on a CPU, under a mask or of a single row: the queries that share a key are rows of one head.

transformers repeats keys and values for each query of a group (grouped-query attention, Ainslie et al. 2023, arXiv
2305.13245). As rows of one head they share them: the same products, and nothing is copied (bench/attention.py).

Shape suffixes: B sequences, H query heads, J key heads, Q queries, S keys, R rows of a key head (its queries times Q).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "ctcdraft_grouped"  # in transformers' registry of attentions
SPECIAL = ("softcap", "position_bias", "cache")  # options that are more than a mask, a scale and no dropout


def use_grouped_attention(model: Any) -> None:
    """In a model whose attention is SDPA, where a CPU computes it: an engine's has its embedding alone there."""
    on_cpu = model.get_input_embeddings().weight.device.type == "cpu"
    if on_cpu and model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """SDPA's result [B, Q, H, width]; all that is not over shared keys, under one mask for all heads or of a single row
    that sees them all, is left to it."""
    mask, (B, H, Q, _), J = attention_mask, query.shape, key.shape[1]
    special = options.get("dropout") or any(options.get(name) is not None for name in SPECIAL)
    causal, of_heads = mask is None and Q > 1, mask is not None and mask.shape[1] > 1
    if causal or of_heads or H == J or special:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    query_BJRD = query.reshape(B, J, H // J * Q, -1)
    mask_B1RS = None if mask is None else torch.cat([mask] * (H // J), dim=2)
    out_BJRD = scaled_dot_product_attention(query_BJRD, key, value, mask_B1RS, scale=options.get("scaling"))
    return out_BJRD.reshape(B, H, Q, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
