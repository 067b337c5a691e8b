"""Training objectives as small functions of (lse, label logits, blank logit): CTC, prefix CTC, cross-entropy.

Shape suffixes: N anchors, T slots, U labels, V vocabulary, D hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ctcdraft.model.kernels import linear_lse_gather, prefix_lattice
from ctcdraft.model.kernels.reference import LOG_ZERO

OBJECTIVES = ("ctc", "prefix_ctc", "cross_entropy")
REDUCTIONS = ("mean", "sum", "none")


class AnchorLoss(NamedTuple):
    """loss [N] (0 where infeasible), feasible [N] bool, log_psi [N, U] of the label prefixes, and the mean
    probability of the blank per slot [T] over feasible anchors (0 without a blank).

    log_psi has min(T, U) columns for cross-entropy, and is -inf in infeasible rows.
    """

    loss_N: Tensor
    feasible_N: Tensor
    log_psi_NU: Tensor
    blank_rate_T: Tensor


def feasible_prefixes(labels_NU: Tensor, label_lengths_N: Tensor, slot_lengths_N: Tensor) -> Tensor:
    """[N, U]: can y_1..y_k be written in the slots at all? It needs k slots, and a blank per repeat."""
    U = labels_NU.shape[1]
    length_U = torch.arange(1, U + 1, device=labels_NU.device)
    needed_NU = length_U + _repeats(labels_NU).long().cumsum(dim=1)
    return (length_U <= label_lengths_N.unsqueeze(1)) & (needed_NU <= slot_lengths_N.unsqueeze(1))


def ctc_losses(
    lse_NT: Tensor,
    label_logits_NTU: Tensor,
    blank_NT: Tensor,
    labels_NU: Tensor,
    label_lengths_N: Tensor,
    slot_lengths_N: Tensor,
    *,
    objective: str,
    decay: float = 1.0,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`ctc`: -log P(collapse = y_1..y_U). `prefix_ctc`: -sum_k w_k log psi(y_1..y_k), w_k ~ decay^(k-1).

    label_logits[n, t, k] is slot t's logit of label k. The blank is a logit of its own:
    lse over vocabulary and blank = logaddexp(lse, blank). Weights sum to 1 over an anchor's feasible
    prefixes. Returns loss [N] and log psi [N, U]. Graves et al. 2006, equations 6-8; docs/method.md.
    """
    N, T, U = label_logits_NTU.shape
    total_NT = torch.logaddexp(lse_NT, blank_NT)
    log_emit_NTU = label_logits_NTU - total_NT.unsqueeze(2)
    log_blank_NTS = (blank_NT - total_NT).unsqueeze(2).expand(N, T, U + 1)
    log_psi_NU, log_end_NS = prefix_lattice(
        log_emit_NTU, log_emit_NTU, log_blank_NTS, _repeats(labels_NU), slot_lengths_N, implementation
    )
    if objective == "ctc":
        return -log_end_NS.gather(1, label_lengths_N.unsqueeze(1)).squeeze(1), log_psi_NU
    possible_NU = feasible_prefixes(labels_NU, label_lengths_N, slot_lengths_N)
    return -_weighted_mean(log_psi_NU, possible_NU, decay), log_psi_NU


def cross_entropy_losses(
    lse_NK: Tensor, label_logits_NK: Tensor, label_lengths_N: Tensor, *, decay: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Slot k predicts label k, alone: -sum_k w_k log p_k(y_k), w_k ~ decay^(k-1), summing to 1.

    Column k holds slot k's lse and its logit of label k, for the first K = min(T, U) slots.
    Returns loss [N] and the log-probability [N, K] of the label prefixes (a product of slots).
    """
    log_p_NK = label_logits_NK - lse_NK
    slot_K = torch.arange(log_p_NK.shape[1], device=log_p_NK.device)
    loss_N = -_weighted_mean(log_p_NK, slot_K < label_lengths_N.unsqueeze(1), decay)
    return loss_N, log_p_NK.cumsum(dim=1)


def anchor_losses(
    states_NTD: Tensor,
    weight_VD: Tensor,
    blank_NT: Tensor | None,
    labels_NU: Tensor,
    label_lengths_N: Tensor,
    *,
    objective: str,
    decay: float = 1.0,
    slot_lengths_N: Tensor | None = None,
    implementation: str = "auto",
) -> AnchorLoss:
    """The loss of every anchor from its slot states and the LM head.

    blank [N, T] is None exactly for `cross_entropy`. Anchors without labels, or whose labels no alignment can
    write, and slots past slot_lengths are dropped before the GEMM: whatever they hold, NaN included, has no
    effect. Labels past an anchor's length are not looked at. Raises ValueError on labels outside [0, V),
    lengths outside [0, U] or [0, T], an unknown objective, or a blank that does not fit it.
    """
    N, T, _ = states_NTD.shape
    _check_blank(objective, blank_NT)
    labels_NU = _checked_labels(labels_NU, label_lengths_N, weight_VD.shape[0])
    slots_N = _checked_slots(slot_lengths_N, label_lengths_N, T)
    feasible_N = _feasible(objective, labels_NU, label_lengths_N, slots_N)
    kept = feasible_N.nonzero().squeeze(1)
    states = states_NTD if len(kept) == N else states_NTD[kept]
    labels, lengths, slots = labels_NU[kept], label_lengths_N[kept], slots_N[kept]
    if blank_NT is None:
        loss, log_psi = _slot_losses(states, weight_VD, labels, torch.minimum(lengths, slots), decay, implementation)
        blank_rate_T = loss.new_zeros(T)
    else:
        full = slot_lengths_N is None
        valid = None if full else torch.arange(T, device=slots.device) < slots.unsqueeze(1)
        lse, logits = _gather(states, valid, weight_VD, labels.unsqueeze(1).expand(-1, T, -1), implementation)
        blank = blank_NT[kept].to(lse.dtype)
        blank = blank if valid is None else blank.masked_fill(~valid, LOG_ZERO)
        loss, log_psi = ctc_losses(
            lse, logits, blank, labels, lengths, slots, objective=objective, decay=decay, implementation=implementation
        )
        blank_rate_T = torch.sigmoid(blank - lse).detach().sum(dim=0) / max(1, len(kept))
    every_psi_NU = log_psi.new_full((N, log_psi.shape[1]), float("-inf"))
    return AnchorLoss(
        loss.new_zeros(N).index_copy(0, kept, loss),
        feasible_N,
        every_psi_NU.index_copy(0, kept, log_psi),
        blank_rate_T,
    )


def fused_ctc_loss(
    hidden_NTD: Tensor,
    weight_VD: Tensor,
    blank_D: Tensor,
    labels_NU: Tensor,
    label_lengths_N: Tensor,
    *,
    blank_bias: Tensor | None = None,
    slot_lengths_N: Tensor | None = None,
    weights_N: Tensor | None = None,
    objective: str = "ctc",
    decay: float = 1.0,
    reduction: str = "mean",
    return_feasible: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """CTC loss of T slot states per anchor against an LM head, without [N, T, V] logits.

    hidden [N, T, D], weight [V, D] (frozen, or trained where it requires a gradient), blank [D], labels [N, U]
    int64, label_lengths [N]; objective `ctc` or `prefix_ctc` (decay: see ctc_losses). Infeasible anchors count
    0. `mean` is the mean over feasible anchors weighted by weights [N] (default 1), `sum` their weighted sum,
    `none` the weighted losses [N]. With return_feasible the answer is (loss, feasible [N] bool).
    Raises ValueError on bad labels, lengths, objective, reduction or implementation.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown: choose one of {REDUCTIONS}")
    if objective not in ("ctc", "prefix_ctc"):
        raise ValueError(f"objective={objective!r} is unknown: choose ctc or prefix_ctc")
    T, V = hidden_NTD.shape[1], weight_VD.shape[0]
    labels_NU = _checked_labels(labels_NU, label_lengths_N, V)
    slots_N = _checked_slots(slot_lengths_N, label_lengths_N, T)
    feasible_N = _feasible(objective, labels_NU, label_lengths_N, slots_N)
    used_NT = (torch.arange(T, device=slots_N.device) < slots_N.unsqueeze(1)) & feasible_N.unsqueeze(1)
    if not bool(used_NT.all()):  # a NaN in padding would reach the gradient of the blank as 0 * NaN
        hidden_NTD = hidden_NTD.masked_fill(~used_NT.unsqueeze(2), 0.0)
    blank_NT = hidden_NTD @ blank_D
    if blank_bias is not None:
        blank_NT = blank_NT + blank_bias
    out = anchor_losses(
        hidden_NTD,
        weight_VD,
        blank_NT,
        labels_NU,
        label_lengths_N,
        objective=objective,
        decay=decay,
        slot_lengths_N=slot_lengths_N,
        implementation=implementation,
    )
    loss = _reduced(out, weights_N, reduction)
    return (loss, out.feasible_N) if return_feasible else loss


def _reduced(out: AnchorLoss, weights_N: Tensor | None, reduction: str) -> Tensor:
    weights_N = torch.ones_like(out.loss_N) if weights_N is None else weights_N.to(out.loss_N.dtype)
    losses_N = out.loss_N * weights_N
    if reduction == "none":
        return losses_N
    total_weight = (weights_N * out.feasible_N).sum()
    return losses_N.sum() if reduction == "sum" else losses_N.sum() / total_weight.where(total_weight > 0, 1.0)


def _repeats(labels_NU: Tensor) -> Tensor:
    repeat_NU = torch.zeros_like(labels_NU, dtype=torch.bool)
    repeat_NU[:, 1:] = labels_NU[:, 1:] == labels_NU[:, :-1]
    return repeat_NU


def _weighted_mean(values_NK: Tensor, valid_NK: Tensor, decay: float) -> Tensor:
    powers_K = torch.arange(values_NK.shape[1], device=values_NK.device, dtype=values_NK.dtype)
    weight_NK = (decay**powers_K) * valid_NK
    weight_NK = weight_NK / weight_NK.sum(dim=1, keepdim=True).clamp(min=torch.finfo(values_NK.dtype).tiny)
    return (weight_NK * values_NK.masked_fill(~valid_NK, 0.0)).sum(dim=1)


def _feasible(objective: str, labels_NU: Tensor, lengths_N: Tensor, slot_lengths_N: Tensor) -> Tensor:
    possible_NU = feasible_prefixes(labels_NU, lengths_N, slot_lengths_N)
    if objective == "ctc":
        return possible_NU.sum(dim=1) == lengths_N
    return possible_NU.any(dim=1) if objective == "prefix_ctc" else torch.minimum(lengths_N, slot_lengths_N) > 0


def _slot_losses(
    states_NTD: Tensor, weight_VD: Tensor, labels_NU: Tensor, lengths_N: Tensor, decay: float, implementation: str
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the first min(T, U) slots; those past the labels are left out of the GEMM."""
    width = min(states_NTD.shape[1], labels_NU.shape[1])
    valid = torch.arange(width, device=labels_NU.device) < lengths_N.unsqueeze(1)
    index_NTK = labels_NU[:, :width].unsqueeze(2)
    lse, logits = _gather(states_NTD[:, :width], valid, weight_VD, index_NTK, implementation)
    return cross_entropy_losses(lse, logits.squeeze(2), lengths_N, decay=decay)


def _gather(
    states_NTD: Tensor, valid_NT: Tensor | None, weight_VD: Tensor, index_NTK: Tensor, implementation: str
) -> tuple[Tensor, Tensor]:
    """lse [N, T] and logits [N, T, K] of the valid slots (None: all), 0 in the others."""
    N, T, K = index_NTK.shape
    states_MD, index_MK = states_NTD.flatten(0, 1), index_NTK.reshape(N * T, K)
    if valid_NT is None:
        lse_M, logits_MK = linear_lse_gather(states_MD, weight_VD, index_MK, implementation)
    else:
        rows = valid_NT.flatten().nonzero().squeeze(1)
        lse_R, logits_RK = linear_lse_gather(states_MD[rows], weight_VD, index_MK[rows], implementation)
        lse_M = lse_R.new_zeros(N * T).index_copy(0, rows, lse_R)
        logits_MK = logits_RK.new_zeros(N * T, K).index_copy(0, rows, logits_RK)
    return lse_M.view(N, T), logits_MK.view(N, T, K)


def _checked_slots(slot_lengths_N: Tensor | None, label_lengths_N: Tensor, T: int) -> Tensor:
    if slot_lengths_N is None:
        return torch.full_like(label_lengths_N, T)
    if slot_lengths_N.numel() and not 0 <= int(slot_lengths_N.min()) <= int(slot_lengths_N.max()) <= T:
        raise ValueError(f"slot_lengths must lie in [0, {T}]")
    return slot_lengths_N


def _check_blank(objective: str, blank_NT: Tensor | None) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is unknown: choose one of {OBJECTIVES}")
    if (blank_NT is None) != (objective == "cross_entropy"):
        raise ValueError(f"objective={objective}: {'needs a' if blank_NT is None else 'has no'} blank logit")


def _checked_labels(labels_NU: Tensor, lengths_N: Tensor, vocab: int) -> Tensor:
    U = labels_NU.shape[1]
    if lengths_N.numel() and not 0 <= int(lengths_N.min()) <= int(lengths_N.max()) <= U:
        raise ValueError(f"label_lengths must lie in [0, {U}]")
    present_NU = torch.arange(U, device=labels_NU.device) < lengths_N.unsqueeze(1)
    labels_NU = labels_NU.where(present_NU, 0)
    if labels_NU.numel() and not 0 <= int(labels_NU.min()) <= int(labels_NU.max()) < vocab:
        raise ValueError(f"labels must lie in [0, {vocab}), found {labels_NU.min()}..{labels_NU.max()}")
    return labels_NU
