"""Training objectives, from slot states to the loss: CTC, prefix CTC, cross-entropy.

Shape suffixes: N anchors, T slots, U labels, W prefixes in a slot's window (`Topology.window`), V vocabulary, D hidden,
K tokens of a teacher.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lattice.topology import CTC, ONE_TO_ONE, Topology
from .divergence import Teacher, divergences
from .kernels import linear_lse_gather, prefix_lattice
from .reference import LOG_ZERO, Emissions, prefix_states

OBJECTIVES = ("ctc", "prefix_ctc", "cross_entropy")
REDUCTIONS = ("mean", "sum", "none")


class AnchorLoss(NamedTuple):
    """loss [N] (0 where infeasible), feasible [N] bool, log_psi [N, U] of the label prefixes, and over feasible
    anchors the mean probability of the blank per slot [T] where the loss looks at it (0 without a
    blank; behind as many labels as there were slots before, and where no band rules it out).

    log_psi has min(T, U) columns for cross-entropy, and is -inf in infeasible rows.
    """

    loss_N: Tensor
    feasible_N: Tensor
    log_psi_NU: Tensor
    blank_rate_T: Tensor


def feasible_prefixes(
    labels_NU: Tensor, label_lengths_N: Tensor, slot_lengths_N: Tensor, topology: Topology = CTC
) -> Tensor:
    """[N, U]: can y_1..y_k be written in the slots at all? It needs k slots, and, where equal neighbours merge, a
    blank per repeat."""
    U = labels_NU.shape[1]
    length_U = torch.arange(1, U + 1, device=labels_NU.device)
    blanks_NU = _repeats(labels_NU, topology).long().cumsum(dim=1)
    return (length_U <= label_lengths_N.unsqueeze(1)) & (length_U + blanks_NU <= slot_lengths_N.unsqueeze(1))


class PrefixLogits(NamedTuple):
    """Logits of slots behind the prefixes of their windows: of the label that comes next, of the one that came last,
    and of the blank, a logit of its own; lse: over the vocabulary without the blank. Blank and lse have one column
    where they are the same behind all prefixes. slot_lengths: see `anchor_losses`.
    """

    lse_NTW: Tensor
    emit_NTW: Tensor
    stay_NTW: Tensor
    blank_NTW: Tensor
    labels_NU: Tensor
    slot_lengths_N: Tensor
    topology: Topology = CTC

    def emissions(self) -> tuple[Emissions, Tensor]:
        """Their log-probabilities behind every prefix, and the normaliser [N, T, W] of all logits there.

        Behind s tokens and before slot t (from 0), t - s slots have written no new one. Behind as many as the band is
        wide the next has to: the blank is left out of its normaliser, and no alignment goes on from there without a
        token.
        """
        topology, blank_NTW = self.topology, self.blank_NTW
        T, U = self.emit_NTW.shape[1], self.labels_NU.shape[1]
        window_TW = topology.window(T, U).to(blank_NTW.device)
        if topology.band is not None:
            spent_TW = torch.arange(T, device=window_TW.device).unsqueeze(1) - window_TW
            blank_NTW = blank_NTW.masked_fill(spent_TW >= topology.band, LOG_ZERO)
        total_NTW = torch.logaddexp(self.lse_NTW, blank_NTW).expand_as(self.emit_NTW)
        emit_NTU = _behind_every(self.emit_NTW - total_NTW, window_TW, U)[:, :, :-1]
        stay_NTU = torch.full_like(emit_NTU, LOG_ZERO)
        if topology.merge:
            stay_NTU = _behind_every(self.stay_NTW - total_NTW, window_TW, U)[:, :, 1:]
        blank_NTS = _behind_every(blank_NTW - total_NTW, window_TW, U)
        repeat_NU = _repeats(self.labels_NU, topology)
        return Emissions(emit_NTU, stay_NTU, blank_NTS, repeat_NU, self.slot_lengths_N), total_NTW


def continuations(logits: PrefixLogits, other_NTWK: Tensor, other_NUK: Tensor) -> Tensor:
    """log q(c | g) = log psi(gc) - log psi(g) [N, U, K] of K tokens c behind each prefix g = y_1..y_u, u = 0..U - 1.

    other: these tokens [N, U, K], and their logits behind each prefix of a slot's window. What the sum over all c
    leaves of 1 is the probability that the output ends with g. Undefined where psi(g) is 0.
    """
    emissions, total_NTW = logits.emissions()
    (_, T, U), topology = emissions.emit_NTU.shape, logits.topology
    states, log_psi_NU = prefix_states(emissions)
    log_pb_NTS, log_pn_NTS = (torch.stack(each, dim=1) for each in zip(*states[:T], strict=True))
    log_pb_NTU1 = log_pb_NTS[:, :, :U, None]
    log_pn_NTU1 = log_pn_NTS[:, :, :U, None]
    last_NU1 = F.pad(logits.labels_NU, (1, 0), value=-1)[:, :U, None]
    merged_N1UK = ((other_NUK == last_NU1) & topology.merge).unsqueeze(1)
    log_phi_NTUK = torch.logaddexp(log_pb_NTU1, log_pn_NTU1.masked_fill(merged_N1UK, LOG_ZERO))
    window_TW = topology.window(T, U).to(other_NUK.device)
    other_NTUK = _behind_every(other_NTWK - total_NTW.unsqueeze(3), window_TW, U)[:, :, :U]
    past_NT = torch.arange(T, device=other_NUK.device) >= logits.slot_lengths_N.unsqueeze(1)
    log_psi_NUK = (log_phi_NTUK + other_NTUK).masked_fill(past_NT[:, :, None, None], LOG_ZERO).logsumexp(dim=1)
    return log_psi_NUK - F.pad(log_psi_NU, (1, 0))[:, :U, None]


def anchor_losses(
    states: Tensor,
    weight_VD: Tensor,
    blank: Tensor | None,
    labels_NU: Tensor,
    label_lengths_N: Tensor,
    *,
    objective: str,
    weight_U: Tensor | None = None,
    bias_V: Tensor | None = None,
    slot_lengths_N: Tensor | None = None,
    topology: Topology = CTC,
    blank_is_odds: bool = False,
    soft_NUD: Tensor | None = None,
    teacher: Teacher | None = None,
    implementation: str = "auto",
) -> AnchorLoss:
    """The loss of every anchor from its slot states and the LM head. `ctc`: -log P(collapse = y_1..y_U); `prefix_ctc`:
    -sum_k w_k log psi(y_1..y_k); `cross_entropy`: slot k predicts label k. Graves et al. 2006, equations 6-8;
    docs/method.md.

    states [N, T, D], and blank logits [N, T]; or, where they depend on what was collapsed before (`Transition`), those
    behind every prefix of a slot's window, [N, T, W, D] and [N, T, W]. blank is None exactly for `cross_entropy`.
    weight [U], or [N, U]: w_k of a prefix or slot, scaled to a sum of 1 over the feasible ones; None: even.
    bias [V]: added to logits in a normaliser, 0 for every label: of a sampled vocabulary minus the logarithm of how
    likely a token was to be in it (`Negatives`).
    blank_is_odds: blank holds its log-odds against all tokens together, not a logit beside theirs.
    soft [N, U, D]: what stands for each label's row of the LM head in the loss, as the mean row under the base's own
    distribution; log psi stays that of the labels.
    teacher: whom a share of the loss is the divergence from. Where label k is said it counts as often as label k does
    in the objective, so that `kl` from a teacher who is sure of the labels is the objective itself. Not with `ctc`.
    Anchors without labels, or whose labels no alignment can write, and slots past slot_lengths, or by which a band has
    all labels written, are dropped before the GEMM: whatever they hold, NaN included, has no effect. Labels past an
    anchor's length are not looked at. Raises ValueError on labels outside [0, V), lengths outside [0, U] or [0, T], an
    unknown objective, or a blank that does not fit it.
    """
    (N, T), U, device = states.shape[:2], labels_NU.shape[1], states.device
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is unknown: choose one of {OBJECTIVES}")
    if (blank is None) != (objective == "cross_entropy"):
        raise ValueError(f"objective={objective}: {'needs a' if blank is None else 'has no'} blank logit")
    slots_N = torch.full_like(label_lengths_N, T) if slot_lengths_N is None else slot_lengths_N
    for name, values_N, most in (("label_lengths", label_lengths_N, U), ("slot_lengths", slots_N, T)):
        if values_N.numel() and not 0 <= int(values_N.min()) <= int(values_N.max()) <= most:
            raise ValueError(f"{name} must lie in [0, {most}]")
    labels_NU = labels_NU.where(torch.arange(U, device=labels_NU.device) < label_lengths_N.unsqueeze(1), 0)
    if labels_NU.numel() and not 0 <= int(labels_NU.min()) <= int(labels_NU.max()) < len(weight_VD):
        raise ValueError(f"labels must lie in [0, {len(weight_VD)}), found {labels_NU.min()}..{labels_NU.max()}")

    possible_NU = feasible_prefixes(labels_NU, label_lengths_N, slots_N, topology)
    if objective == "ctc":
        feasible_N = possible_NU.sum(dim=1) == label_lengths_N
        if topology.band is not None:
            feasible_N &= slots_N - label_lengths_N <= topology.band
    elif objective == "prefix_ctc":
        feasible_N = possible_NU.any(dim=1)
        if topology.band is not None:  # slots by which all labels are written are not looked at
            slots_N = torch.minimum(slots_N, label_lengths_N + topology.band)
    else:  # slot k predicts label k, alone
        slots_N, topology = torch.minimum(slots_N, label_lengths_N), ONE_TO_ONE
        states, feasible_N = states[:, :U], slots_N > 0
    kept = feasible_N.nonzero().squeeze(1)
    states = states if len(kept) == N else states[kept]
    labels_NU = labels_NU[kept]
    lengths_N = label_lengths_N[kept]
    slots_N = slots_N[kept]
    if weight_U is not None and weight_U.dim() == 2:
        weight_U = weight_U[kept]
    window_TW = topology.window(states.shape[1], U).to(device)
    slot_T1 = torch.arange(len(window_TW), device=device).unsqueeze(1)
    seen = slot_T1 < slots_N[:, None, None]
    valid_NT = seen.squeeze(2)

    soft_NTW = None
    if soft_NUD is not None:  # of the soft label that comes next behind each prefix; 0 where none comes
        soft_seen = (seen & (window_TW < lengths_N[:, None, None])).unsqueeze(3)
        next_NTWD = F.pad(soft_NUD[kept], (0, 0, 0, 1))[:, window_TW].masked_fill(~soft_seen, 0.0)
        states_NTWD = states if states.dim() == 4 else states.unsqueeze(2)
        soft_NTW = (states_NTWD.masked_fill(~soft_seen, 0.0) * next_NTWD.to(states.dtype)).sum(dim=3)
    taught_NTWK = None
    if teacher is not None:
        teacher = teacher._replace(tokens_NUK=teacher.tokens_NUK[kept], log_p_NUK=teacher.log_p_NUK[kept])
        taught_NTWK = F.pad(teacher.tokens_NUK, (0, 0, 0, 1))[:, window_TW]
    if bias_V is not None:
        states = torch.cat([states, states.new_ones(*states.shape[:-1], 1)], dim=-1)
        weight_VD = torch.cat([weight_VD, bias_V.to(weight_VD).unsqueeze(1)], dim=1)

    # Logits of the labels that come next and that came last behind the prefixes of each slot's window, and their lse.
    next_NTW = F.pad(labels_NU, (0, 1))[:, window_TW]  # behind all of them any token, which is not looked at
    if states.dim() == 4:  # behind more labels than there are, or than there are slots before, no alignment comes
        seen = seen & (window_TW <= torch.minimum(slot_T1, lengths_N[:, None, None]))
        last_NTW = F.pad(labels_NU, (1, 0))[:, window_TW]
        index = torch.stack([next_NTW, last_NTW] if topology.merge else [next_NTW], dim=3)
    else:
        index = next_NTW.unsqueeze(2)
    own = index.shape[3]
    if taught_NTWK is not None:
        asked = taught_NTWK if states.dim() == 4 else taught_NTWK.flatten(2).unsqueeze(2)
        index = torch.cat([index, asked], dim=3)
    states_MD = states.flatten(0, -2)
    index_MK = index.flatten(0, -2)
    seen_M = seen.flatten()
    if bool(seen_M.all()):
        lse_M, logits_MK = linear_lse_gather(states_MD, weight_VD, index_MK, implementation)
    else:
        at = seen_M.nonzero().squeeze(1)
        few = linear_lse_gather(states_MD[at], weight_VD, index_MK[at], implementation)
        lse_M, logits_MK = (part.new_zeros(len(seen_M), *part.shape[1:]).index_copy(0, at, part) for part in few)
    lse_NTW, logits = lse_M.view(seen.shape), logits_MK.view(index.shape)
    if taught_NTWK is not None:
        logits, taught_NTWK = logits[..., :own], logits[..., own:].reshape(taught_NTWK.shape)
    if states.dim() == 4:
        emit_NTW, stay_NTW = logits[..., 0], logits[..., -1]
    else:
        emit_NTW, stay_NTW = logits[:, :, 0], F.pad(logits[:, :, 0, :-1], (1, 0))

    blank_rate_T = states.new_zeros(T, dtype=torch.float32)
    if blank is None:
        log_p_NT = (emit_NTW - lse_NTW).squeeze(2)
        learnt_NT = log_p_NT if soft_NTW is None else (soft_NTW - lse_NTW).squeeze(2)
        loss = -_weighted_mean(learnt_NT, valid_NT, weight_U)
        log_psi = log_p_NT.cumsum(dim=1)
        if teacher is not None and taught_NTWK is not None:
            far_NT = _far_from(teacher, taught_NTWK.squeeze(2) - lse_NTW, valid_NT)
            loss = torch.lerp(loss, _weighted_mean(far_NT, valid_NT, weight_U), teacher.share)
    else:
        blank_NTW = blank[kept] if blank.dim() == 3 else blank[kept].unsqueeze(2)
        blank_NTW = blank_NTW.to(emit_NTW.dtype)
        blank_NTW = blank_NTW + lse_NTW if blank_is_odds else blank_NTW
        blank_NTW = blank_NTW.masked_fill(~valid_NT.unsqueeze(2), LOG_ZERO)
        behind = PrefixLogits(lse_NTW, emit_NTW, stay_NTW, blank_NTW, labels_NU, slots_N, topology=topology)
        learnt = behind if soft_NTW is None else behind._replace(emit_NTW=soft_NTW)
        log_psi, log_end_NS = prefix_lattice(learnt.emissions()[0], implementation)
        possible_NU = possible_NU[kept]
        if objective == "ctc":
            loss = -log_end_NS.gather(1, lengths_N.unsqueeze(1)).squeeze(1)
        else:
            loss = -_weighted_mean(log_psi, possible_NU, weight_U)
        if soft_NTW is not None:
            with torch.no_grad():
                log_psi, _ = prefix_lattice(behind.emissions()[0], implementation)
        if teacher is not None and taught_NTWK is not None:
            log_q_NUK = continuations(behind, taught_NTWK, teacher.tokens_NUK)
            far_NU = _far_from(teacher, log_q_NUK, possible_NU).cumsum(dim=1)  # label j is in the prefixes k >= j
            loss = torch.lerp(loss, _weighted_mean(far_NU, possible_NU, weight_U), teacher.share)
        rate_NTW = torch.sigmoid(blank_NTW - lse_NTW).detach()
        if rate_NTW.shape[2] > 1:  # behind as many labels as there were slots
            straight_NT1 = torch.minimum(slot_T1, lengths_N[:, None, None]) - window_TW[:, :1]
            rate_NTW = rate_NTW.gather(2, straight_NT1.clamp(min=0))
        blank_rate_T = (rate_NTW.squeeze(2) * valid_NT).sum(dim=0) / valid_NT.sum(dim=0).clamp(min=1)
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
    int64, label_lengths [N]; objective `ctc` or `prefix_ctc`, with weights of decay^(k-1). Infeasible anchors count
    0. `mean` is the mean over feasible anchors weighted by weights [N] (default 1), `sum` their weighted sum,
    `none` the weighted losses [N]. With return_feasible the answer is (loss, feasible [N] bool).
    Raises ValueError on bad labels, lengths, objective, reduction or implementation.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown: choose one of {REDUCTIONS}")
    # A NaN in padding would reach the gradient of the blank as 0 * NaN; one elsewhere comes by the other logits.
    blank_NT = hidden_NTD.nan_to_num(0.0, 0.0, 0.0) @ blank_D
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
    weights_N = torch.ones_like(out.loss_N) if weights_N is None else weights_N.to(out.loss_N.dtype)
    loss = out.loss_N * weights_N
    if reduction != "none":
        total_weight = (weights_N * out.feasible_N).sum()
        loss = loss.sum() if reduction == "sum" else loss.sum() / total_weight.where(total_weight > 0, 1.0)
    return (loss, out.feasible_N) if return_feasible else loss


def _behind_every(log_p: Tensor, window_TW: Tensor, labels: int) -> Tensor:
    """[N, T, S, ...] of [N, T, W, ...]: log 0 behind prefixes that are not in a slot's window."""
    every = log_p.new_full((*log_p.shape[:2], labels + 1, *log_p.shape[3:]), LOG_ZERO)
    return every.scatter(2, window_TW.view(*window_TW.shape, *[1] * (log_p.dim() - 3)).expand_as(log_p), log_p)


def _far_from(teacher: Teacher, log_q_NUK: Tensor, possible_NU: Tensor) -> Tensor:
    """The divergence [N, U] where labels are possible; elsewhere anything, without a gradient."""
    log_p_NUK = teacher.log_p_NUK[:, : log_q_NUK.shape[1]].to(log_q_NUK.dtype)
    return divergences(teacher.divergence, log_p_NUK, log_q_NUK.masked_fill(~possible_NU.unsqueeze(2), -1.0))


def _repeats(labels_NU: Tensor, topology: Topology) -> Tensor:
    """Labels that equal the one before, which merging would take for one."""
    repeat_NU = torch.zeros_like(labels_NU, dtype=torch.bool)
    if topology.merge:
        repeat_NU[:, 1:] = labels_NU[:, 1:] == labels_NU[:, :-1]
    return repeat_NU


def _weighted_mean(values_NK: Tensor, valid_NK: Tensor, weight_U: Tensor | None) -> Tensor:
    weight_NK = valid_NK.to(values_NK.dtype)
    if weight_U is not None:
        weight_NK = weight_NK * weight_U[..., : values_NK.shape[1]].to(weight_NK)
    weight_NK = weight_NK / weight_NK.sum(dim=1, keepdim=True).clamp(min=torch.finfo(values_NK.dtype).tiny)
    return (weight_NK * values_NK.masked_fill(~valid_NK, 0.0)).sum(dim=1)
