"""The autograd glue of `linear_lse_gather`: what is saved in the forward, what the backward makes of it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctcdraft.model.kernels import chunked


class LinearLseGather(torch.autograd.Function):
    """Differentiable in `hidden`; the weight (the base's LM head) is frozen."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor) -> tuple[Tensor, Tensor]:
        lse_M, logits_MK, slope_MD = chunked.forward(hidden_MD, weight_VD, index_MK, ctx.needs_input_grad[0])
        ctx.save_for_backward(weight_VD, index_MK, slope_MD)
        return lse_M, logits_MK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_lse_M: Tensor, grad_logits_MK: Tensor) -> tuple[Tensor, None, None]:
        weight_VD, index_MK, slope_MD = ctx.saved_tensors
        grad_MD = slope_MD * grad_lse_M.unsqueeze(1).to(slope_MD.dtype)
        for k in range(index_MK.shape[1]):
            column_M1 = grad_logits_MK[:, k : k + 1].to(slope_MD.dtype)
            grad_MD.addcmul_(weight_VD[index_MK[:, k]], column_M1)
        return grad_MD, None, None
