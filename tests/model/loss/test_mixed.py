"""The loss's GEMMs in bfloat16 and the rest in float32: close to float64, closer than the rounded logits are."""

import pytest
import torch

from ctcdraft.model.loss import reference
from ctcdraft.model.loss.kernels import linear_lse_gather

K = 5


def problem(M=40, V=700, D=48, seed=0, scale=1.0, dtype=torch.float32):
    """Float32 states near some rows of a bfloat16 LM head, as a trained head's are; the first gathered column is it."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=g).bfloat16()
    index = torch.randint(0, V, (M, K), generator=g)
    hidden = scale * (weight[index[:, 0]].float() + torch.randn(M, D, generator=g))
    return hidden.to(dtype).requires_grad_(), weight, index


def everything(hidden, weight, index, implementation="auto"):
    lse, logits = linear_lse_gather(hidden, weight, index, implementation)
    return lse, logits, *torch.autograd.grad((lse - 0.5 * logits[:, 0]).sum(), hidden)


def oracle(hidden, weight, index):
    """In float64, of the states as they are rounded."""
    rounded = hidden.detach().bfloat16().double().requires_grad_()
    return everything(rounded, weight.double(), index, "reference")


def errors(got, want):
    """Of lse and logits (largest), and of the gradient (relative)."""
    parts = [(a - b).abs().max() for a, b in zip(got[:2], want[:2], strict=True)]
    return [float(part) for part in (*parts, (got[2] - want[2]).norm() / want[2].norm())]


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("tile", [40, 13, 1])
def test_it_is_close_to_float64(monkeypatch, scale, tile):
    monkeypatch.setattr("ctcdraft.model.loss.linear_lse.tile_rows", lambda *_: tile)
    arguments = problem(scale=scale)
    want = oracle(*arguments)
    lse, logits, gradient = errors(everything(*arguments), want)
    largest = float(want[1].abs().max())
    assert lse < 2e-3 + 1e-6 * largest  # of many small terms, each rounded by up to 2^-9 of its logit
    assert logits < 1e-6 * largest
    assert gradient < 2**-7


def test_rounded_logits_would_be_further_off():
    hidden, weight, index = problem(scale=4.0)
    want = oracle(hidden, weight, index)
    rounded = reference.linear_lse_gather(hidden.detach().bfloat16(), weight, index)
    lse, logits, _ = errors(everything(hidden, weight, index), want)
    assert float((rounded[0] - want[0]).abs().max()) > 30 * lse
    assert float((rounded[1] - want[1]).abs().max()) > 1000 * logits


def test_large_logits_neither_overflow_nor_vanish():
    hidden, weight, index = problem(scale=100.0)
    lse, logits, gradient = everything(hidden, weight, index)
    assert torch.isfinite(lse).all()
    assert torch.isfinite(gradient).all()
    assert (lse >= logits.amax(dim=1)).all()


def test_a_second_step_does_not_change_what_the_first_gave():
    first = everything(*problem())
    before = [part.clone() for part in first]
    everything(*problem(seed=1))
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(everything(*problem()), before, strict=True))


def test_a_loss_that_was_first_looked_at_in_inference_mode_can_be_trained_on(monkeypatch):
    monkeypatch.setattr("ctcdraft.model.loss.linear_lse._kept", {})
    hidden, weight, index = problem()
    with torch.inference_mode():
        seen = linear_lse_gather(hidden, weight, index)
    for got, want in zip(everything(hidden, weight, index), seen, strict=False):
        assert torch.equal(got, want)


def test_no_rows_and_a_trained_weight():
    hidden, weight, index = problem(M=0)
    assert [part.shape for part in everything(hidden, weight, index)[:2]] == [(0,), (0, K)]
    hidden, weight, index = problem()
    with pytest.raises(ValueError, match="convert one of them"):
        linear_lse_gather(hidden, weight.requires_grad_(), index)


def test_a_wrong_slope_would_be_noticed(monkeypatch):
    arguments = problem()
    want = oracle(*arguments)
    monkeypatch.setattr("ctcdraft.model.loss.linear_lse._add_columns", lambda *_: None)
    assert errors(everything(*arguments), want)[2] > 2**-5
