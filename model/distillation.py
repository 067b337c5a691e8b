"""Distillation from a teacher's top tokens, as small functions of (lse, logits at those tokens).

Both distributions are reduced to K + 1 outcomes: the teacher's K top tokens and "any other". Every divergence of
what is reduced is at most the full one, and equal to it where K = V. Hinton et al. 2015 (arXiv 1503.02531);
DistillSpec (arXiv 2310.08461) for the choice of divergence.

Shape suffixes: M rows, K tokens, X = K + 1 outcomes.
"""

import math

import torch
from torch import Tensor

from ctcdraft.model.kernels.reference import LOG_ZERO

DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")


def distillation_losses(
    lse_M: Tensor, logits_MK: Tensor, teacher_log_probs_MK: Tensor, divergence: str = "forward_kl"
) -> Tensor:
    """The divergence of the student from the teacher, per row, in nats (total variation: in [0, 1]).

    logits [M, K] are the student's at the teacher's K tokens, which must differ from each other; teacher_log_probs
    [M, K] are normalised over the whole vocabulary. p is the teacher, q the student: `forward_kl` KL(p || q),
    `reverse_kl` KL(q || p), `jensen_shannon` the mean of both against (p + q) / 2, `total_variation`
    sum |p - q| / 2. Raises ValueError on an unknown divergence.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence={divergence!r} is unknown: choose one of {DIVERGENCES}")
    p_MX = _with_others(teacher_log_probs_MK.to(lse_M.dtype))
    q_MX = _with_others(logits_MK - lse_M.unsqueeze(1))
    if divergence == "forward_kl":
        return _kl(p_MX, q_MX)
    if divergence == "reverse_kl":
        return _kl(q_MX, p_MX)
    if divergence == "total_variation":
        return (p_MX.exp() - q_MX.exp()).abs().sum(dim=1) / 2
    middle_MX = torch.logaddexp(p_MX, q_MX) - math.log(2.0)
    return (_kl(p_MX, middle_MX) + _kl(q_MX, middle_MX)) / 2


def _with_others(log_probs_MK: Tensor) -> Tensor:
    """One more column: log(1 - sum), kept away from log 0, where it has no gradient."""
    listed_M = log_probs_MK.logsumexp(dim=1)
    smallest = torch.finfo(listed_M.dtype).eps
    others_M = torch.log(-torch.expm1(listed_M.clamp(max=-smallest)))
    return torch.cat([log_probs_MK.clamp(min=LOG_ZERO), others_M.unsqueeze(1)], dim=1)


def _kl(a_MX: Tensor, b_MX: Tensor) -> Tensor:
    return (a_MX.exp() * (a_MX - b_MX)).sum(dim=1)
