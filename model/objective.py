"""Training objectives as small functions of (lse, label logits, blank logit): CTC, prefix CTC, cross-entropy.

Shape suffixes: N anchors, T slots, U labels, W prefixes in a slot's window (`Topology.window`), V vocabulary, D hidden.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ctcdraft.model.kernels import linear_lse_top, prefix_lattice
from ctcdraft.model.kernels.reference import LOG_ZERO
from ctcdraft.model.topology import CTC, DIAGONAL, Topology
from ctcdraft.model.transition import Emissions, Known, Shortlist, again, along_labels, normalised, slot_by_slot

OBJECTIVES = ("ctc", "prefix_ctc", "cross_entropy")
REDUCTIONS = ("mean", "sum", "none")


class AnchorLoss(NamedTuple):
    """loss [N] (0 where infeasible), feasible [N] bool, log_psi [N, U] of the label prefixes, and over feasible
    anchors the mean probability of the blank per slot [T] where the loss looks at it (`slots_looked_at`; 0 without a
    blank; before a transition, and where no band rules it out) and how often the shortlist of slot t holds label t + 1,
    where there is one (0 without a transition).

    log_psi has min(T, U) columns for cross-entropy, and is -inf in infeasible rows.
    """

    loss_N: Tensor
    feasible_N: Tensor
    log_psi_NU: Tensor
    blank_rate_T: Tensor
    coverage_T: Tensor


def feasible_prefixes(
    labels_NU: Tensor, label_lengths_N: Tensor, slot_lengths_N: Tensor, topology: Topology = CTC
) -> Tensor:
    """[N, U]: can y_1..y_k be written in the slots at all? It needs k slots, and, where equal neighbours merge, a
    blank per repeat."""
    U = labels_NU.shape[1]
    length_U = torch.arange(1, U + 1, device=labels_NU.device)
    blanks_NU = _repeats(labels_NU, topology).long().cumsum(dim=1)
    return (length_U <= label_lengths_N.unsqueeze(1)) & (length_U + blanks_NU <= slot_lengths_N.unsqueeze(1))


def slots_looked_at(
    slot_lengths_N: Tensor, label_lengths_N: Tensor, objective: str, topology: Topology = CTC
) -> Tensor:
    """[N]: how many slots of each anchor an objective depends on: none by which a band has all labels written."""
    if objective == "prefix_ctc" and topology.band is not None:
        return torch.minimum(slot_lengths_N, label_lengths_N + topology.band)
    return slot_lengths_N


def ctc_losses(
    emissions: Emissions,
    labels_NU: Tensor,
    label_lengths_N: Tensor,
    slot_lengths_N: Tensor,
    *,
    objective: str,
    weight_U: Tensor | None = None,
    topology: Topology = CTC,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`ctc`: -log P(collapse = y_1..y_U). `prefix_ctc`: -sum_k w_k log psi(y_1..y_k).

    weight: w_k, scaled to a sum of 1 over an anchor's feasible prefixes; None: even. topology: that of the emissions.
    Returns loss [N] and log psi [N, U]. Graves et al. 2006, equations 6-8; docs/method.md.
    """
    log_psi_NU, log_end_NS = prefix_lattice(
        emissions.emit_NTU,
        emissions.stay_NTU,
        emissions.blank_NTS,
        _repeats(labels_NU, topology),
        slot_lengths_N,
        implementation,
    )
    if objective == "ctc":
        return -log_end_NS.gather(1, label_lengths_N.unsqueeze(1)).squeeze(1), log_psi_NU
    possible_NU = feasible_prefixes(labels_NU, label_lengths_N, slot_lengths_N, topology)
    return -_weighted_mean(log_psi_NU, possible_NU, weight_U), log_psi_NU


def plain_emissions(
    lse_NT: Tensor, logits_NTW: Tensor, blank_NT: Tensor, labels: int, topology: Topology = CTC
) -> Emissions:
    """Without a transition. logits[n, t, w] is slot t's logit of the label that comes next behind the w-th prefix of
    its window; the blank is a logit of its own: lse over vocabulary and blank = logaddexp(lse, blank)."""
    uncovered_NT = torch.zeros_like(lse_NT, dtype=torch.bool)
    once = blank_NT.unsqueeze(2), lse_NT.unsqueeze(2)  # the same behind every prefix
    return normalised(logits_NTW, again(logits_NTW), *once, labels, topology, uncovered_NT)


def cross_entropy_losses(
    log_p_NK: Tensor, label_lengths_N: Tensor, *, weight_U: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Slot k predicts label k, alone: -sum_k w_k log p_k(y_k), with weights as in `ctc_losses`.

    Column k holds slot k's log-probability of label k, for the first K = min(T, U) slots.
    Returns loss [N] and the log-probability [N, K] of the label prefixes (a product of slots).
    """
    slot_K = torch.arange(log_p_NK.shape[1], device=log_p_NK.device)
    loss_N = -_weighted_mean(log_p_NK, slot_K < label_lengths_N.unsqueeze(1), weight_U)
    return loss_N, log_p_NK.cumsum(dim=1)


def anchor_losses(
    states_NTD: Tensor,
    weight_VD: Tensor,
    blank_NT: Tensor | None,
    labels_NU: Tensor,
    label_lengths_N: Tensor,
    *,
    objective: str,
    weight_U: Tensor | None = None,
    slot_lengths_N: Tensor | None = None,
    known: Known | None = None,
    topology: Topology = CTC,
    implementation: str = "auto",
) -> AnchorLoss:
    """The loss of every anchor from its slot states and the LM head; known: with a transition, along the labels.

    weight [U]: of a prefix or slot, None: even (`ctc_losses`). blank [N, T] is None exactly for `cross_entropy`.
    Anchors without labels, or whose labels no alignment can write, and slots past slot_lengths, or by which a band has
    all labels written, are dropped before the GEMM: whatever they hold, NaN included, has no effect. Labels past an
    anchor's length are not looked at. Raises ValueError on labels outside [0, V), lengths outside [0, U] or [0, T], an
    unknown objective, or a blank that does not fit it.
    """
    N, T, _ = states_NTD.shape
    _check_blank(objective, blank_NT)
    labels_NU = _checked_labels(labels_NU, label_lengths_N, weight_VD.shape[0])
    slots_N = _checked_slots(slot_lengths_N, label_lengths_N, T)
    feasible_N = _feasible(objective, labels_NU, label_lengths_N, slots_N, topology)
    slots_N = slots_looked_at(slots_N, label_lengths_N, objective, topology)
    kept = feasible_N.nonzero().squeeze(1)
    valid_NT = torch.arange(T, device=kept.device) < slots_N[kept].unsqueeze(1)
    rows = _Rows(
        states_NTD if len(kept) == N else states_NTD[kept],
        weight_VD,
        labels_NU[kept],
        label_lengths_N[kept],
        slots_N[kept],
        None if bool(valid_NT.all()) else valid_NT,
        known,
        topology,
        implementation,
    )
    if known is not None and len(kept) < N:
        rows = rows._replace(known=known.rows(kept))
    blank_rate_T = rows.lengths_N.new_zeros(T, dtype=torch.float32)
    if blank_NT is None:
        loss, log_psi, coverage_K = _slot_losses(rows, weight_U)
        coverage_T = F.pad(coverage_K, (0, T - len(coverage_K)))
    else:
        loss, log_psi, blank_rate_T, coverage_T = _blank_losses(rows, blank_NT[kept], objective, weight_U)
    every_psi_NU = log_psi.new_full((N, log_psi.shape[1]), float("-inf"))
    return AnchorLoss(
        loss.new_zeros(N).index_copy(0, kept, loss),
        feasible_N,
        every_psi_NU.index_copy(0, kept, log_psi),
        blank_rate_T,
        coverage_T,
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
    int64, label_lengths [N]; objective `ctc` or `prefix_ctc`, with weights of decay^(k-1). Infeasible anchors count
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
    feasible_N = _feasible(objective, labels_NU, label_lengths_N, slots_N, CTC)
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
        weight_U=decay ** torch.arange(labels_NU.shape[1], device=labels_NU.device, dtype=torch.float64),
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


def _repeats(labels_NU: Tensor, topology: Topology) -> Tensor:
    """Labels that equal the one before, which merging would take for one."""
    repeat_NU = torch.zeros_like(labels_NU, dtype=torch.bool)
    if topology.merge:
        repeat_NU[:, 1:] = labels_NU[:, 1:] == labels_NU[:, :-1]
    return repeat_NU


def _weighted_mean(values_NK: Tensor, valid_NK: Tensor, weight_U: Tensor | None) -> Tensor:
    weight_NK = valid_NK.to(values_NK.dtype)
    if weight_U is not None:
        weight_NK = weight_NK * weight_U[: values_NK.shape[1]].to(weight_NK)
    weight_NK = weight_NK / weight_NK.sum(dim=1, keepdim=True).clamp(min=torch.finfo(values_NK.dtype).tiny)
    return (weight_NK * values_NK.masked_fill(~valid_NK, 0.0)).sum(dim=1)


def _feasible(
    objective: str, labels_NU: Tensor, lengths_N: Tensor, slot_lengths_N: Tensor, topology: Topology
) -> Tensor:
    possible_NU = feasible_prefixes(labels_NU, lengths_N, slot_lengths_N, topology)
    if objective == "ctc":
        ends_N = True if topology.band is None else slot_lengths_N - lengths_N <= topology.band
        return (possible_NU.sum(dim=1) == lengths_N) & ends_N
    return possible_NU.any(dim=1) if objective == "prefix_ctc" else torch.minimum(lengths_N, slot_lengths_N) > 0


class _Rows(NamedTuple):
    """The anchors that are left to compute: valid_NT None where all slots count."""

    states_NTD: Tensor
    weight_VD: Tensor
    labels_NU: Tensor
    lengths_N: Tensor
    slots_N: Tensor
    valid_NT: Tensor | None
    known: Known | None
    topology: Topology
    implementation: str


def _blank_losses(
    rows: _Rows, blank_NT: Tensor, objective: str, weight_U: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss [N] and log psi [N, U] of CTC and prefix CTC, the blank's rate and the coverage [T]."""
    shortlist, logits = _gather(rows, rows.valid_NT, blank_NT.shape[1], rows.topology)
    blank = blank_NT.to(logits.dtype)
    blank = blank if rows.valid_NT is None else blank.masked_fill(~rows.valid_NT, LOG_ZERO)
    if rows.known is None:
        emissions = plain_emissions(shortlist.lse_NT, logits, blank, rows.labels_NU.shape[1], rows.topology)
    else:
        labels, slots = rows.labels_NU, rows.slots_N
        options = rows.topology, rows.implementation
        emissions = along_labels(rows.known, shortlist, logits, labels, slots, blank, *options)
    loss, log_psi = ctc_losses(
        emissions,
        rows.labels_NU,
        rows.lengths_N,
        rows.slots_N,
        objective=objective,
        weight_U=weight_U,
        topology=rows.topology,
        implementation=rows.implementation,
    )
    count_T = rows.slots_N.new_tensor(len(blank)) if rows.valid_NT is None else rows.valid_NT.sum(dim=0)
    rate_T = torch.sigmoid(blank - shortlist.lse_NT).detach().sum(dim=0) / count_T.clamp(min=1)
    return loss, log_psi, rate_T, _coverage(emissions.covered_NT, rows.lengths_N)


def _slot_losses(rows: _Rows, weight_U: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of the first K = min(T, U) slots; those past the labels are left out of the GEMM."""
    K = min(rows.states_NTD.shape[1], rows.labels_NU.shape[1])
    lengths_N, labels_NK = torch.minimum(rows.lengths_N, rows.slots_N), rows.labels_NU[:, :K]
    valid_NK = torch.arange(K, device=labels_NK.device) < lengths_N.unsqueeze(1)
    shortlist, logits_NK1 = _gather(rows, valid_NK, K, DIAGONAL)
    covered_NK = torch.zeros_like(valid_NK)
    if rows.known is None:
        log_p_NK = logits_NK1.squeeze(2) - shortlist.lse_NT
    else:
        known = rows.known.first(K)
        log_p_NK, covered_NK = slot_by_slot(known, shortlist, logits_NK1, labels_NK, lengths_N, rows.implementation)
    return *cross_entropy_losses(log_p_NK, lengths_N, weight_U=weight_U), _coverage(covered_NK, lengths_N)


def _coverage(covered_NT: Tensor, lengths_N: Tensor) -> Tensor:
    """How often slot t holds label t + 1 of those that there are [T]."""
    there_NT = torch.arange(covered_NT.shape[1], device=lengths_N.device) < lengths_N.unsqueeze(1)
    return (covered_NT & there_NT).sum(dim=0) / there_NT.sum(dim=0).clamp(min=1)


def _gather(rows: _Rows, valid_NT: Tensor | None, T: int, topology: Topology) -> tuple[Shortlist, Tensor]:
    """lse and shortlist of the first T slots, and [N, T, W] their logits of the label that comes next; of the valid
    slots (None: all), 0 in the others."""
    N, U, top_k = len(rows.labels_NU), rows.labels_NU.shape[1], 0 if rows.known is None else rows.known.shortlist
    window_TW = topology.window(T, U).to(rows.labels_NU.device)
    W = window_TW.shape[1]
    index_NTX = F.pad(rows.labels_NU, (0, 1))[:, window_TW]  # behind all of them any token, which is not looked at
    J = 0
    if rows.known is not None:
        J = rows.known.successor_NSJ.shape[2]
        successor_NTX = rows.known.successor_NSJ[:, window_TW].flatten(2).clamp(min=0)
        index_NTX = torch.cat([index_NTX, successor_NTX], dim=2)
    states_MD, index_MX = rows.states_NTD[:, :T].flatten(0, 1), index_NTX.flatten(0, 1)
    if valid_NT is None:
        found = linear_lse_top(states_MD, rows.weight_VD, index_MX, top_k, rows.implementation)
    else:
        at = valid_NT.flatten().nonzero().squeeze(1)
        few = linear_lse_top(states_MD[at], rows.weight_VD, index_MX[at], top_k, rows.implementation)
        found = tuple(part.new_zeros(N * T, *part.shape[1:]).index_copy(0, at, part) for part in few)  # type: ignore[assignment]
    lse_NT, logits_NTX, top_NTK, top_index_NTK = (part.unflatten(0, (N, T)) for part in found)
    label_NTW, successor_NTX = logits_NTX.split([W, W * J], dim=2)
    return Shortlist(top_index_NTK, top_NTK, lse_NT, successor_NTX.unflatten(2, (W, J))), label_NTW


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
