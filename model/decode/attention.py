"""An entry in transformers' registry of attentions: SDPA, but for one new position of several sequences on a CPU, which
is read as far as its sequence goes (`kernels.cpu_attention`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from . import cpu_attention

NAME = "ctcdraft_decoding"


def _forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    mask = attention_mask  # some models give it by name
    if options.get("position_bias") is not None or not cpu_attention.suits(query, key, value, mask):
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    scale = options.get("scaling")
    assert mask is not None
    out = cpu_attention.attend(query, key, value, mask, query.shape[3] ** -0.5 if scale is None else scale)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def decoding_attention(model: Any) -> Iterator[None]:
    """Forwards of a model whose attention is SDPA use this one; of another model nothing changes."""
    if model.config._attn_implementation != "sdpa" or model.device.type != "cpu":
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
