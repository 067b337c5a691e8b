"""Attention with shared keys: SDPA's, and left to it wherever more is asked for than a mask."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ctcdraft.model import load_base
from ctcdraft.model.base import attention
from ctcdraft.model.base.attention import grouped_attention, use_grouped_attention

BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}  # relative to the norm, of a float64 oracle


def problem(dtype, queries=5, heads=6, key_heads=2, sequences=3, width=20, keys=33, seed=0):
    """Keys and values lie in a larger cache; each query sees some of them, its own last one among these."""
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(sequences, heads, queries, width, generator=g).to(dtype)
    key, value = (torch.randn(sequences, key_heads, 50, width, generator=g).to(dtype)[:, :, :keys] for _ in "kv")
    hidden = torch.rand(sequences, 1, queries, keys, generator=g) < 0.5
    hidden[..., -1] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    return query, key, value, mask


def oracle(query, key, value, mask, scale):
    parts = (part.double() for part in (query, key, value))
    return scaled_dot_product_attention(*parts, attn_mask=mask.double(), scale=scale, enable_gqa=True).transpose(1, 2)


def of_groups(query, key):
    return SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", [(6, 2), (5, 1), (4, 4)])
@pytest.mark.parametrize("queries", [1, 5])
def test_it_is_softmax_attention(dtype, heads, queries):
    query_heads, key_heads = heads
    query, key, value, mask = problem(dtype, queries, query_heads, key_heads)
    got = grouped_attention(of_groups(query, key), query, key, value, mask, scaling=0.3)[0].double()
    want = oracle(query, key, value, mask, 0.3)
    assert got.shape == want.shape
    assert torch.linalg.vector_norm(got - want) < BOUNDS[dtype] * torch.linalg.vector_norm(want)


def test_one_mask_may_be_for_all_sequences():
    query, key, value, mask = problem(torch.float64)
    got, _ = grouped_attention(of_groups(query, key), query, key, value, mask[:1], scaling=0.3)
    assert torch.allclose(got, oracle(query, key, value, mask[:1].expand(3, -1, -1, -1), 0.3), atol=1e-14)


@pytest.mark.parametrize("heads", [(6, 2), (5, 1)])
def test_a_single_row_without_a_mask_sees_all_keys(monkeypatch, heads):
    query_heads, key_heads = heads
    query, key, value, mask = problem(torch.float64, 1, query_heads, key_heads)
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **__: pytest.fail("its keys are repeated"))
    got, _ = grouped_attention(of_groups(query, key), query, key, value, None, scaling=0.3, is_causal=True)
    assert torch.allclose(got, oracle(query, key, value, torch.zeros_like(mask), 0.3), atol=1e-14)


def test_its_gradient_is_that_of_repeated_keys():
    query, key, value, mask = problem(torch.float64)
    asked, module = [part.requires_grad_() for part in (query, key, value)], of_groups(query, key)
    found = [
        torch.autograd.grad(side(module, query, key, value, mask, scaling=0.3)[0].sin().sum(), asked)
        for side in (grouped_attention, sdpa_attention_forward)
    ]
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, atol=1e-13)


@pytest.mark.parametrize("heads", [(6, 2), (4, 4)])
def test_all_else_is_left_to_sdpa(monkeypatch, heads):
    query_heads, key_heads = heads
    query, key, value, mask = problem(torch.float32, 5, query_heads, key_heads)
    seen = []

    def sdpa(module, query, key, value, mask, **options):
        seen.append(options)
        return "its own", None

    monkeypatch.setattr(attention, "sdpa_attention_forward", sdpa)
    module = of_groups(query, key)
    bias, of_heads = torch.randn(3, query_heads, 5, 33), mask.expand(-1, query_heads, -1, -1)
    asked = [{"dropout": 0.1}, {"softcap": 30.0}, {"position_bias": bias}]
    for options in asked:
        assert grouped_attention(module, query, key, value, mask, **options)[0] == "its own"
    assert seen == asked
    for other in (None, of_heads):
        assert grouped_attention(module, query, key, value, other)[0] == "its own"
    usual = grouped_attention(module, query, key, value, mask, dropout=0.0, softcap=None, is_causal=True)[0]
    assert isinstance(usual, str) == (heads == (4, 4))


def test_a_base_on_a_cpu_gets_it_and_says_the_same(base_folder):
    base = load_base(str(base_folder), device="cpu")
    assert base.model.config._attn_implementation == attention.NAME
    ids_1L = torch.arange(3, 30).unsqueeze(0)
    said = base.logits(base.hidden(ids_1L))
    base.model.set_attn_implementation("sdpa")
    assert torch.allclose(base.logits(base.hidden(ids_1L)), said, atol=1e-5)


def test_another_attention_stays(base_folder):
    base = load_base(str(base_folder))
    base.model.set_attn_implementation("eager")
    use_grouped_attention(base.model)
    assert base.model.config._attn_implementation == "eager"
