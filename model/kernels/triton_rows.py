"""What `linear_lse` does beside its GEMMs, under the same names: a tile's exponentials and the hidden gradient.

One program per row (and block of D): no float atomics, every sum in a fixed order. Offsets are 64 bit: rows times
vocabulary passes 2^31.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
HIDDEN_BLOCK = 1024


@triton.jit
def exponentials_kernel(z_ptr, peak_ptr, total_ptr, V, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), WIDE)
    for start in range(0, V, BLOCK):
        z = tl.load(z_ptr + start + lane, mask=start + lane < V, other=float("-inf")).to(WIDE)
        largest = tl.maximum(largest, z)
    peak = tl.max(largest, axis=0)
    total = tl.zeros([BLOCK], WIDE)
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        power = tl.exp(tl.load(z_ptr + start + lane, mask=inside, other=float("-inf")).to(WIDE) - peak)
        total += power
        tl.store(z_ptr + start + lane, power.to(z_ptr.dtype.element_ty), mask=inside)
    tl.store(peak_ptr + row, peak)
    tl.store(total_ptr + row, tl.sum(total, axis=0))


@triton.jit
def hidden_kernel(
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


def exponentials_(z_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and its sum of exp(z - largest), in float32 or wider; z becomes exp(z - largest)."""
    R, V = z_RV.shape
    wide = torch.promote_types(z_RV.dtype, torch.float32)
    peak_R, total_R = z_RV.new_empty(2, R, dtype=wide)
    kind = tl.float64 if wide == torch.float64 else tl.float32
    exponentials_kernel[(R,)](z_RV, peak_R, total_R, V, z_RV.stride(0), WIDE=kind, BLOCK=BLOCK, num_warps=WARPS)
    return peak_R, total_R


def hidden_gradient(
    weight_VD: Tensor, index_MK: Tensor, slope_MD: Tensor, grad_lse_M: Tensor, grad_logits_MK: Tensor
) -> Tensor:
    """slope * grad_lse + the sum over columns of grad_logits * weight[index], summed in float32 or wider."""
    (M, D), K = slope_MD.shape, index_MK.shape[1]
    grad_MD = torch.empty_like(slope_MD)
    weight_VD = weight_VD.contiguous()
    if M:
        hidden_kernel[(M, triton.cdiv(D, HIDDEN_BLOCK))](
            weight_VD, index_MK.contiguous(), slope_MD, grad_lse_M.contiguous(), grad_logits_MK.contiguous(),
            grad_MD, D, K, weight_VD.stride(0), BLOCK=HIDDEN_BLOCK, num_warps=4,
        )  # fmt: skip
    return grad_MD
