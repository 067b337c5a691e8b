"""What rounding does to a base's logits: the same tokens give other ones in a forward of another shape.

Tokens that are known go through the base `width` at a time, with an ordinary cache and an ordinary causal mask: no
head, no tree, no compaction. What moves then is the shape's doing and nobody else's.

Shape suffixes: V vocabulary, Q rows of a forward, K cached and new entries, R rows of logits.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from .context import AttentionMask
from .llm import Base

TIE_GAP = 1e-5
SPACINGS = 8


def shape_noise(base: Base, prompt: Sequence[int], tokens: Sequence[int], width: int) -> float:
    """The most that a logit differs between one row at a time and `width`, before each of the tokens behind the
    prompt."""
    both = (forced_logits(base, prompt, tokens, rows) for rows in (width, 1))
    return max(float((wide_V.double() - narrow_V.double()).abs().max()) for wide_V, narrow_V in zip(*both, strict=True))


def bound_of(logits_V: Tensor) -> float:
    """The largest gap between two logits that rounding may close. In float32 and float64: 1e-5. Below: 8 spacings of
    the precision at the magnitude of the largest logit, so that each of the two may have moved by 4."""
    if logits_V.dtype.itemsize >= 4:
        return TIE_GAP
    peak = float(logits_V.abs().max())
    return SPACINGS * torch.finfo(logits_V.dtype).eps * 2.0 ** math.floor(math.log2(peak)) if peak else 0.0


@torch.no_grad()
def forced_logits(base: Base, prompt: Sequence[int], tokens: Sequence[int], width: int) -> Iterator[Tensor]:
    """The base's logits [V] before each of `tokens`, which go through it `width` at a time behind the prompt."""
    cache = DynamicCache()
    device = base.device
    whole = base.hidden(torch.tensor([list(prompt)], device=device), cache=cache)
    yield base.logits(whole[0, -1:])[0]
    for start in range(0, len(tokens) - 1, width):
        ids = list(tokens[start : min(start + width, len(tokens) - 1)])
        past, real = len(prompt) + start, len(ids)
        causal_QK = torch.ones(width, past + width, dtype=torch.bool, device=device).tril(past)
        positions_Q = torch.arange(past, past + width, device=device).clamp(max=base.context_length - 1)
        hidden_QD = base.hidden(
            torch.tensor([ids + [0] * (width - real)], device=device),  # of the same shape to the last
            AttentionMask(positions_Q.unsqueeze(0), None if width == 1 else causal_QK[None, None]),
            cache=cache,
        )[0]
        yield from base.logits(hidden_QD)[:real]
