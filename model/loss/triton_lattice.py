"""`reference.prefix_lattice` with one anchor per lane: (pb, pn) in registers, no shuffles, no barriers.

Label by label: for the prefix of s labels a lane walks the slots and carries log pb and log pn of that prefix.
What the next label needs of it, phi(t; s), is made from the states that the lane itself left in `states`, and the
backward reads them once more. Backward: the adjoint of every log-add-exp c = lae(a, b) is da = exp(a - c) dc.

Layout: states [2, S, T + 1, N] = log pb, log pn of prefix s before slot t (T: after the last); S = U + 1.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear_lse import refuse_second_derivative
from .reference import LOG_ZERO

LANES = 64
WARPS = 2


@triton.jit
def _log_add(a, b):
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def _start(emit_ptr, before_pb_ptr, before_pn_ptr, repeat, has_label, LOG_ZERO: tl.constexpr):
    """log of phi(t; prefix one label shorter) * emit: the label starts at this slot."""
    pb = tl.load(before_pb_ptr, mask=has_label, other=LOG_ZERO)
    pn = tl.load(before_pn_ptr, mask=has_label, other=LOG_ZERO)
    emit = tl.load(emit_ptr, mask=has_label, other=LOG_ZERO)
    return _log_add(pb, tl.where(repeat != 0, LOG_ZERO, pn)) + emit


@triton.jit
def _forward_kernel(
    emit_ptr, stay_ptr, blank_ptr, repeat_ptr, slots_ptr, psi_ptr, end_ptr, states_ptr,
    N, T, U, LOG_ZERO: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    lane = n < N
    slots = tl.load(slots_ptr + n, mask=lane, other=0)
    S = U + 1
    pn_ptr = states_ptr + S * (T + 1) * N
    for s in range(0, S):
        column = s * (T + 1)
        pb = tl.full([LANES], LOG_ZERO, WIDE)
        if s == 0:
            pb = tl.zeros([LANES], WIDE)
        pn = tl.full([LANES], LOG_ZERO, WIDE)
        psi = tl.full([LANES], LOG_ZERO, WIDE)
        has_label = lane & (tl.zeros([LANES], tl.int32) + s > 0)
        repeat = tl.load(repeat_ptr + n * U + s - 1, mask=has_label, other=0)
        for t in range(0, T):
            tl.store(states_ptr + (column + t) * N + n, pb, mask=lane)
            tl.store(pn_ptr + (column + t) * N + n, pn, mask=lane)
            label = (n * T + t) * U + s - 1
            stay = tl.load(stay_ptr + label, mask=has_label, other=LOG_ZERO)
            blank = tl.load(blank_ptr + (n * T + t) * S + s, mask=lane, other=LOG_ZERO)
            before = (column - (T + 1) + t) * N + n
            start = _start(emit_ptr + label, states_ptr + before, pn_ptr + before, repeat, has_label, LOG_ZERO)
            active = t < slots
            psi = tl.where(active, _log_add(psi, start), psi)
            next_pb = _log_add(pb, pn) + blank
            pn = tl.where(active & has_label, _log_add(pn + stay, start), pn)
            pb = tl.where(active, next_pb, pb)
        tl.store(states_ptr + (column + T) * N + n, pb, mask=lane)
        tl.store(pn_ptr + (column + T) * N + n, pn, mask=lane)
        tl.store(end_ptr + n * S + s, _log_add(pb, pn), mask=lane)
        tl.store(psi_ptr + n * U + s - 1, psi, mask=has_label)


@triton.jit
def _backward_kernel(
    emit_ptr, stay_ptr, repeat_ptr, slots_ptr, psi_ptr, end_ptr, states_ptr, grad_psi_ptr, grad_end_ptr,
    grad_emit_ptr, grad_stay_ptr, grad_blank_ptr,
    N, T, U, LOG_ZERO: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    lane = n < N
    slots = tl.load(slots_ptr + n, mask=lane, other=0)
    S = U + 1
    pn_ptr = states_ptr + S * (T + 1) * N
    for back in range(0, S):
        s = U - back
        column = s * (T + 1)
        length = tl.zeros([LANES], tl.int32) + s
        has_label = lane & (length > 0)
        has_next = lane & (length < U)
        repeat = tl.load(repeat_ptr + n * U + s - 1, mask=has_label, other=0)
        next_repeat = tl.load(repeat_ptr + n * U + s, mask=has_next, other=0)
        psi = tl.load(psi_ptr + n * U + s - 1, mask=has_label, other=0.0)
        grad_psi = tl.load(grad_psi_ptr + n * U + s - 1, mask=has_label, other=0.0)
        after_pb = tl.load(states_ptr + (column + T) * N + n, mask=lane, other=LOG_ZERO)
        after_pn = tl.load(pn_ptr + (column + T) * N + n, mask=lane, other=LOG_ZERO)
        end = tl.load(end_ptr + n * S + s, mask=lane, other=0.0)
        grad_end = tl.load(grad_end_ptr + n * S + s, mask=lane, other=0.0)
        grad_pb = tl.exp(after_pb - end) * grad_end
        grad_pn = tl.exp(after_pn - end) * grad_end
        for step in range(0, T):
            t = T - 1 - step
            active = t < slots
            pb = tl.load(states_ptr + (column + t) * N + n, mask=lane, other=LOG_ZERO)
            pn = tl.load(pn_ptr + (column + t) * N + n, mask=lane, other=LOG_ZERO)
            label = (n * T + t) * U + s - 1
            stay = tl.load(stay_ptr + label, mask=has_label, other=LOG_ZERO)
            before = (column - (T + 1) + t) * N + n
            start = _start(emit_ptr + label, states_ptr + before, pn_ptr + before, repeat, has_label, LOG_ZERO)
            start = tl.where(active, start, LOG_ZERO)
            grad_stay = tl.where(active & has_label, tl.exp(pn + stay - after_pn) * grad_pn, 0.0)
            grad_start = tl.exp(start - after_pn) * grad_pn + tl.exp(start - psi) * grad_psi
            grad_start = tl.where(active & has_label, grad_start, 0.0)
            tl.store(grad_stay_ptr + label, grad_stay, mask=has_label)
            tl.store(grad_emit_ptr + label, grad_start, mask=has_label)
            grad_blank = tl.where(active, grad_pb, 0.0)
            tl.store(grad_blank_ptr + (n * T + t) * S + s, grad_blank, mask=lane)
            # the next label's start at this slot came from phi(t; s): its adjoint is that label's grad_emit
            grad_phi = tl.load(grad_emit_ptr + label + 1, mask=has_next, other=0.0)
            open_pn = tl.where(next_repeat != 0, LOG_ZERO, pn)
            phi = _log_add(pb, open_pn)
            both = _log_add(pb, pn)
            from_phi_pb = tl.exp(pb - phi) * grad_phi
            from_phi_pn = tl.where(next_repeat != 0, 0.0, tl.exp(open_pn - phi) * grad_phi)
            grad_pn = tl.where(active, tl.exp(pn - both) * grad_blank + grad_stay, grad_pn) + from_phi_pn
            grad_pb = tl.where(active, tl.exp(pb - both) * grad_blank, grad_pb) + from_phi_pb
            after_pn = pn


class PrefixLattice(torch.autograd.Function):
    """log psi [N, U] and log end [N, U + 1] of the tensors of `Emissions`, as `reference.prefix_lattice` has them.
    Differentiable once."""

    @staticmethod
    def forward(ctx: Any, *emissions: Tensor) -> tuple[Tensor, Tensor]:
        emit, stay, blank, repeat, slots = (part.contiguous() for part in emissions)
        (N, T, U), repeat = emit.shape, repeat.to(torch.int8)
        log_psi_NU, log_end_NS = emit.new_empty(N, U), emit.new_empty(N, U + 1)
        states = emit.new_empty(2, U + 1, T + 1, N)
        if N:
            _forward_kernel[(triton.cdiv(N, LANES),)](
                emit, stay, blank, repeat, slots, log_psi_NU, log_end_NS, states, N, T, U, **_options(emit)
            )
        ctx.save_for_backward(emit, stay, repeat, slots, log_psi_NU, log_end_NS, states)
        return log_psi_NU, log_end_NS

    @staticmethod
    def backward(ctx: Any, grad_psi_NU: Tensor, grad_end_NS: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        emit, *others = ctx.saved_tensors
        N, T, U = emit.shape
        grad_emit, grad_stay = emit.new_empty(2, N, T, U)
        grad_blank = emit.new_empty(N, T, U + 1)
        if N:
            _backward_kernel[(triton.cdiv(N, LANES),)](
                emit, *others, grad_psi_NU.contiguous(), grad_end_NS.contiguous(), grad_emit, grad_stay, grad_blank,
                N, T, U, **_options(emit),
            )  # fmt: skip
        return grad_emit, grad_stay, grad_blank, None, None


def _options(log_emit_NTU: Tensor) -> dict:
    wide = tl.float64 if log_emit_NTU.dtype == torch.float64 else tl.float32
    return {"LOG_ZERO": LOG_ZERO, "WIDE": wide, "LANES": LANES, "num_warps": WARPS}
