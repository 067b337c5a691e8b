"""`reference.prefix_lattice` compiled for a CPU, where torch's exp takes ten times as long over what underflows, which
is most of a lattice with a band.

Backward: the adjoint of every log-add-exp c = lae(a, b) is da = exp(a - c) dc. What is impossible has no gradient.

Layout: states [N, T + 1, 2, S] = log pb, log pn of every prefix before slot t (T: after the last); S = U + 1.
"""

import math

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from ctcdraft.model.kernels.cpu import array_of, use_torch_threads
from ctcdraft.model.kernels.reference import LOG_ZERO, LatticeInputs

IMPOSSIBLE = LOG_ZERO / 2  # what is below has LOG_ZERO as a factor


def forward(given: LatticeInputs) -> tuple[Tensor, Tensor, Tensor]:
    """log psi [N, U], log end [N, S] and the states that `backward` needs."""
    emit, (N, T, U) = given.log_emit_NTU, given.log_emit_NTU.shape
    log_psi_NU, log_end_NS = emit.new_full((N, U), LOG_ZERO), emit.new_empty(N, U + 1)
    states = emit.new_full((N, T + 1, 2, U + 1), LOG_ZERO)
    found = log_psi_NU, log_end_NS, states
    _forward(use_torch_threads(), *map(array_of, given), *(part.numpy() for part in found))  # type: ignore[call-arg]
    return found


def backward(
    given: LatticeInputs, found: tuple[Tensor, Tensor, Tensor], grad_psi_NU: Tensor, grad_end_NS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of log_emit, log_stay and log_blank; found: what `forward` returned."""
    of_emit, of_stay, of_blank = gradients = [torch.zeros_like(part) for part in given[:3]]
    known = map(array_of, (*given, *found, grad_psi_NU, grad_end_NS))
    _backward(use_torch_threads(), *known, *(part.numpy() for part in gradients))  # type: ignore[call-arg]
    return of_emit, of_stay, of_blank


@njit(cache=True)
def _log_add(a, b):
    low, high = (a, b) if a < b else (b, a)  # either may be NaN, and stays so
    return high if low < IMPOSSIBLE else high + math.log1p(math.exp(low - high))


@njit(cache=True)
def _share(gradient, part, whole):
    """What of the gradient of a log-add-exp goes to one of the two."""
    return gradient * 0 if gradient == 0 or part < IMPOSSIBLE else gradient * math.exp(part - whole)


@njit(cache=True, parallel=True)
def _forward(threads, emit, stay, blank, repeat, slots, psi, end, states):
    N, T, U = emit.shape
    zero = emit.dtype.type(LOG_ZERO)
    for chunk in prange(threads):
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            states[n, 0, 0, 0] = 0
            for t in range(T):
                pb, pn, next_pb, next_pn = states[n, t, 0], states[n, t, 1], states[n, t + 1, 0], states[n, t + 1, 1]
                if t >= slots[n]:
                    states[n, t + 1] = states[n, t]
                    continue
                for s in range(U + 1):
                    next_pb[s] = _log_add(pb[s], pn[s]) + blank[n, t, s]
                for k in range(U):
                    start = _log_add(pb[k], zero if repeat[n, k] else pn[k]) + emit[n, t, k]
                    psi[n, k] = _log_add(psi[n, k], start)
                    next_pn[k + 1] = _log_add(pn[k + 1] + stay[n, t, k], start)
            for s in range(U + 1):
                end[n, s] = _log_add(states[n, T, 0, s], states[n, T, 1, s])


@njit(cache=True, parallel=True)
def _backward(
    threads, emit, stay, blank, repeat, slots, psi, end, states, grad_psi, grad_end, grad_emit, grad_stay, grad_blank
):
    N, T, U = emit.shape
    zero = emit.dtype.type(LOG_ZERO)
    for chunk in prange(threads):
        of_pb, of_pn, of_next_pn = np.empty(U + 1, emit.dtype), np.empty(U + 1, emit.dtype), np.empty(U + 1, emit.dtype)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for s in range(U + 1):
                of_pb[s] = _share(grad_end[n, s], states[n, T, 0, s], end[n, s])
                of_pn[s] = _share(grad_end[n, s], states[n, T, 1, s], end[n, s])
            for t in range(min(T, slots[n]) - 1, -1, -1):
                pb, pn = states[n, t, 0], states[n, t, 1]
                of_next_pn[:] = of_pn
                for s in range(U + 1):
                    either = _log_add(pb[s], pn[s])
                    of_blank = _share(of_pb[s], either + blank[n, t, s], states[n, t + 1, 0, s])
                    grad_blank[n, t, s] = of_blank
                    of_pb[s], of_pn[s] = _share(of_blank, pb[s], either), _share(of_blank, pn[s], either)
                for k in range(U):
                    other = zero if repeat[n, k] else pn[k]
                    phi = _log_add(pb[k], other)
                    start, stayed, after = phi + emit[n, t, k], pn[k + 1] + stay[n, t, k], states[n, t + 1, 1, k + 1]
                    of_start = _share(grad_psi[n, k], start, psi[n, k]) + _share(of_next_pn[k + 1], start, after)
                    grad_emit[n, t, k] = of_start
                    grad_stay[n, t, k] = _share(of_next_pn[k + 1], stayed, after)
                    of_pn[k + 1] += grad_stay[n, t, k]
                    of_pb[k] += _share(of_start, pb[k], phi)
                    of_pn[k] += _share(of_start, other, phi)
