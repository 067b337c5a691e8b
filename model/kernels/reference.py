"""Plain torch: the oracle of every fast path, with the same signatures, in any float dtype.

Shape suffixes: N anchors, T slots, U labels, M = N * T rows, K gathered and S top columns, V vocabulary, D hidden; of a
transition: S = U + 1 contexts, K tokens of a shortlist, J successors of a token, R rank.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A finite stand-in for log(0), exact in every float dtype: logaddexp(-inf, -inf) has no gradient, and exp of this
# is 0 all the same.
LOG_ZERO = -(2.0**100)


def linear_lse_top(
    hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-sum-exp of every row of `hidden @ weight.T`, its logits at `index`, its `top_k` largest and where.

    Keeps the whole [M, V] product: use it as an oracle only.
    """
    logits_MV = hidden_MD @ weight_VD.T
    logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    top_MS, top_index_MS = logits_MV.topk(top_k, dim=1)
    return logits_MV.logsumexp(dim=1), logits_MV.gather(1, index_MK), top_MS, top_index_MS


def prefix_lattice(
    log_emit_NTU: Tensor,
    log_stay_NTU: Tensor,
    log_blank_NTS: Tensor,
    repeat_NU: Tensor,
    slot_lengths_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefix and end log-probabilities of one label sequence per anchor (docs/method.md, "The lattice").

    log_emit[n, t, k]   log p_t(y_{k+1} | y_k): slot t starts label k+1 (0-based column k)
    log_stay[n, t, k]   log p_t(y_{k+1} | y_{k+1}): slot t repeats it
    log_blank[n, t, s]  log p_t(blank | y_s), s = 0..U (s = 0: nothing collapsed yet)
    repeat[n, k]        y_{k+1} == y_k: only a blank in between makes a new token

    Without a transition emit and stay are the same tensor and log_blank does not depend on s.
    Returns log_psi [N, U], the probability that the collapsed output starts with y_1..y_k, and
    log_end [N, U + 1], that it is exactly y_1..y_s. Impossible values are LOG_ZERO or below.
    Graves et al. 2006, and Graves 2008 (prefix search), section 7.5.
    """
    N, T, U = log_emit_NTU.shape
    log_pb = log_emit_NTU.new_full((N, U + 1), LOG_ZERO)
    log_pb[:, 0] = 0.0
    log_pn = log_emit_NTU.new_full((N, U + 1), LOG_ZERO)
    starts = []
    for t in range(T):
        log_phi = torch.logaddexp(log_pb[:, :U], log_pn[:, :U].masked_fill(repeat_NU, LOG_ZERO))
        start = log_phi + log_emit_NTU[:, t]
        next_pn = torch.logaddexp(log_pn[:, 1:] + log_stay_NTU[:, t], start)
        next_pn = torch.cat([torch.full_like(log_pn[:, :1], LOG_ZERO), next_pn], dim=1)
        next_pb = torch.logaddexp(log_pb, log_pn) + log_blank_NTS[:, t]
        if slot_lengths_N is not None:
            active_N1 = (t < slot_lengths_N).unsqueeze(1)
            start = start.masked_fill(~active_N1, LOG_ZERO)
            next_pn = torch.where(active_N1, next_pn, log_pn)
            next_pb = torch.where(active_N1, next_pb, log_pb)
        log_pn, log_pb = next_pn, next_pb
        starts.append(start)
    log_psi = torch.stack(starts).logsumexp(dim=0) if U else log_pb[:, :0]
    return log_psi, torch.logaddexp(log_pb, log_pn)


class Prefixes(NamedTuple):
    """Slots behind the prefixes of known labels: A s_t, the state of the prefix of s labels, P w_v, the blank's vector;
    of the last token of each prefix its likeliest successors (-1: none), and their logits in each slot; a slot's
    likeliest tokens and their logits.

    emit, stay: where label k + 1 stands behind label k, and behind itself, in the successors and then the slot's
    likeliest tokens (-1: nowhere).
    """

    slot_NTR: Tensor
    context_NSR: Tensor
    token_VR: Tensor
    blank_R: Tensor
    successor_NSJ: Tensor
    successor_logits_NTSJ: Tensor
    index_NTK: Tensor
    logits_NTK: Tensor
    emit_NTU: Tensor
    stay_NTU: Tensor


def moved_shortlist(prefixes: Prefixes, band: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The transition of every slot behind every prefix of known labels (docs/method.md, "The transition").

    A token v of the slot's shortlist, or among the successors of the prefix's last token, is moved by
    delta = <P w_v, hardswish(A s_t + context_s)>. Returns the lse of all of them, moved and as they were [N, T, S], the
    delta of label k + 1 behind label k (`emit`) and behind itself (`stay`) [N, T, U], 0 where it is not among them, and
    the blank's own [N, T, S]. Where slot t does not follow s labels, which it does for t - band <= s <= t, nothing is
    moved, and successors do not count.
    """
    slot_NTR, context_NSR, token_VR, blank_R, successor_NSJ, next_logits_NTSJ, index_NTK, logits_NTK, *places = prefixes
    T, S, device = slot_NTR.shape[1], context_NSR.shape[1], slot_NTR.device
    t_T1, s_S = torch.arange(T, device=device).unsqueeze(1), torch.arange(S, device=device)
    reached_TS1 = ((s_S <= t_T1) & (s_S >= t_T1 - band)).unsqueeze(2)
    gate_NTSR = F.hardswish(slot_NTR.unsqueeze(2) + context_NSR.unsqueeze(1)) * reached_TS1
    successor_N1SJ = successor_NSJ.unsqueeze(1)
    twice_NTSJ = (successor_N1SJ.unsqueeze(4) == index_NTK[:, :, None, None]).any(dim=4)
    counts_NTSJ = (successor_N1SJ >= 0) & ~twice_NTSJ & reached_TS1
    key_NSJR = F.embedding(successor_NSJ.clamp(min=0), token_VR)
    delta_NTSJ = (gate_NTSR.transpose(1, 2) @ key_NSJR.transpose(2, 3)).transpose(1, 2)
    delta_NTSK = gate_NTSR @ F.embedding(index_NTK, token_VR).transpose(2, 3)
    delta_NTSX = torch.cat([delta_NTSJ, delta_NTSK], dim=3)
    next_logits_NTSJ = next_logits_NTSJ.masked_fill(~counts_NTSJ, float("-inf"))
    logits_NTSX = torch.cat([next_logits_NTSJ, logits_NTK.unsqueeze(2).expand_as(delta_NTSK)], dim=3)
    emit_NTU, stay_NTU = (
        delta_NTUX.gather(3, place_NTU.clamp(min=0).unsqueeze(3)).squeeze(3) * (place_NTU >= 0)
        for delta_NTUX, place_NTU in zip((delta_NTSX[:, :, :-1], delta_NTSX[:, :, 1:]), places, strict=True)
    )
    moved_NTS, still_NTS = (logits_NTSX + delta_NTSX).logsumexp(dim=3), logits_NTSX.logsumexp(dim=3)
    return moved_NTS, still_NTS, emit_NTU, stay_NTU, gate_NTSR @ blank_R
