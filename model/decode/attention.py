"""Attention of one new position per sequence, compiled for a CPU: keys behind the last one that a sequence's mask shows
are not read, and those that a group of queries shares are read once. All else is left to SDPA.

torch's kernel reads every sequence's padding, up to the longest one's length. Totals and dot products are the only sums
that the compiler may order, so that they can be vectorised; where it may order more (fastmath), the process that
compiles has rounded in another way than those that load what it compiled (tests/model/lattice/test_compiled.py).

Shape suffixes: B sequences, H query heads, J key heads, G queries of each, S keys, D width of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "ctcdraft_decoding"  # in transformers' registry of attentions
BITS = {torch.float32: (torch.uint32, 0), torch.bfloat16: (torch.uint16, 16)}  # bfloat16: the upper half of a float32
HIDDEN = -1e30  # what a mask adds to a hidden key, or less: finfo.min of any of these dtypes, -inf


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


def _forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    mask = attention_mask  # some models give it by name
    if options.get("position_bias") is not None or not suits(query, key, value, mask):
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    scale = options.get("scaling")
    assert mask is not None
    out = attend(query, key, value, mask, query.shape[3] ** -0.5 if scale is None else scale)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


def suits(query_BH1D: Tensor, key_BJSD: Tensor, value_BJSD: Tensor, mask_B11S: Tensor | None) -> bool:
    """Is this what is computed here: one query per sequence on a CPU, and a mask of numbers to add for each?"""
    kinds = {part.dtype for part in (query_BH1D, key_BJSD, value_BJSD)}
    return (
        mask_B11S is not None
        and mask_B11S.shape == (len(key_BJSD), 1, 1, key_BJSD.shape[2])
        and mask_B11S.is_floating_point()
        and query_BH1D.shape[2] == 1
        and query_BH1D.device.type == "cpu"
        and len(kinds) == 1
        and kinds <= BITS.keys()
        and key_BJSD.shape == value_BJSD.shape
        and query_BH1D.shape[3] == key_BJSD.shape[3]
    )


def attend(query_BH1D: Tensor, key_BJSD: Tensor, value_BJSD: Tensor, mask_B11S: Tensor, scale: float) -> Tensor:
    """softmax(scale * query @ key.T + mask) @ value [B, H, 1, D], summed in float32."""
    (B, H, _, D), J = query_BH1D.shape, key_BJSD.shape[1]
    kind, shift = BITS[key_BJSD.dtype]
    query_BJGD = query_BH1D.reshape(B, J, H // J, D).float() * (scale * np.log2(np.e))
    mask_BS = mask_B11S.view(B, -1).float().clamp(min=HIDDEN) * np.log2(np.e)
    out_BJGD = torch.empty_like(query_BJGD)
    keys, values = (part.detach().view(kind).numpy() for part in (key_BJSD, value_BJSD))
    query = query_BJGD.numpy()
    cache = (keys, values, shift)
    mask = mask_BS.numpy()
    out = out_BJGD.numpy()
    if torch.get_num_threads() == 1:  # a process that was forked must not touch its parent's threads
        _attend_pairs((0, B * J), query, cache, mask, out)
    else:
        _attend(_use_torch_threads(), query, cache, mask, out)  # type: ignore[call-arg]
    return out_BJGD.view(B, H, 1, D).to(query_BH1D.dtype)


def _use_torch_threads() -> int:
    """Compiled loops then run on as many threads as torch's operations; their number.

    The first of them sets the threads of the OpenMP that numba shares with torch to all cores: they are set back.
    """
    torchs = torch.get_num_threads()
    threads = max(1, min(torchs, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    numba.set_num_threads(threads)
    if torch.get_num_threads() != torchs:
        torch.set_num_threads(torchs)
    return threads


@njit(cache=True, parallel=True)
def _attend(threads, query, cache, mask, out):
    pairs = query.shape[0] * query.shape[1]
    for chunk in prange(threads):
        _attend_pairs((pairs * chunk // threads, pairs * (chunk + 1) // threads), query, cache, mask, out)


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def _attend_pairs(span, query, cache, mask, out):
    """Of the pairs of sequence and key head from span[0] to before span[1]. cache: keys, values, and how far their bits
    are shifted to be those of a float32. Queries and masks are multiplied with log2(e) already."""
    key, value, shift = cache
    _, J, G, D = query.shape
    row = np.empty(D, np.float32)
    sums = np.empty((G, D), np.float32)
    weights = np.empty((G, mask.shape[1]), np.float32)
    for pair in range(span[0], span[1]):
        b, j = pair // J, pair % J
        end = mask.shape[1]
        while end > 1 and mask[b, end - 1] <= np.float32(HIDDEN):
            end -= 1
        for s in range(end):
            for d in range(D):
                row[d] = np.uint32(np.uint32(key[b, j, s, d]) << np.uint32(shift)).view(np.float32)
            for g in range(G):
                score = np.float32(0)
                for d in range(D):
                    score += query[b, j, g, d] * row[d]
                weights[g, s] = score + mask[b, s]
        for g in range(G):
            _softmax(weights[g, :end])
        sums[:] = 0
        for s in range(end):
            for d in range(D):
                row[d] = np.uint32(np.uint32(value[b, j, s, d]) << np.uint32(shift)).view(np.float32)
            for g in range(G):
                weight = weights[g, s]
                for d in range(D):
                    sums[g, d] += weight * row[d]
        out[b, j] = sums


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def _softmax(x):
    """2^x over its sum, in place. 2^x is 2^n 2^f with |f| <= 1/2, and 2^f a polynomial (1e-7 off); what is below 2^-126
    times the largest becomes that."""
    most, total = x[0], np.float32(0)
    for s in range(len(x)):
        most = max(most, x[s])
    for s in range(len(x)):
        y = max(x[s] - most, np.float32(-126.0))
        n = np.int32(y - np.float32(0.5))
        f = y - np.float32(n)
        power = np.float32(1.5403530e-4)
        power = power * f + np.float32(1.3333558e-3)
        power = power * f + np.float32(9.6181291e-3)
        power = power * f + np.float32(5.5504109e-2)
        power = power * f + np.float32(2.4022651e-1)
        power = power * f + np.float32(6.9314718e-1)
        power = power * f + np.float32(1.0)
        x[s] = np.int32(np.float32(power).view(np.int32) + np.int32(n << np.int32(23))).view(np.float32)
        total += x[s]
    for s in range(len(x)):
        x[s] /= total
