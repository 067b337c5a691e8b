"""The loss's GEMMs in bfloat16 and the rest in float32: close to float64, closer than the rounded logits are."""

import pytest
import torch

from ctcdraft.model.kernels import linear_lse_top, reference

K, TOP = 5, 4


def problem(M=40, V=700, D=48, seed=0, scale=1.0, dtype=torch.float32):
    """Float32 states near some rows of a bfloat16 LM head, as a trained head's are; the first gathered column is it."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=g).bfloat16()
    index = torch.randint(0, V, (M, K), generator=g)
    hidden = scale * (weight[index[:, 0]].float() + torch.randn(M, D, generator=g))
    return hidden.to(dtype).requires_grad_(), weight, index


def everything(hidden, weight, index, top_k=TOP, implementation="auto"):
    lse, logits, top, top_index = linear_lse_top(hidden, weight, index, top_k, implementation)
    loss = (lse - logits[:, 0]).sum() + 0.5 * top[:, :1].sum()  # the rest may be others
    return lse, logits, top, top_index, *torch.autograd.grad(loss, hidden)


def oracle(hidden, weight, index, top_k=TOP):
    """In float64, of the states as they are rounded."""
    rounded = hidden.detach().bfloat16().double().requires_grad_()
    return everything(rounded, weight.double(), index, top_k, "reference")


def errors(got, want):
    """Of lse and logits (largest), and of the gradient (relative)."""
    lse, logits, top, _, gradient = got
    parts = [(a - b).abs().max() for a, b in zip((lse, logits, top), want[:3], strict=True)]
    return [float(part) for part in (*parts, (gradient - want[4]).norm() / want[4].norm())]


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("tile", [(40, 700), (13, 64), (40, 128)])
def test_it_is_close_to_float64(monkeypatch, scale, tile):
    monkeypatch.setattr("ctcdraft.model.kernels.cpu_mixed.tile_shape", lambda *_: tile)
    arguments = problem(scale=scale)
    want = oracle(*arguments)
    lse, logits, top, gradient = errors(everything(*arguments), want)
    largest = float(want[2].abs().max())
    assert lse < 2e-3 + 1e-6 * largest  # of many small terms, each rounded by up to 2^-9 of its logit
    assert logits < 1e-6 * largest
    assert top < 2**-8 * largest  # of near ones the rounded logits choose
    assert gradient < 2**-7


def test_rounded_logits_would_be_further_off():
    hidden, weight, index = problem(scale=4.0)
    want = oracle(hidden, weight, index)
    rounded = reference.linear_lse_top(hidden.detach().bfloat16(), weight, index, TOP)
    lse, logits, _, _ = errors(everything(hidden, weight, index), want)
    assert float((rounded[0] - want[0]).abs().max()) > 30 * lse
    assert float((rounded[1] - want[1]).abs().max()) > 1000 * logits


def test_the_largest_come_first_and_hold_what_their_indices_say():
    hidden, weight, index = problem()
    _, _, top, top_index, _ = everything(hidden, weight, index)
    assert torch.equal(top, top.sort(dim=1, descending=True).values)
    logits = hidden.detach().bfloat16().float() @ weight.float().T
    assert torch.allclose(top, logits.gather(1, top_index), atol=1e-4)
    assert torch.allclose(top, logits.topk(TOP, dim=1).values, atol=2**-8 * float(logits.abs().max()))


@pytest.mark.parametrize("top_k", [0, 1, 65, 700])
def test_any_number_of_the_largest(top_k):
    arguments = problem()
    lse, logits, *_ = everything(*arguments, top_k)
    want_lse, want_logits, *_ = oracle(*arguments, top_k)
    assert float((lse - want_lse).abs().max()) < (2e-5 if top_k == 700 else 2e-2)  # all of them exact, or only the peak
    assert torch.allclose(logits.double(), want_logits, atol=1e-4)


def test_large_logits_neither_overflow_nor_vanish():
    hidden, weight, index = problem(scale=100.0)
    lse, _, top, _, gradient = everything(hidden, weight, index)
    assert torch.isfinite(lse).all()
    assert torch.isfinite(gradient).all()
    assert (lse >= top[:, 0]).all()


def test_a_second_step_does_not_change_what_the_first_gave():
    first = everything(*problem())
    before = [part.clone() for part in first]
    everything(*problem(seed=1))
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(everything(*problem()), before, strict=True))


def test_no_rows_and_a_trained_weight():
    hidden, weight, index = problem(M=0)
    assert [part.shape for part in everything(hidden, weight, index)[:3]] == [(0,), (0, K), (0, TOP)]
    hidden, weight, index = problem()
    with pytest.raises(ValueError, match="convert one of them"):
        linear_lse_top(hidden, weight.requires_grad_(), index, TOP)


def test_a_wrong_slope_would_be_noticed(monkeypatch):
    arguments = problem()
    want = oracle(*arguments)
    monkeypatch.setattr("ctcdraft.model.kernels.cpu_mixed.add_columns", lambda *_: None)
    assert errors(everything(*arguments), want)[3] > 2**-5
