"""Plain torch: the oracle of every fast path, with the same signatures, in any float dtype.

Shape suffixes: N anchors, T slots, U labels, S = U + 1 prefixes, M rows, K gathered columns, V vocabulary, D hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# A finite stand-in for log(0), exact in every float dtype: logaddexp(-inf, -inf) has no gradient, and exp of this
# is 0 all the same.
LOG_ZERO = -(2.0**100)


def linear_lse_gather(hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of every row of `hidden @ weight.T`, and its logits at `index`.

    Keeps the whole [M, V] product: use it as an oracle only.
    """
    logits_MV = hidden_MD @ weight_VD.T
    logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    return logits_MV.logsumexp(dim=1), logits_MV.gather(1, index_MK)


class Emissions(NamedTuple):
    """What the slots emit along one label sequence per anchor: log-probabilities behind each prefix of it.

    emit[n, t, k]   log p_t(y_{k+1} | y_k): slot t starts label k+1 (0-based column k)
    stay[n, t, k]   log p_t(y_{k+1} | y_{k+1}): slot t repeats it
    blank[n, t, s]  log p_t(blank | y_s), s = 0..U (s = 0: nothing collapsed yet)
    repeat[n, k]    y_{k+1} == y_k: only a blank in between makes a new token
    slot_lengths    how many of the T slots an anchor has

    Without a transition emit and stay are the same tensor and blank does not depend on s.
    """

    emit_NTU: Tensor
    stay_NTU: Tensor
    blank_NTS: Tensor
    repeat_NU: Tensor
    slot_lengths_N: Tensor


def prefix_lattice(emissions: Emissions) -> tuple[Tensor, Tensor]:
    """Prefix and end log-probabilities of one label sequence per anchor (docs/method.md, "The lattice").

    Returns log_psi [N, U], the probability that the collapsed output starts with y_1..y_k, and
    log_end [N, U + 1], that it is exactly y_1..y_s. Impossible values are LOG_ZERO or below.
    Graves et al. 2006, and Graves 2008 (prefix search), section 7.5.
    """
    states, log_psi_NU = prefix_states(emissions)
    log_pb_NS, log_pn_NS = states[-1]
    return log_psi_NU, torch.logaddexp(log_pb_NS, log_pn_NS)


def prefix_states(emissions: Emissions) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Before each slot and behind the last (log pb, log pn), [N, S] each, of `prefix_lattice`'s recursion, and its log
    psi [N, U]: that the slots before t collapse to exactly y_1..y_s and end in a blank, or in y_s. Behind slot_lengths
    all are those of the last slot."""
    emit_NTU, stay_NTU, blank_NTS, repeat_NU, slot_lengths_N = emissions
    N, T, U = emit_NTU.shape
    log_pb = emit_NTU.new_full((N, U + 1), LOG_ZERO)
    log_pb[:, 0] = 0.0
    log_pn = emit_NTU.new_full((N, U + 1), LOG_ZERO)
    starts, states = [], [(log_pb, log_pn)]
    for t in range(T):
        log_phi = torch.logaddexp(log_pb[:, :U], log_pn[:, :U].masked_fill(repeat_NU, LOG_ZERO))
        start = log_phi + emit_NTU[:, t]
        next_pn = torch.logaddexp(log_pn[:, 1:] + stay_NTU[:, t], start)
        next_pn = torch.cat([torch.full_like(log_pn[:, :1], LOG_ZERO), next_pn], dim=1)
        next_pb = torch.logaddexp(log_pb, log_pn) + blank_NTS[:, t]
        active_N1 = (t < slot_lengths_N).unsqueeze(1)
        log_pn = torch.where(active_N1, next_pn, log_pn)
        log_pb = torch.where(active_N1, next_pb, log_pb)
        starts.append(start.masked_fill(~active_N1, LOG_ZERO))
        states.append((log_pb, log_pn))
    return states, torch.stack(starts).logsumexp(dim=0) if U else log_pb[:, :0]
