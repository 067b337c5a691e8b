"""Divergences between what the base says behind a known prefix and what a head drafts there (Zhou et al. 2024,
DistillSpec, arXiv 2310.08461, table 1).

p: the base's distribution, q: the head's, q(c | g) = psi(gc) / psi(g). alpha = sum_c min(p_c, q_c) is how often a token
drawn from q is accepted (Leviathan et al. 2023, corollary 3.6), and total variation is 1 - alpha. `acceptance` is
-log alpha (Samarin et al. 2026, LK losses, arXiv 2602.23881): the same aim with a gradient where the two hardly meet.

Shape suffixes: N anchors, U labels, K tokens that the base finds likeliest, and C = K + 1 with all others as one.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Divergence = Literal["kl", "reverse_kl", "js", "tv", "acceptance"]


class Teacher(NamedTuple):
    """What the base says where it said each label: its likeliest tokens [N, U, K] and their log-probabilities. share:
    how much of an anchor's loss is the divergence from it; the rest is that of the labels."""

    tokens_NUK: Tensor
    log_p_NUK: Tensor
    divergence: Divergence
    share: float = 1.0


def divergences(kind: Divergence, log_p_NUK: Tensor, log_q_NUK: Tensor) -> Tensor:
    """[N, U], in nats, 0 where p and q are equal. What either leaves of 1 is one more outcome."""
    log_p_NUC, log_q_NUC = _with_rest(log_p_NUK), _with_rest(log_q_NUK)
    p_NUC, q_NUC = log_p_NUC.exp(), log_q_NUC.exp()
    if kind == "kl":
        return (p_NUC * (log_p_NUC - log_q_NUC)).sum(dim=-1)
    if kind == "reverse_kl":
        return (q_NUC * (log_q_NUC - log_p_NUC)).sum(dim=-1)
    if kind == "js":
        log_mean_NUC = torch.logaddexp(log_p_NUC, log_q_NUC) - math.log(2.0)
        far_NUC = p_NUC * (log_p_NUC - log_mean_NUC) + q_NUC * (log_q_NUC - log_mean_NUC)
        return far_NUC.sum(dim=-1) / 2
    if kind == "tv":
        return (p_NUC - q_NUC).abs().sum(dim=-1) / 2
    return -torch.minimum(p_NUC, q_NUC).sum(dim=-1).log()


def _with_rest(log_p_NUK: Tensor) -> Tensor:
    """[N, U, C], as far as the dtype can tell a probability from 0."""
    limits = torch.finfo(log_p_NUK.dtype)
    rest_NU1 = 1.0 - log_p_NUK.exp().sum(dim=-1, keepdim=True)
    return torch.cat([log_p_NUK.clamp(min=math.log(limits.tiny)), rest_NU1.clamp(min=limits.eps).log()], dim=-1)
