import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.model import fused_ctc_loss
from ctcdraft.model.kernels import linear_lse_gather
from ctcdraft.model.objective import anchor_losses

D, V = 3, 3


def problem(T, labels, seed=0, vocab=V):
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(1, T, D, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, D, generator=g, dtype=torch.float64)
    blank = torch.randn(1, T, generator=g, dtype=torch.float64, requires_grad=True)
    return states, weight, blank, torch.tensor([labels], dtype=torch.long).view(1, -1)


def brute_loss(states, weight, blank, labels, objective, decay=1.0):
    """None where no alignment writes the labels."""
    table = oracle.outputs(oracle.log_probs(states[0], weight, blank[0]))
    labels = labels[0].tolist()
    if objective == "ctc":
        return -table[tuple(labels)] if tuple(labels) in table else None
    terms = [oracle.log_psi(table, labels[: k + 1]) for k in range(len(labels))]
    terms = [(decay**k, term) for k, term in enumerate(terms) if term is not None]
    if not terms:
        return None
    return -sum(w * term for w, term in terms) / sum(w for w, _ in terms)


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(1, 5),
    labels=st.lists(st.integers(0, V - 1), max_size=3),
    objective=st.sampled_from(["ctc", "prefix_ctc"]),
    implementation=st.sampled_from(["chunked", "reference"]),
    decay=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 9999),
)
def test_loss_and_gradients_equal_brute_force_over_all_alignments(T, labels, objective, implementation, decay, seed):
    states, weight, blank, labels = problem(T, labels, seed)
    lengths = torch.tensor([labels.shape[1]])
    got = anchor_losses(
        states,
        weight,
        blank,
        labels,
        lengths,
        objective=objective,
        decay=decay,
        implementation=implementation,
    )
    want = brute_loss(states, weight, blank, labels, objective, decay)
    assert bool(got.feasible_N[0]) == (want is not None)
    if want is None:
        assert got.loss_N.item() == 0.0
        return
    assert abs(got.loss_N.item() - want.item()) < 1e-10
    got_grads = torch.autograd.grad(got.loss_N.sum(), [states, blank])
    want_grads = torch.autograd.grad(want, [states, blank])
    for g, w in zip(got_grads, want_grads, strict=True):
        assert (g - w).abs().max() < 1e-10


def test_torch_ctc_loss_agrees_through_log_softmax():
    g = torch.Generator().manual_seed(1)
    states = torch.randn(7, 8, 16, generator=g, dtype=torch.float64)
    weight = torch.randn(50, 16, generator=g, dtype=torch.float64)
    blank_vector = torch.randn(16, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 50, (7, 4), generator=g)
    lengths = torch.tensor([4, 3, 0, 1, 4, 2, 4])
    logits = torch.cat([states @ weight.T, (states @ blank_vector).unsqueeze(2)], dim=2)
    want = torch.nn.functional.ctc_loss(
        logits.log_softmax(2).transpose(0, 1), labels, [8] * 7, lengths.tolist(), blank=50, reduction="none"
    )
    got = fused_ctc_loss(states, weight, blank_vector, labels, lengths, reduction="none")
    assert torch.allclose(got, want, atol=1e-10)


def test_a_prefix_probability_sums_the_end_and_its_children():
    states, weight, blank, _ = problem(4, [])
    label = torch.tensor([[0, c] for c in range(V)])
    out = anchor_losses(
        states.expand(V, -1, -1),
        weight,
        blank.expand(V, -1),
        label,
        torch.full((V,), 2),
        objective="prefix_ctc",
    )
    end = -fused_ctc_loss_of([0], states, weight, blank)
    psi = out.log_psi_NU.exp()
    assert abs(psi[0, 0] - (end.exp() + psi[:, 1].sum())) < 1e-12


def fused_ctc_loss_of(labels, states, weight, blank):
    labels = torch.tensor([labels])
    return anchor_losses(states, weight, blank, labels, torch.tensor([labels.shape[1]]), objective="ctc").loss_N[0]


def test_gradcheck_of_the_primitive_with_a_label_twice():
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, D, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, D, generator=g, dtype=torch.float64)
    index = torch.tensor([[0, 0], [1, 2], [4, 4], [3, 0]])
    assert torch.autograd.gradcheck(lambda h: linear_lse_gather(h, weight, index, "chunked"), [hidden])


def test_chunk_size_does_not_matter(monkeypatch):
    from ctcdraft.model.kernels import chunked

    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(23, 8, generator=g)
    weight = torch.randn(31, 8, generator=g)
    index = torch.randint(0, 31, (23, 2), generator=g)
    whole = chunked.forward(hidden, weight, index, True)
    monkeypatch.setattr(chunked, "rows_per_chunk", lambda *_: 5)
    pieces = chunked.forward(hidden, weight, index, True)
    for a, b in zip(whole, pieces, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("objective", ["ctc", "prefix_ctc"])
def test_what_lies_past_a_length_has_no_effect(objective):
    states, weight, blank, labels = problem(5, [0, 1, 2])
    lengths, slots = torch.tensor([2]), torch.tensor([4])
    kwargs = {"objective": objective, "slot_lengths_N": slots}
    clean = anchor_losses(states, weight, blank, labels, lengths, **kwargs)
    labels[0, 2] = -100
    dirty_states = states.detach().clone()
    dirty_states[0, 4] = 77.0
    dirty = anchor_losses(dirty_states, weight, blank, labels, lengths, **kwargs)
    assert torch.equal(clean.loss_N, dirty.loss_N)
    short = anchor_losses(states[:, :4], weight, blank[:, :4], labels[:, :2], lengths, objective=objective)
    assert torch.allclose(clean.loss_N, short.loss_N, atol=1e-12)


def test_infeasible_rows_count_zero_and_give_no_gradient():
    states, weight, blank, labels = problem(3, [1, 1, 0])
    out = anchor_losses(states, weight, blank, labels, torch.tensor([3]), objective="ctc")
    assert not out.feasible_N[0]
    assert out.loss_N[0] == 0
    out = anchor_losses(states, weight, blank, labels, torch.tensor([3]), objective="prefix_ctc")
    assert out.feasible_N[0]
    grad = torch.autograd.grad(out.loss_N.sum(), states)[0]
    assert torch.isfinite(grad).all()
    assert grad.abs().max() > 0


def test_cross_entropy_is_weighted_log_softmax():
    states, weight, _, labels = problem(4, [2, 0, 1])
    lengths = torch.tensor([2])
    got = anchor_losses(states, weight, None, labels, lengths, objective="cross_entropy", decay=0.8)
    log_p = (states[0] @ weight.T).log_softmax(1)
    want = -(log_p[0, 2] + 0.8 * log_p[1, 0]) / 1.8
    assert abs(got.loss_N[0] - want) < 1e-12


def test_huge_logits_and_no_anchors_stay_finite():
    states, weight, blank, labels = problem(4, [0, 1])
    out = anchor_losses(
        states.detach().float() * 1e4,
        weight.float(),
        blank.float(),
        labels,
        torch.tensor([2]),
        objective="ctc",
    )
    assert math.isfinite(out.loss_N.item())
    none = anchor_losses(states[:0], weight, blank[:0], labels[:0], torch.zeros(0, dtype=torch.long), objective="ctc")
    assert none.loss_N.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels_NU": torch.tensor([[0, V]])}, "labels must lie in"),
        ({"labels_NU": torch.tensor([[-1, 0]])}, "labels must lie in"),
        ({"label_lengths_N": torch.tensor([3])}, "label_lengths must lie in"),
        ({"objective": "rnnt"}, "is unknown"),
        ({"blank_NT": None}, "needs a blank"),
    ],
)
def test_bad_labels_and_names_are_refused(change, message):
    states, weight, blank, labels = problem(4, [0, 1])
    arguments = {
        "states_NTD": states,
        "weight_VD": weight,
        "blank_NT": blank,
        "labels_NU": labels,
        "label_lengths_N": torch.tensor([2]),
        "objective": "ctc",
    }
    with pytest.raises(ValueError, match=message):
        anchor_losses(**{**arguments, **change})
