"""`linear_lse_gather` where the LM head is in bfloat16 and the hidden states are not: GEMMs in bfloat16, which CPUs
with units for it multiply more than twice as fast, and all else in float32.

The hidden states are rounded to bfloat16, as drafting rounds them. A GEMM rounds each logit once more, which moves a
large one by a few hundredths: the gathered and the largest logit are therefore computed again in float32, and the sum
over the vocabulary takes the largest in as that (and so does the slope). What stays rounded are the many small terms
of the sum, whose errors have no common sign.

Shape suffixes as in chunked.py.
"""

from functools import lru_cache

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from ctcdraft.model.kernels.chunked import Forward, _empty, _slices, tile_shape
from ctcdraft.model.kernels.cpu import array_of, use_torch_threads


def suits(hidden_MD: Tensor, weight_VD: Tensor) -> bool:
    """Is this what is computed here: float32 states on a CPU, and a frozen LM head in bfloat16?"""
    kinds = (hidden_MD.dtype, weight_VD.dtype)
    return kinds == (torch.float32, torch.bfloat16) and not hidden_MD.is_cuda and not weight_VD.requires_grad


def forward(hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, with_slope: bool) -> Forward:
    """Every row, all of it in float32."""
    (M, D), V = hidden_MD.shape, len(weight_VD)
    weight_VD = weight_VD.contiguous()
    out = _empty(hidden_MD, index_MK, with_slope)
    height, width = tile_shape(M, V, hidden_MD.element_size(), "cpu")
    tile, wide_tile, product = _buffers(height * width, height * D)
    for rows in _slices(M, height):
        narrow_RD = hidden_MD[rows].to(weight_VD.dtype)
        R = len(narrow_RD)
        peak_R, total_R = hidden_MD.new_full((R,), -torch.inf), hidden_MD.new_zeros(R)
        largest_R = index_MK.new_zeros(R)  # where the peak of the sum stands
        slope_RD = hidden_MD.new_zeros(R, D) if with_slope else None
        for columns in _slices(V, width):
            weight_CD = weight_VD[columns]
            shape = R, len(weight_CD)
            z_RC, wide_RC = (part[: shape[0] * shape[1]].view(shape) for part in (tile, wide_tile))
            torch.mm(narrow_RD, weight_CD.T, out=z_RC)
            wide_RC.copy_(z_RC)
            here_R, at_R = wide_RC.max(dim=1)
            higher_R, before_R = here_R > peak_R, peak_R
            largest_R = torch.where(higher_R, at_R + columns.start, largest_R)
            peak_R = torch.where(higher_R, here_R, before_R)
            shrink_R = (before_R - peak_R).exp_()
            total_R.mul_(shrink_R)
            arrays = wide_RC.numpy(), peak_R.numpy(), total_R.numpy(), z_RC.view(torch.uint16).numpy()
            _exponentials(use_torch_threads(), *arrays)  # type: ignore[call-arg]
            if slope_RD is not None:
                product_RD = product[: R * D].view(R, D)
                torch.mm(z_RC, weight_CD, out=product_RD)
                slope_RD.mul_(shrink_R.unsqueeze(1)).add_(product_RD)
        exact_R1 = (dots(narrow_RD, weight_VD, largest_R.unsqueeze(1)) - peak_R.unsqueeze(1)).exp_()
        rest_R = (total_R - 1.0).clamp_(min=0.0)  # of which the peak as the GEMM rounded it was exp(0)
        total_R = rest_R + exact_R1.squeeze(1)
        out.lse_M[rows] = peak_R + total_R.log()
        out.logits_MK[rows] = dots(narrow_RD, weight_VD, index_MK[rows])
        if out.slope_MD is not None and slope_RD is not None:
            add_columns(slope_RD, weight_VD, largest_R.unsqueeze(1), exact_R1 - 1.0)
            torch.div(slope_RD, total_R.unsqueeze(1), out=out.slope_MD[rows])
    return out


def hidden_gradient(
    weight_VD: Tensor, index_MK: Tensor, slope_MD: Tensor, grad_lse_M: Tensor, grad_logits_MK: Tensor
) -> Tensor:
    """slope * grad_lse + the sum over columns of grad_logits * weight[index]."""
    grad_MD = slope_MD * grad_lse_M.unsqueeze(1)
    add_columns(grad_MD, weight_VD.contiguous(), index_MK, grad_logits_MK)
    return grad_MD


def dots(narrow_RD: Tensor, weight_VD: Tensor, index_RK: Tensor) -> Tensor:
    """<hidden[r], weight[index[r, k]]> of bfloat16 rows, summed in float32 [R, K]."""
    found_RK = torch.empty(index_RK.shape, dtype=torch.float32)
    rows_RD = array_of(narrow_RD.float())
    _dots(use_torch_threads(), found_RK.numpy(), rows_RD, _bits(weight_VD), array_of(index_RK))  # type: ignore[call-arg]
    return found_RK


def add_columns(sum_RD: Tensor, weight_VD: Tensor, index_RK: Tensor, factor_RK: Tensor) -> None:
    """sum[r] += factor[r, k] * weight[index[r, k]], in place; of a bfloat16 weight."""
    factors = array_of(factor_RK)
    _add_columns(use_torch_threads(), sum_RD.numpy(), _bits(weight_VD), array_of(index_RK), factors)  # type: ignore


@lru_cache(maxsize=2)
def _buffers(tile: int, product: int) -> tuple[Tensor, Tensor, Tensor]:
    """A tile of logits in bfloat16 and in float32, and a product: kept from step to step, since the pages of fresh ones
    cost more than what is written there."""
    half = torch.bfloat16
    return torch.empty(tile, dtype=half), torch.empty(tile), torch.empty(product, dtype=half)


def _bits(weight_VD: Tensor) -> np.ndarray:
    return weight_VD.detach().view(torch.uint16).numpy()


@njit(cache=True, parallel=True, fastmath={"reassoc", "contract"})
def _exponentials(threads, z, peak, total, out):
    """out = exp(z - peak) in bfloat16, z overwritten; its sum before rounding is added to the total. exp(x) is 2^n 2^f
    with |f| <= 1/2, and 2^f a polynomial (1e-7 off); what is below 2^-126 becomes that."""
    R, C = z.shape
    for chunk in prange(threads):
        for r in range(R * chunk // threads, R * (chunk + 1) // threads):
            shift = peak[r]
            for c in range(C):
                x = max((z[r, c] - shift) * np.float32(1.4426950408889634), np.float32(-126.0))
                n = np.int32(x - np.float32(0.5))
                f = x - np.float32(n)
                power = np.float32(1.5403530e-4)
                power = power * f + np.float32(1.3333558e-3)
                power = power * f + np.float32(9.6181291e-3)
                power = power * f + np.float32(5.5504109e-2)
                power = power * f + np.float32(2.4022651e-1)
                power = power * f + np.float32(6.9314718e-1)
                power = power * f + np.float32(1.0)
                z[r, c] = np.int32(np.float32(power).view(np.int32) + np.int32(n << np.int32(23))).view(np.float32)
            whole = np.float32(0)
            for c in range(C):
                whole += z[r, c]
            total[r] += whole
            for c in range(C):  # to the nearest
                out[r, c] = np.uint16((np.float32(z[r, c]).view(np.int32) + np.int32(0x8000)) >> np.int32(16))


@njit(cache=True)
def _widened(out, bits):
    """bfloat16 is the upper half of a float32."""
    for d in range(len(bits)):
        out[d] = np.uint32(np.uint32(bits[d]) << np.uint32(16)).view(np.float32)


@njit(cache=True, parallel=True, fastmath={"reassoc", "contract"})
def _dots(threads, found, rows, weight, index):
    (R, K), D = index.shape, rows.shape[1]
    for chunk in prange(threads):
        column = np.empty(D, np.float32)
        for r in range(R * chunk // threads, R * (chunk + 1) // threads):
            for k in range(K):
                _widened(column, weight[index[r, k]])
                total = np.float32(0)
                for d in range(D):
                    total += rows[r, d] * column[d]
                found[r, k] = total


@njit(cache=True, parallel=True, fastmath={"contract"})
def _add_columns(threads, total, weight, index, factor):
    (R, K), D = index.shape, total.shape[1]
    for chunk in prange(threads):
        column = np.empty(D, np.float32)
        for r in range(R * chunk // threads, R * (chunk + 1) // threads):
            for k in range(K):
                if factor[r, k] != 0:
                    _widened(column, weight[index[r, k]])
                    for d in range(D):
                        total[r, d] += factor[r, k] * column[d]
