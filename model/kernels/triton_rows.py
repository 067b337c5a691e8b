"""The passes over a chunk of logits between its GEMMs, in place, and the label columns of the hidden gradient.

One program per row (and block of columns): no float atomics, every sum in a fixed order. Same names and contracts
as in `chunked`, whose loops call them. Offsets are 64 bit: rows times vocabulary passes 2^31. Shape suffixes as
in `chunked`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
HIDDEN_BLOCK = 1024


@triton.jit
def _softmax_kernel(z_ptr, lse_ptr, V, stride, WRITE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    lane = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], float("-inf"), WIDE)
    for start in range(0, V, BLOCK):
        z = tl.load(z_ptr + start + lane, mask=start + lane < V, other=float("-inf")).to(WIDE)
        peak = tl.maximum(peak, z)
    top = tl.max(peak, axis=0)
    total = tl.zeros([BLOCK], WIDE)
    for start in range(0, V, BLOCK):
        z = tl.load(z_ptr + start + lane, mask=start + lane < V, other=float("-inf")).to(WIDE)
        total += tl.exp(z - top)
    lse = top + tl.log(tl.sum(total, axis=0))
    tl.store(lse_ptr + row, lse)
    if WRITE:
        for start in range(0, V, BLOCK):
            inside = start + lane < V
            z = tl.load(z_ptr + start + lane, mask=inside, other=float("-inf")).to(WIDE)
            tl.store(z_ptr + start + lane, tl.exp(z - lse).to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    z_ptr, lse_ptr, grad_lse_ptr, index_ptr, grad_ptr, C, K, stride, index_stride, grad_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < C
    lse = tl.load(lse_ptr + row)
    z = tl.load(z_ptr + lane, mask=inside, other=float("-inf")).to(lse.dtype)
    gradient = tl.exp(z - lse) * tl.load(grad_lse_ptr + row)
    for k in range(K):  # in a fixed order: a column that occurs twice adds up
        column = tl.load(index_ptr + row * index_stride + k)
        gradient += tl.where(lane == column, tl.load(grad_ptr + row * grad_stride + k), 0.0)
    tl.store(z_ptr + lane, gradient.to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _hidden_kernel(
    weight_ptr, index_ptr, slope_ptr, grad_lse_ptr, grad_ptr, out_ptr, D, K, weight_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < D
    grad_lse = tl.load(grad_lse_ptr + row)
    total = tl.load(slope_ptr + row * D + lane, mask=inside, other=0.0).to(grad_lse.dtype) * grad_lse
    for k in range(K):
        weight = weight_ptr + tl.load(index_ptr + row * K + k) * weight_stride
        column = tl.load(weight + lane, mask=inside, other=0.0).to(grad_lse.dtype)
        total += tl.load(grad_ptr + row * K + k) * column
    tl.store(out_ptr + row * D + lane, total.to(out_ptr.dtype.element_ty), mask=inside)


def softmax_(z_RV: Tensor, write: bool) -> Tensor:
    """The lse [R] of whole rows of logits; with `write` they become their softmax, in place."""
    R, V = z_RV.shape
    wide = torch.promote_types(z_RV.dtype, torch.float32)
    lse_R = z_RV.new_empty(R, dtype=wide)
    if R:
        _softmax_kernel[(R,)](
            z_RV, lse_R, V, z_RV.stride(0), WRITE=write, WIDE=TYPES[wide], BLOCK=BLOCK, num_warps=WARPS
        )
    return lse_R


def logits_gradient_(z_RC: Tensor, lse_R: Tensor, grad_lse_R: Tensor, index_RK: Tensor, grad_logits_RK: Tensor) -> None:
    """In place: logits -> softmax * grad_lse + grad_logits at index (outside [0, C): not in this tile)."""
    R, C = z_RC.shape
    grad_lse_R, grad_logits_RK = grad_lse_R.contiguous(), grad_logits_RK.contiguous()
    index_RK = index_RK.contiguous()
    if R:
        _gradient_kernel[(R, triton.cdiv(C, BLOCK))](
            z_RC, lse_R, grad_lse_R, index_RK, grad_logits_RK, C, index_RK.shape[1],
            z_RC.stride(0), index_RK.stride(0), grad_logits_RK.stride(0), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def hidden_gradient(
    weight_VD: Tensor, index_MK: Tensor, slope_MD: Tensor, grad_lse_M: Tensor, grad_logits_MK: Tensor
) -> Tensor:
    """slope * grad_lse + the sum over columns of grad_logits * weight[index], summed in float32 or wider."""
    (M, D), K = slope_MD.shape, index_MK.shape[1]
    grad_MD = torch.empty_like(slope_MD)
    weight_VD = weight_VD.contiguous()
    if M:
        _hidden_kernel[(M, triton.cdiv(D, HIDDEN_BLOCK))](
            weight_VD, index_MK.contiguous(), slope_MD, grad_lse_M.contiguous(), grad_logits_MK.contiguous(),
            grad_MD, D, K, weight_VD.stride(0), BLOCK=HIDDEN_BLOCK, num_warps=4,
        )  # fmt: skip
    return grad_MD


TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
