"""Plain torch: the oracle of every fast path, with the same signatures, in any float dtype.

Shape suffixes: N anchors, T slots, U labels, M = N * T rows, K gathered and S top columns, V vocabulary, D hidden; of a
transition: S = U + 1 contexts, W of them that a slot is looked at behind, K tokens of a shortlist, J successors of a
token, R rank.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A finite stand-in for log(0), exact in every float dtype: logaddexp(-inf, -inf) has no gradient, and exp of this
# is 0 all the same.
LOG_ZERO = -(2.0**100)
NO_TOKEN = -2  # where no label is; -1 stands for no successor


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


class LatticeInputs(NamedTuple):
    """What `prefix_lattice` takes, for those that have a forward and a backward of their own."""

    log_emit_NTU: Tensor
    log_stay_NTU: Tensor
    log_blank_NTS: Tensor
    repeat_NU: Tensor
    slot_lengths_N: Tensor


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


def carried(told_SNR: Tensor, carry_RR: Tensor) -> Tensor:
    """r(empty) = told(empty), r(gu) = told(gu) + C hardswish(r(g)): behind the root and behind each label [S, N, R]."""
    root_NR, *labels = told_SNR.unbind()
    states = [root_NR]
    for label_NR in labels:
        states.append(label_NR + F.linear(F.hardswish(states[-1]), carry_RR))
    return torch.stack(states)


class Prefixes(NamedTuple):
    """Slots behind the prefixes of known labels: A s_t, the state of the prefix of s labels, P w_v, the blank's vector;
    the prefixes that each slot is looked at behind (`Topology.window`), s of them; the likeliest successors of each
    prefix's last token (-1: none); a slot's likeliest tokens; logits of both; the labels that come next behind each
    prefix and that came last (NO_TOKEN: there is none); how many slots of each anchor are looked at: what the others
    hold, NaN included, has no effect, and 0 comes out of them."""

    slot_NTR: Tensor
    context_SNR: Tensor
    token_VR: Tensor
    blank_R: Tensor
    window_TW: Tensor
    successor_NSJ: Tensor
    index_NTK: Tensor
    successor_NTWJ: Tensor
    logits_NTK: Tensor
    next_NS: Tensor
    last_NS: Tensor
    slots_N: Tensor


class Moved(NamedTuple):
    """Of slots behind the prefixes of their windows: lse of the shortlist, moved and as it is; deltas of the label that
    comes next, of the last one again (0 for those not in the shortlist), and of the blank; is the label that comes next
    in the shortlist, and are there slots enough before it for the others?"""

    moved_NTW: Tensor
    still_NTW: Tensor
    emit_NTW: Tensor
    stay_NTW: Tensor
    blank_NTW: Tensor
    inside_NTW: Tensor


def moved_shortlist(prefixes: Prefixes) -> Moved:
    """What the transition makes of each slot's shortlist S_t(g), its likeliest tokens and the successors of g's last
    one, behind each prefix g of its window."""
    window_TW = prefixes.window_TW
    past_NT = torch.arange(len(window_TW), device=window_TW.device) >= prefixes.slots_N.unsqueeze(1)
    prefixes = _without(prefixes, past_NT)
    delta_NTWX, blank_NTW1 = shortlist_deltas(prefixes).tensor_split([-1], dim=3)
    token_NTWX, logits_NTWX = _shortlist(prefixes)

    def of_labels(label_NS: Tensor) -> tuple[Tensor, Tensor]:
        """The deltas of labels; which are in the shortlist."""
        same_NTWX = (token_NTWX == label_NS[:, window_TW].unsqueeze(3)).to(torch.uint8)
        inside_NTW, place_NTW = same_NTWX.max(dim=3)
        return delta_NTWX.gather(3, place_NTW.unsqueeze(3)).squeeze(3) * inside_NTW, inside_NTW == 1

    emit_NTW, inside_NTW = of_labels(prefixes.next_NS)
    found = (
        (logits_NTWX + delta_NTWX).logsumexp(dim=3),
        logits_NTWX.logsumexp(dim=3),
        emit_NTW,
        of_labels(prefixes.last_NS)[0],
        blank_NTW1.squeeze(3),
        inside_NTW & _reached(window_TW),
    )
    return Moved(*(part.masked_fill(past_NT.unsqueeze(2), 0) for part in found))


def _without(prefixes: Prefixes, past_NT: Tensor) -> Prefixes:
    """With 0 for what these slots hold."""
    return prefixes._replace(
        slot_NTR=prefixes.slot_NTR.masked_fill(past_NT.unsqueeze(2), 0.0),
        successor_NTWJ=prefixes.successor_NTWJ.masked_fill(past_NT[:, :, None, None], 0.0),
        logits_NTK=prefixes.logits_NTK.masked_fill(past_NT.unsqueeze(2), 0.0),
    )


def _shortlist(prefixes: Prefixes) -> tuple[Tensor, Tensor]:
    """Tokens of S_t(g) and their logits [N, T, W, J + K]; logits of -inf for successors that are none, or among the
    likeliest tokens."""
    token_NTWJ, W = prefixes.successor_NSJ[:, prefixes.window_TW], prefixes.window_TW.shape[1]
    passed_NTWJ = token_NTWJ < 0
    for index_NT in prefixes.index_NTK.unbind(2):  # all pairs at once would be the largest tensor of a step
        passed_NTWJ |= token_NTWJ == index_NT[:, :, None, None]
    next_NTWJ = prefixes.successor_NTWJ.masked_fill(passed_NTWJ, float("-inf"))
    index_NTWK, logits_NTWK = (
        part.unsqueeze(2).expand(-1, -1, W, -1) for part in (prefixes.index_NTK, prefixes.logits_NTK)
    )
    return torch.cat([token_NTWJ, index_NTWK], dim=3), torch.cat([next_NTWJ, logits_NTWK], dim=3)


def _reached(window_TW: Tensor) -> Tensor:
    """Is slot t behind so few labels that the slots before can have written them?"""
    return window_TW <= torch.arange(len(window_TW), device=window_TW.device).unsqueeze(1)


def shortlist_deltas(prefixes: Prefixes) -> Tensor:
    """By how much the transition moves what a slot may write behind the prefixes of its window (docs/method.md, "The
    transition"): delta = <P w_v, hardswish(A s_t + context_s)> [N, T, W, J + K + 1] of the prefix's J successors, of
    the slot's K likeliest tokens, and of the blank. 0 for successors that are none, and behind more labels than there
    are slots before."""
    slot_NTR, context_SNR, token_VR, blank_R, window_TW, successor_NSJ, index_NTK = prefixes[:7]
    (N, T, _), (_, S, J), W = slot_NTR.shape, successor_NSJ.shape, window_TW.shape[1]
    context_NTWR = context_SNR.transpose(0, 1)[:, window_TW]
    gate_NTWR = F.hardswish(slot_NTR.unsqueeze(2) + context_NTWR) * _reached(window_TW).unsqueeze(2)
    key_NSJR = F.embedding(successor_NSJ.clamp(min=0), token_VR) * (successor_NSJ >= 0).unsqueeze(3)
    delta_NTWSJ = (gate_NTWR.flatten(1, 2) @ key_NSJR.flatten(1, 2).transpose(1, 2)).view(N, T, W, S, J)
    own_NTW1J = window_TW.view(1, T, W, 1, 1).expand(N, T, W, 1, J)
    delta_NTWK = gate_NTWR @ F.embedding(index_NTK, token_VR).transpose(2, 3)
    return torch.cat(
        [delta_NTWSJ.gather(3, own_NTW1J).squeeze(3), delta_NTWK, (gate_NTWR @ blank_R).unsqueeze(3)], dim=3
    )
