import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctcdraft.model import fused_ctc_loss
from ctcdraft.model.loss.kernels import prefix_lattice
from ctcdraft.model.loss.objective import PrefixLogits, anchor_losses, feasible_prefixes

D, V = 3, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = ["chunked", "reference", "triton"]  # triton: in its interpreter (tests/conftest.py)


@pytest.fixture(scope="module", autouse=True)
def where_the_kernels_run():
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device("cpu")


def problem(T, labels, seed=0, vocab=V):
    g = torch.Generator(DEVICE).manual_seed(seed)
    states = torch.randn(1, T, D, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, D, generator=g, dtype=torch.float64)
    blank = torch.randn(1, T, generator=g, dtype=torch.float64, requires_grad=True)
    return states, weight, blank, torch.tensor([labels], dtype=torch.long).view(1, -1)


def brute_loss(states, weight, blank, labels, objective, weights):
    """None where no alignment writes the labels."""
    table = oracle.outputs(oracle.log_probs(states[0], weight, blank[0]))
    labels = labels[0].tolist()
    if objective == "ctc":
        return -table[tuple(labels)] if tuple(labels) in table else None
    terms = [oracle.log_psi(table, labels[: k + 1]) for k in range(len(labels))]
    terms = [(w, term) for w, term in zip(weights, terms, strict=False) if term is not None]
    if not terms:
        return None
    return -sum(w * term for w, term in terms) / sum(w for w, _ in terms)


@settings(max_examples=40, deadline=None)
@given(
    T=st.sampled_from([1, 2, 2, 3, 3, 4, 4, 5]),
    labels=st.lists(st.integers(0, V - 1), max_size=3),
    objective=st.sampled_from(["ctc", "prefix_ctc"]),
    implementation=st.sampled_from(ALL),
    weights=st.sampled_from([[1.0, 1.0, 1.0], [1.0, 0.8, 0.64], [0.2, 1.0, 0.5]]),
    seed=st.integers(0, 9999),
)
def test_loss_and_gradients_equal_brute_force_over_all_alignments(T, labels, objective, implementation, weights, seed):
    states, weight, blank, labels = problem(T, labels, seed)
    lengths = torch.tensor([labels.shape[1]])
    got = anchor_losses(
        states,
        weight,
        blank,
        labels,
        lengths,
        objective=objective,
        weight_U=torch.tensor(weights[: labels.shape[1]], dtype=torch.float64),
        implementation=implementation,
    )
    want = brute_loss(states, weight, blank, labels, objective, weights)
    assert bool(got.feasible_N[0]) == (want is not None)
    if want is None:
        assert got.loss_N.item() == 0.0
        return
    assert abs(got.loss_N.item() - want.item()) < 1e-12
    got_grads = torch.autograd.grad(got.loss_N.sum(), [states, blank])
    want_grads = torch.autograd.grad(want, [states, blank])
    for g, w in zip(got_grads, want_grads, strict=True):
        assert (g - w).abs().max() < 1e-12


def test_torch_ctc_loss_agrees_through_log_softmax():
    g = torch.Generator(DEVICE).manual_seed(1)
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


def test_decay_weighs_prefixes():
    states, weight, _, labels = problem(3, [2, 0])
    vector = torch.randn(D, dtype=torch.float64)
    blank = (states @ vector).detach()
    got = fused_ctc_loss(states, weight, vector, labels, torch.tensor([2]), objective="prefix_ctc", decay=0.8)
    assert abs(got - brute_loss(states, weight, blank, labels, "prefix_ctc", [1.0, 0.8])) < 1e-12
    even = fused_ctc_loss(states, weight, vector, labels, torch.tensor([2]), objective="prefix_ctc")
    assert abs(got - even) > 1e-3


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


def random_problem(N=23, T=6, U=3, vocab=40, width=7, seed=0, dtype=torch.float64):
    g = torch.Generator(DEVICE).manual_seed(seed)
    states = torch.randn(N, T, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype)
    blank = torch.randn(width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (N, U), generator=g)
    lengths = torch.randint(0, U + 1, (N,), generator=g)
    return states, weight, blank, labels, lengths


@pytest.mark.parametrize("objective", ["ctc", "prefix_ctc"])
@pytest.mark.parametrize("implementation", ALL)
def test_occupancies_sum_to_one_and_logit_gradients_to_zero(objective, implementation):
    """Per slot: the gradient of a logit is p - occupancy, both distributions over vocabulary and blank. Of a prefix
    the slots past its last token are free: there the share that is left has no gradient."""
    N, T, U = 9, 6, 3
    g = torch.Generator(DEVICE).manual_seed(4)
    lse, blank = (torch.randn(N, T, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    logits = (torch.randn(N, T, U + 1, generator=g, dtype=torch.float64) - 2).requires_grad_()
    labels = torch.randint(0, 3, (N, U), generator=g)
    labels[0] = 1  # all equal
    lengths = torch.tensor([3, 1, 2, 3, 3, 2, 1, 3, 2])
    slots = torch.tensor([6, 1, 4, 5, 6, 6, 3, 6, 5])
    again = torch.nn.functional.pad(logits[:, :, :-1], (1, 0))
    given = PrefixLogits(lse.unsqueeze(2), logits, again, blank.unsqueeze(2), labels, slots)
    log_psi, log_end = prefix_lattice(given.emissions()[0], implementation)
    reached = feasible_prefixes(labels, lengths, slots)
    mean_log_psi = log_psi.masked_fill(~reached, 0.0).sum(dim=1) / reached.sum(dim=1).clamp(min=1)
    loss = -log_end.gather(1, lengths.unsqueeze(1)) if objective == "ctc" else -mean_log_psi
    grad_lse, grad_logits, grad_blank = torch.autograd.grad(loss.sum(), [lse, logits, blank])
    valid = torch.arange(T) < slots.unsqueeze(1)
    occupied = (-grad_logits.sum(2) + torch.sigmoid(blank - lse) - grad_blank)[valid]
    if objective == "ctc":
        assert torch.allclose(occupied, torch.ones_like(occupied), atol=1e-12)
    assert (occupied > 0).all()
    assert (occupied < 1 + 1e-12).all()
    assert (grad_lse + grad_logits.sum(2) + grad_blank).abs().max() < 1e-12
    assert not grad_logits[~valid].any()
    assert (grad_logits[valid] <= 0).all()


@pytest.mark.parametrize("objective", ["ctc", "prefix_ctc"])
@pytest.mark.parametrize("implementation", ALL)
def test_rows_do_not_know_each_other(objective, implementation):
    states, weight, blank, labels, lengths = random_problem()
    options = {"objective": objective, "implementation": implementation, "reduction": "none"}
    losses = fused_ctc_loss(states, weight, blank, labels, lengths, **options)
    order = torch.randperm(len(states), generator=torch.Generator(DEVICE).manual_seed(9))
    turned = fused_ctc_loss(states[order], weight, blank, labels[order], lengths[order], **options)
    assert torch.allclose(turned, losses[order], atol=1e-12)
    alone = fused_ctc_loss(states[:1], weight, blank, labels[:1], lengths[:1], **options)
    assert torch.allclose(alone, losses[:1], atol=1e-12)


@pytest.mark.parametrize("implementation", ALL)
def test_nan_in_padding_reaches_nothing(implementation):
    states, weight, blank, labels, lengths = random_problem(N=5)
    slots = torch.tensor([6, 4, 5, 3, 6])
    labels[4], lengths[4], slots[4] = 1, 3, 4  # three equal labels in four slots: infeasible
    padding = torch.arange(6) >= slots.unsqueeze(1)
    padding[4] = True
    outcomes = []
    for content in (0.0, float("nan"), float("inf")):
        dirty = states.detach().masked_fill(padding.unsqueeze(2), content).requires_grad_()
        loss, feasible = fused_ctc_loss(
            dirty, weight, blank, labels, lengths,
            slot_lengths_N=slots, return_feasible=True, implementation=implementation,
        )  # fmt: skip
        assert feasible.tolist() == [True, True, True, True, False]
        outcomes.append((loss, *torch.autograd.grad(loss, [dirty, blank])))
    for other in outcomes[1:]:
        for a, b in zip(outcomes[0], other, strict=True):
            assert torch.equal(a, b)
    assert not outcomes[0][1][padding].any()


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("objective", ["ctc", "prefix_ctc"])
def test_as_many_labels_as_slots_leave_one_alignment(objective, implementation):
    states, weight, blank, labels = problem(3, [2, 0, 1])
    out = anchor_losses(
        states, weight, blank, labels, torch.tensor([3]), objective=objective, implementation=implementation
    )
    log_p = oracle.log_probs(states[0], weight, blank[0])
    assert abs(out.log_psi_NU[0, 2] - log_p[[0, 1, 2], [2, 0, 1]].sum()) < 1e-12


@pytest.mark.parametrize("implementation", ALL)
def test_a_certain_blank(implementation):
    """p(blank) = 1: the empty output is certain, and a label costs what it costs, finitely."""
    states, weight, _, labels = problem(4, [1])
    blank = torch.full((1, 4), 800.0, dtype=torch.float64, requires_grad=True)
    empty = anchor_losses(
        states, weight, blank, labels, torch.tensor([0]), objective="ctc", implementation=implementation
    )
    assert empty.loss_N.item() == 0.0
    out = anchor_losses(
        states, weight, blank, labels, torch.tensor([1]), objective="ctc", implementation=implementation
    )
    log_p = oracle.log_probs(states[0], weight, blank[0])
    want = -torch.logsumexp(log_p[:, 1], 0)  # p = 1 for the blanks around
    assert abs(out.loss_N[0] - want) < 1e-9
    assert torch.isfinite(torch.autograd.grad(out.loss_N.sum(), states)[0]).all()


@pytest.mark.parametrize("implementation", ALL)
def test_reductions_and_weights(implementation):
    states, weight, blank, labels, lengths = random_problem()
    labels[0], lengths[0] = 5, 3
    slots = torch.full_like(lengths, 6)
    slots[0] = 4
    weights = torch.rand(len(states), generator=torch.Generator(DEVICE).manual_seed(3), dtype=torch.float64)
    options = {"slot_lengths_N": slots, "implementation": implementation}
    losses, feasible = fused_ctc_loss(
        states, weight, blank, labels, lengths, reduction="none", return_feasible=True, **options
    )
    assert not feasible[0]
    assert losses[0] == 0
    total = fused_ctc_loss(states, weight, blank, labels, lengths, reduction="sum", **options)
    mean = fused_ctc_loss(states, weight, blank, labels, lengths, **options)
    assert torch.allclose(total, losses.sum())
    assert torch.allclose(mean, losses.sum() / feasible.sum())
    weighted = fused_ctc_loss(states, weight, blank, labels, lengths, weights_N=weights, **options)
    assert torch.allclose(weighted, (losses * weights).sum() / weights[1:].sum())
    got = torch.autograd.grad(weighted, states)[0]
    want = torch.autograd.grad((losses * weights).sum() / weights[1:].sum(), states)[0]
    assert torch.allclose(got, want, atol=1e-12)
    nothing = fused_ctc_loss(states[:1], weight, blank, labels[:1], lengths[:1], slot_lengths_N=slots[:1])
    assert nothing == 0


@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_a_trained_lm_head_gets_the_oracles_gradient(implementation):
    states, weight, blank, labels, lengths = random_problem()
    weight.requires_grad_()
    grads = [
        torch.autograd.grad(
            fused_ctc_loss(states, weight, blank, labels, lengths, objective="prefix_ctc", implementation=name),
            [states, weight, blank],
        )
        for name in (implementation, "reference")
    ]
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("implementation", ["chunked", "triton"])
@pytest.mark.parametrize("objective", ["ctc", "prefix_ctc"])
def test_float32_against_float64_on_the_same_inputs(objective, implementation):
    *given, labels, lengths = random_problem(N=61, T=8, U=4, vocab=700, width=32, dtype=torch.float32)
    outcomes = []
    for name, dtype in ((implementation, torch.float32), ("reference", torch.float64)):
        states, weight, blank = (part.detach().to(dtype) for part in given)
        states.requires_grad_()
        loss = fused_ctc_loss(states, weight, blank, labels, lengths, objective=objective, implementation=name)
        outcomes.append((loss.item(), torch.autograd.grad(loss, states)[0].double()))
    (loss, grad), (want_loss, want_grad) = outcomes
    assert abs(loss - want_loss) < 1e-5 * want_loss
    assert (grad - want_grad).norm() < 1e-5 * want_grad.norm()


def test_bfloat16_is_no_worse_than_torchs_path_in_bfloat16():
    """Gradient of the slot states; torch has no bfloat16 ctc_loss on CPU, so its log_softmax is widened there."""
    states, weight, blank, labels, lengths = random_problem(N=61, T=8, U=4, vocab=3000, width=64, dtype=torch.bfloat16)
    with torch.no_grad():
        states *= 0.25
    exact_states = states.detach().double().requires_grad_()
    exact = fused_ctc_loss(exact_states, weight.double(), blank.detach().double(), labels, lengths, reduction="sum")
    want = torch.autograd.grad(exact, exact_states)[0]
    got = torch.autograd.grad(fused_ctc_loss(states, weight, blank, labels, lengths, reduction="sum"), states)[0]
    logits = torch.cat([states @ weight.T, (states @ blank).unsqueeze(2)], dim=2)
    log_probs = logits.log_softmax(2).float().transpose(0, 1)
    slots = torch.full_like(lengths, 8)
    torch_loss = torch.nn.functional.ctc_loss(log_probs, labels, slots, lengths, blank=3000, reduction="sum")
    torch_grad = torch.autograd.grad(torch_loss, states)[0]
    error, torch_error = ((g.double() - want).norm() / want.norm() for g in (got, torch_grad))
    assert error < 1e-2
    assert torch.cosine_similarity(got.double().flatten(), want.flatten(), dim=0) > 0.9999
    assert error <= torch_error


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
    falling = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    got = anchor_losses(states, weight, None, labels, lengths, objective="cross_entropy", weight_U=falling)
    log_p = (states[0] @ weight.T).log_softmax(1)
    want = -(log_p[0, 2] + 0.8 * log_p[1, 0]) / 1.8
    assert abs(got.loss_N[0] - want) < 1e-12


def soft_problem(T=4, U=3, N=5):
    g = torch.Generator(DEVICE).manual_seed(3)
    states = torch.randn(N, T, D, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64)
    blank = torch.randn(N, T, generator=g, dtype=torch.float64)
    labels = torch.randint(V, (N, U), generator=g, device=DEVICE)
    return states, weight, blank, labels, torch.tensor([3, 2, 1, 3, 2])


@pytest.mark.parametrize("objective", ["prefix_ctc", "cross_entropy"])
def test_soft_labels_that_are_the_labels_own_rows_change_nothing(objective):
    states, weight, blank, labels, lengths = soft_problem()
    blank = None if objective == "cross_entropy" else blank
    hard = anchor_losses(states, weight, blank, labels, lengths, objective=objective)
    soft = anchor_losses(states, weight, blank, labels, lengths, objective=objective, soft_NUD=weight[labels])
    assert torch.allclose(soft.loss_N, hard.loss_N, atol=1e-12)
    assert torch.equal(soft.log_psi_NU, hard.log_psi_NU)
    gradients = [torch.autograd.grad(out.loss_N.sum(), states)[0] for out in (hard, soft)]
    assert torch.allclose(*gradients, atol=1e-12)
    other = anchor_losses(states, weight, blank, labels, lengths, objective=objective, soft_NUD=weight[labels.roll(1)])
    assert not torch.allclose(other.loss_N, hard.loss_N, atol=1e-3)
    assert torch.equal(other.log_psi_NU, hard.log_psi_NU), "psi is of the labels, whatever is learnt"


def test_a_soft_labels_loss_is_the_cross_entropy_against_its_distribution():
    states, weight, _, labels, lengths = soft_problem()
    q_NUV = torch.rand(*labels.shape, V, dtype=torch.float64).softmax(dim=2)
    got = anchor_losses(states, weight, None, labels, lengths, objective="cross_entropy", soft_NUD=q_NUV @ weight)
    entropy_NU = -(q_NUV * (states[:, :3] @ weight.T).log_softmax(dim=2)).sum(dim=2)
    here_NU = torch.arange(3) < lengths.unsqueeze(1)
    want_N = (entropy_NU * here_NU).sum(dim=1) / lengths
    assert torch.allclose(got.loss_N, want_N, atol=1e-12)


def test_soft_labels_of_slots_that_are_not_looked_at_have_no_effect():
    states, weight, blank, labels, lengths = soft_problem()
    soft, slots = weight[labels.roll(1)], torch.tensor([3, 3, 2, 3, 4])
    clean = anchor_losses(
        states, weight, blank, labels, lengths, objective="prefix_ctc", slot_lengths_N=slots, soft_NUD=soft
    )
    with torch.no_grad():
        states[torch.arange(4) >= slots.unsqueeze(1)] = torch.nan
        soft[torch.arange(3) >= lengths.unsqueeze(1)] = torch.nan
    dirty = anchor_losses(
        states, weight, blank, labels, lengths, objective="prefix_ctc", slot_lengths_N=slots, soft_NUD=soft
    )
    assert torch.equal(dirty.loss_N, clean.loss_N)
    assert torch.autograd.grad(dirty.loss_N.sum(), states)[0].isfinite().all()


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
        ({"blank": None}, "needs a blank"),
        ({"slot_lengths_N": torch.tensor([5])}, r"slot_lengths must lie in \[0, 4\]"),
    ],
)
def test_bad_labels_and_names_are_refused(change, message):
    states, weight, blank, labels = problem(4, [0, 1])
    arguments = {
        "states": states,
        "weight_VD": weight,
        "blank": blank,
        "labels_NU": labels,
        "label_lengths_N": torch.tensor([2]),
        "objective": "ctc",
    }
    with pytest.raises(ValueError, match=message):
        anchor_losses(**{**arguments, **{k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in change.items()}})
