"""The autograd glue: what a forward saves, and what its backward makes of it. Differentiable once."""

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ctcdraft.model.kernels import chunked, cpu_mixed
from ctcdraft.model.kernels.reference import LatticeInputs, Moved, Prefixes


class LinearLseGather(torch.autograd.Function):
    """(hidden, weight, index, top_k, ops) -> lse [M], logits [M, K] at `index`, the largest [M, S] and where they are.

    `ops` is the module that holds `softmax_`, `logits_gradient_` and `hidden_gradient`: `chunked` itself, or
    `triton_rows`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, top_k: int, ops: ModuleType
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with_slope, trained = ctx.needs_input_grad[:2]
        out = chunked.forward(hidden_MD, weight_VD, index_MK, top_k, with_slope, ops)
        index_MX = torch.cat([index_MK, out.top_index_MS], dim=1)
        ctx.ops = ops
        ctx.save_for_backward(weight_VD, index_MX, out.lse_M, out.slope_MD, hidden_MD if trained else None)
        ctx.mark_non_differentiable(out.top_index_MS)
        return out.lse_M, out.logits_MK, out.top_MS, out.top_index_MS

    @staticmethod
    def backward(
        ctx: Any, grad_lse_M: Tensor, grad_logits_MK: Tensor, grad_top_MS: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        grad_logits_MX = torch.cat([grad_logits_MK, grad_top_MS], dim=1)
        weight_VD, index_MX, lse_M, slope_MD, hidden_MD = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = ctx.ops.hidden_gradient(weight_VD, index_MX, slope_MD, grad_lse_M, grad_logits_MX)
        if ctx.needs_input_grad[1]:
            grad_weight = chunked.weight_gradient(
                hidden_MD, weight_VD, index_MX, lse_M, grad_lse_M, grad_logits_MX, ctx.ops
            )
        return grad_hidden, grad_weight, None, None, None


class MixedLseGather(torch.autograd.Function):
    """The same in mixed precision, for a frozen weight (`cpu_mixed`)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = cpu_mixed.forward(hidden_MD, weight_VD, index_MK, top_k, ctx.needs_input_grad[0])
        ctx.save_for_backward(weight_VD, torch.cat([index_MK, out.top_index_MS], dim=1), out.slope_MD)
        ctx.mark_non_differentiable(out.top_index_MS)
        return out.lse_M, out.logits_MK, out.top_MS, out.top_index_MS

    @staticmethod
    def backward(
        ctx: Any, grad_lse_M: Tensor, grad_logits_MK: Tensor, grad_top_MS: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        weight_VD, index_MX, slope_MD = ctx.saved_tensors
        grad_logits_MX = torch.cat([grad_logits_MK, grad_top_MS], dim=1)
        return cpu_mixed.hidden_gradient(weight_VD, index_MX, slope_MD, grad_lse_M, grad_logits_MX), None, None, None


class PrefixLattice(torch.autograd.Function):
    """`reference.prefix_lattice` with forward and backward recursions of its own, in the module `ops`."""

    @staticmethod
    def forward(ctx: Any, ops: ModuleType, *given: Tensor) -> tuple[Tensor, Tensor]:
        log_psi_NU, log_end_NS, states = ops.forward(LatticeInputs(*given))
        ctx.ops = ops
        ctx.save_for_backward(*given, log_psi_NU, log_end_NS, states)
        return log_psi_NU, log_end_NS

    @staticmethod
    def backward(ctx: Any, grad_psi_NU: Tensor, grad_end_NS: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        *given, log_psi_NU, log_end_NS, states = ctx.saved_tensors
        found = log_psi_NU, log_end_NS, states
        return None, *ctx.ops.backward(LatticeInputs(*given), found, grad_psi_NU, grad_end_NS), None, None


class MovedShortlist(torch.autograd.Function):
    """`reference.moved_shortlist` with forward and backward of its own, in the module `ops`."""

    @staticmethod
    def forward(ctx: Any, ops: ModuleType, *prefixes: Tensor) -> Moved:
        moved, kept = ops.forward(Prefixes(*prefixes))
        ctx.ops, ctx.given = ops, len(prefixes)
        ctx.save_for_backward(*prefixes, *kept)
        ctx.mark_non_differentiable(moved.inside_NTW)
        return moved

    @staticmethod
    def backward(ctx: Any, *of_moved: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        prefixes, kept = ctx.saved_tensors[: ctx.given], ctx.saved_tensors[ctx.given :]
        of_slot, of_context, of_token, of_blank, *of_logits = ctx.ops.backward(Prefixes(*prefixes), kept, of_moved[:5])
        return None, of_slot, of_context, of_token, of_blank, None, None, None, *of_logits, None, None, None


class Carried(torch.autograd.Function):
    """`reference.carried` with a backward of its own, which has the gradient of C by one product."""

    @staticmethod
    def forward(ctx: Any, told_SNR: Tensor, carry_RR: Tensor) -> Tensor:
        state_SNR = told_SNR.clone(memory_format=torch.contiguous_format)
        gate_UNR = torch.empty_like(state_SNR[1:])
        for (before_NR, state_NR), gate_NR in zip(pairwise(state_SNR.unbind()), gate_UNR.unbind(), strict=True):
            torch.ops.aten.hardswish.out(before_NR, out=gate_NR)
            state_NR.addmm_(gate_NR, carry_RR.T)
        ctx.save_for_backward(state_SNR, gate_UNR, carry_RR)
        return state_SNR

    @staticmethod
    def backward(ctx: Any, grad_SNR: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative()
        state_SNR, gate_UNR, carry_RR = ctx.saved_tensors
        grad_SNR = grad_SNR.clone(memory_format=torch.contiguous_format)
        steps = zip(pairwise(grad_SNR.unbind()), state_SNR.unbind(), strict=False)
        for (grad_NR, of_next_NR), state_NR in reversed([*steps]):
            grad_NR += torch.ops.aten.hardswish_backward(of_next_NR @ carry_RR, state_NR)
        return grad_SNR, grad_SNR[1:].flatten(0, 1).T @ gate_UNR.flatten(0, 1)


def refuse_second_derivative() -> None:
    """Raises RuntimeError in a backward that is itself recorded."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the fused loss is differentiable once, so backward(create_graph=True) is refused: "
            "for second derivatives pass implementation='reference'"
        )
