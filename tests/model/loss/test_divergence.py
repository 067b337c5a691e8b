"""Divergences from a teacher: their formulas, their gradients, and what they leave alone."""

import math
from typing import get_args

import pytest
import torch

from ctcdraft.model.loss.divergence import Divergence, Teacher, divergences
from ctcdraft.model.loss.objective import anchor_losses

KINDS = get_args(Divergence)


def distributions(seed, N=3, U=2, V=5):
    torch.manual_seed(seed)
    return torch.randn(N, U, V, dtype=torch.float64).log_softmax(2), torch.randn(N, U, V, dtype=torch.float64)


def spelt_out(kind, p, q):
    """Of two lists of probabilities."""
    pairs = [*zip(p, q, strict=True)]
    overlap = sum(map(min, pairs))
    mean = [(a + b) / 2 for a, b in pairs]

    def kl(one, other):
        return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

    return {
        "kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "js": (kl(p, mean) + kl(q, mean)) / 2,
        "tv": 1 - overlap,
        "acceptance": -math.log(overlap),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [1, 3, 5])
def test_tokens_that_are_not_told_apart_are_one_outcome(kind, K):
    log_p, logits = distributions(0)
    log_q = logits.log_softmax(2)
    got = divergences(kind, log_p[..., :K], log_q[..., :K])
    for n in range(3):
        for u in range(2):
            p, q = ([*one[n, u, :K].exp().tolist(), float(one[n, u, K:].exp().sum())] for one in (log_p, log_q))
            left = slice(None, K if K == 5 else None)
            assert abs(float(got[n, u]) - spelt_out(kind, p[left], q[left])) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [3, 5])
def test_gradients_are_those_of_finite_differences(kind, K):
    log_p, logits = distributions(1)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: divergences(kind, log_p[..., :K], z.log_softmax(2)[..., :K]), logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [3, 5])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind, K):
    """What min(p, q) is made of has an edge there, and the others no slope."""
    log_p, _ = distributions(2)
    logits = (log_p + 0.7).requires_grad_()
    far = divergences(kind, log_p[..., :K], logits.log_softmax(2)[..., :K])
    assert far.abs().max() < 1e-12
    if kind not in ("tv", "acceptance"):
        assert torch.autograd.grad(far.sum(), logits)[0].abs().max() < 1e-12
    step = 1e-3 * torch.randn_like(logits)
    for moved in (logits + step, logits - step):
        assert (divergences(kind, log_p[..., :K], moved.log_softmax(2)[..., :K]) > 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_that_do_not_meet_are_far_apart_and_finite(kind):
    log_p, log_q = torch.full((2, 1, 1, 2), -math.inf).unbind()
    log_p[..., 0] = log_q[..., 1] = 0.0
    log_q.requires_grad_()
    far = divergences(kind, log_p, log_q)
    (gradient,) = torch.autograd.grad(far.sum(), log_q)
    assert far.isfinite().all()
    assert far.item() > 0.6
    assert gradient.isfinite().all()


def slots_problem(N=4, T=3, V=9, D=5):
    torch.manual_seed(3)
    states = torch.randn(N, T, D, dtype=torch.float64, requires_grad=True)
    return states, torch.randn(V, D, dtype=torch.float64), torch.randint(V, (N, T)), torch.tensor([3, 2, 0, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_slots_alone_are_distilled_slot_by_slot(kind):
    states, weight, labels, lengths = slots_problem()
    log_p = torch.randn(4, 3, 9, dtype=torch.float64).log_softmax(2).topk(4, dim=2)
    teacher = Teacher(log_p.indices, log_p.values, kind, share=0.25)
    weight_U = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    given = states, weight, None, labels, lengths
    hard, got = (
        anchor_losses(*given, objective="cross_entropy", weight_U=weight_U, teacher=t).loss_N for t in (None, teacher)
    )
    log_q = (states @ weight.T).log_softmax(2).gather(2, log_p.indices)
    weight_NU = weight_U * (torch.arange(3) < lengths.unsqueeze(1))
    weight_NU = weight_NU / weight_NU.sum(dim=1, keepdim=True).clamp(min=1e-9)
    far = (divergences(kind, log_p.values, log_q) * weight_NU).sum(dim=1)
    assert torch.allclose(got, 0.75 * hard + 0.25 * far, atol=1e-12)


@pytest.mark.parametrize("objective", ["prefix_ctc", "cross_entropy"])
@pytest.mark.parametrize("kind", ["kl", "acceptance"])
def test_a_teacher_who_is_sure_of_the_labels_teaches_the_objective(objective, kind):
    states, weight, labels, lengths = slots_problem()
    blank = None if objective == "cross_entropy" else torch.randn(4, 3, dtype=torch.float64)
    sure = Teacher(labels.unsqueeze(2), torch.zeros(4, 3, 1, dtype=torch.float64), kind)
    given = states, weight, blank, labels, lengths
    want, got = (anchor_losses(*given, objective=objective, teacher=t) for t in (None, sure))
    assert torch.allclose(got.loss_N, want.loss_N, atol=1e-9)
    assert torch.equal(got.log_psi_NU, want.log_psi_NU)
    gradients = [torch.autograd.grad(one.loss_N.sum(), states)[0] for one in (want, got)]
    assert torch.allclose(*gradients, atol=1e-9)


@pytest.mark.parametrize("objective", ["prefix_ctc", "cross_entropy"])
def test_a_micro_batch_without_an_anchor_has_nothing_to_learn(objective):
    """Of none, or of those that nothing can be written for."""
    states, weight, labels, _ = slots_problem()
    for count in (0, 4):
        blank = None if objective == "cross_entropy" else torch.zeros(count, 3, dtype=torch.float64)
        teacher = Teacher(labels[:count].unsqueeze(2), torch.zeros(count, 3, 1, dtype=torch.float64), "acceptance")
        lengths = torch.zeros(count, dtype=torch.long)
        given = states[:count], weight, blank, labels[:count], lengths
        out = anchor_losses(*given, objective=objective, teacher=teacher)
        assert out.loss_N.tolist() == [0.0] * count
