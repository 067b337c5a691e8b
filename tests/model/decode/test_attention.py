"""Attention of one new position per sequence: SDPA's, whatever the lengths, and only where it is asked for."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ctcdraft.model.decode import attention
from ctcdraft.model.decode.attention import decoding_attention

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # relative to the norm, of a float64 oracle


def problem(dtype, lengths, heads=6, key_heads=2, width=20, capacity=50, seed=0):
    """Keys and values lie in a larger cache, with garbage behind each sequence's length."""
    g = torch.Generator().manual_seed(seed)
    B, longest = len(lengths), max(lengths)
    query = torch.randn(B, heads, 1, width, generator=g).to(dtype)
    key, value = (torch.randn(B, key_heads, capacity, width, generator=g).to(dtype)[:, :, :longest] for _ in "kv")
    hidden = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(B, 1, 1, longest, dtype=dtype).masked_fill(hidden[:, None, None], torch.finfo(dtype).min)
    return query, key, value, mask


def oracle(query, key, value, mask, scale):
    parts = (part.double() for part in (query, key, value))
    return scaled_dot_product_attention(*parts, attn_mask=mask.double(), scale=scale, enable_gqa=True)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("sharpness", [0.3, 8.0])
def test_it_is_softmax_attention(dtype, heads, sharpness):
    parts = problem(dtype, [1, 7, 33, 50, 32], *heads)
    assert attention.suits(*parts)
    got, want = attention.attend(*parts, sharpness).double(), oracle(*parts, sharpness)
    assert torch.linalg.vector_norm(got - want) < BOUNDS[dtype] * torch.linalg.vector_norm(want)


def test_a_mask_may_hide_any_keys_and_weigh_the_others():
    query, key, value, mask = problem(torch.float32, [40, 40, 40])
    mask[0, ..., :9], mask[1, ..., 5:30] = -torch.inf, torch.finfo(torch.float32).min
    mask[2] = torch.randn(40, generator=torch.Generator().manual_seed(1))
    want = oracle(query, key, value, mask, 0.2)
    assert torch.allclose(attention.attend(query, key, value, mask, 0.2).double(), want, atol=1e-6)


def test_what_a_sequence_does_not_see_is_not_read():
    query, key, value, mask = problem(torch.float32, [12, 50])
    want = attention.attend(query, key, value, mask, 0.2)
    key[0, :, 12:], value[0, :, 12:] = torch.nan, torch.nan
    assert torch.equal(attention.attend(query, key, value, mask, 0.2), want)


def test_all_else_is_left_to_sdpa():
    query, key, value, mask = problem(torch.float32, [3, 9])
    assert not attention.suits(query, key, value, None)
    assert not attention.suits(query.expand(-1, -1, 2, -1), key, value, mask)
    assert not attention.suits(*(part.double() for part in (query, key, value, mask)))
    assert not attention.suits(query, key, value, mask == 0)
    bias, module = torch.randn(2, 6, 1, 9), SimpleNamespace(num_key_value_groups=3)
    options = {"scaling": 0.2, "position_bias": bias}
    got, _ = attention._forward(module, query, key, value, mask, **options)
    assert torch.equal(got, sdpa_attention_forward(module, query, key, value, mask, **options)[0])


@pytest.mark.parametrize("usual", ["sdpa", "eager"])
def test_a_model_gets_its_own_attention_back(base, usual):
    base.model.set_attn_implementation(usual)
    try:
        with decoding_attention(base.model):
            replaced = usual == "sdpa" and base.device.type == "cpu"
            assert base.model.config._attn_implementation == (attention.NAME if replaced else usual)
        assert base.model.config._attn_implementation == usual
    finally:
        base.model.set_attn_implementation("sdpa")
