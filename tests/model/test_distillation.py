import pytest
import torch

from ctcdraft.model.distillation import DIVERGENCES, distillation_losses
from ctcdraft.model.kernels import linear_lse_gather


def full_divergence(p, q, divergence):
    """Of whole distributions [M, V], written out."""
    middle = (p + q) / 2
    return {
        "forward_kl": (p * (p / q).log()).sum(1),
        "reverse_kl": (q * (q / p).log()).sum(1),
        "jensen_shannon": ((p * (p / middle).log()).sum(1) + (q * (q / middle).log()).sum(1)) / 2,
        "total_variation": (p - q).abs().sum(1) / 2,
    }[divergence]


def grouped(probs, index):
    """[M, K + 1]: the listed tokens, and all others as one outcome."""
    listed = probs.gather(1, index)
    return torch.cat([listed, 1 - listed.sum(1, keepdim=True)], dim=1)


@pytest.fixture
def distributions():
    g = torch.Generator().manual_seed(0)
    student = torch.randn(6, 9, generator=g, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, 9, generator=g, dtype=torch.float64)
    return student, teacher


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("K", [1, 4, 8])
def test_value_and_gradient_over_the_listed_tokens_and_the_rest(distributions, divergence, K):
    student, teacher = distributions
    log_p = teacher.log_softmax(1)
    top, index = log_p.topk(K, dim=1)
    got = distillation_losses(student.logsumexp(1), student.gather(1, index), top, divergence)
    want = full_divergence(grouped(log_p.exp(), index), grouped(student.softmax(1), index), divergence)
    assert torch.allclose(got, want, atol=1e-12)
    grads = [torch.autograd.grad(loss.sum(), student, retain_graph=True)[0] for loss in (got, want)]
    assert torch.allclose(*grads, atol=1e-12)
    whole = full_divergence(log_p.exp(), student.softmax(1), divergence)
    assert (got <= whole + 1e-12).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_same_distribution_costs_nothing_and_the_whole_vocabulary_everything(distributions, divergence):
    student, teacher = distributions
    log_p, everything = teacher.log_softmax(1), torch.arange(9).expand(6, 9)
    same = distillation_losses(teacher.logsumexp(1), teacher, log_p, divergence)
    assert same.abs().max() < 1e-12
    got = distillation_losses(student.logsumexp(1), student.gather(1, everything), log_p, divergence)
    want = full_divergence(log_p.exp(), student.softmax(1), divergence)
    assert torch.allclose(got, want, atol=1e-9)  # "any other" is kept at machine epsilon


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_a_teachers_top_tokens_come_from_the_same_primitive(divergence, implementation):
    """The teacher's logits by one pass, the student's by another."""
    g = torch.Generator().manual_seed(1)
    teacher_hidden, hidden = (torch.randn(5, 4, generator=g, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(50, 4, generator=g, dtype=torch.float64)
    hidden.requires_grad_()
    index = (teacher_hidden @ weight.T).topk(6, dim=1).indices
    lse, top = linear_lse_gather(teacher_hidden, weight, index, implementation)
    student_lse, logits = linear_lse_gather(hidden, weight, index, implementation)
    loss = distillation_losses(student_lse, logits, top - lse.unsqueeze(1), divergence)
    p, q = ((h @ weight.T).softmax(1) for h in (teacher_hidden, hidden))
    want = full_divergence(grouped(p, index), grouped(q, index), divergence)
    assert torch.allclose(loss, want, atol=1e-12)
    grads = [torch.autograd.grad(part.sum(), hidden, retain_graph=True)[0] for part in (loss, want)]
    assert torch.allclose(*grads, atol=1e-12)


def test_an_unknown_divergence_is_refused():
    with pytest.raises(ValueError, match="is unknown"):
        distillation_losses(torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, 1), "hellinger")
