"""The autograd glue: what a forward saves, and what its backward makes of it. Differentiable once."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ctcdraft.model.kernels import chunked, cpu_mixed
from ctcdraft.model.kernels.reference import LatticeInputs


class LinearLseGather(torch.autograd.Function):
    """(hidden, weight, index, ops) -> lse [M] and logits [M, K] at `index`.

    `ops` is the module that holds `softmax_`, `logits_gradient_` and `hidden_gradient`: `chunked` itself, or
    `triton_rows`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, ops: ModuleType
    ) -> tuple[Tensor, Tensor]:
        with_slope, trained = ctx.needs_input_grad[:2]
        out = chunked.forward(hidden_MD, weight_VD, index_MK, with_slope, ops)
        ctx.ops = ops
        ctx.save_for_backward(weight_VD, index_MK, out.lse_M, out.slope_MD, hidden_MD if trained else None)
        return out.lse_M, out.logits_MK

    @staticmethod
    def backward(ctx: Any, grad_lse_M: Tensor, grad_logits_MK: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        weight_VD, index_MK, lse_M, slope_MD, hidden_MD = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = ctx.ops.hidden_gradient(weight_VD, index_MK, slope_MD, grad_lse_M, grad_logits_MK)
        if ctx.needs_input_grad[1]:
            grad_weight = chunked.weight_gradient(
                hidden_MD, weight_VD, index_MK, lse_M, grad_lse_M, grad_logits_MK, ctx.ops
            )
        return grad_hidden, grad_weight, None, None


class MixedLseGather(torch.autograd.Function):
    """The same in mixed precision, for a frozen weight (`cpu_mixed`)."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor) -> tuple[Tensor, Tensor]:
        out = cpu_mixed.forward(hidden_MD, weight_VD, index_MK, ctx.needs_input_grad[0])
        ctx.save_for_backward(weight_VD, index_MK, out.slope_MD)
        return out.lse_M, out.logits_MK

    @staticmethod
    def backward(ctx: Any, grad_lse_M: Tensor, grad_logits_MK: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        weight_VD, index_MK, slope_MD = ctx.saved_tensors
        return cpu_mixed.hidden_gradient(weight_VD, index_MK, slope_MD, grad_lse_M, grad_logits_MK), None, None


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


def refuse_second_derivative() -> None:
    """Raises RuntimeError in a backward that is itself recorded."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the fused loss is differentiable once, so backward(create_graph=True) is refused: "
            "for second derivatives pass implementation='reference'"
        )
