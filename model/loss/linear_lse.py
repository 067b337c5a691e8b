"""`linear_lse_gather` over one reused tile of logits: a few rows of [M, V] at a time, and two GEMMs in all.

The derivative of a row's lse with respect to hidden is `softmax @ weight`. It does not depend on what is done with lse
afterwards, so it is computed while a tile's logits are still there.

On a CPU float32 states may meet a frozen weight in bfloat16. The GEMMs are then bfloat16's, and round each logit: the
gathered and the largest are computed again in float32, and the largest is put right in the sum and in the slope. What
stays rounded are the many small terms of the sum, whose errors have no common sign.

Shape suffixes: M rows, V vocabulary, D hidden, K gathered columns; R rows of one tile.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

TILE_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
FEWEST, MOST_ON_CPU = 128, 512  # rows: below the one a GEMM gets slow, above the other it gains nothing more
GATHERED_ROWS = 4096  # of the weight, at a time
LOG2_E = 1.0 / math.log(2.0)
Exponentials = Callable[[Tensor], tuple[Tensor, Tensor]]
_kept: dict[torch.dtype, Tensor] = {}


class LinearLseGather(torch.autograd.Function):
    """See `kernels.linear_lse_gather`. exponentials: `exponentials_`, this one or Triton's."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, exponentials: Exponentials
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_MD.dtype, torch.float32)
        with_slope, trained = ctx.needs_input_grad[:2]
        lse_M = hidden_MD.new_empty(len(hidden_MD), dtype=wide)
        logits_MK = hidden_MD.new_empty(index_MK.shape, dtype=wide)
        slope_MD = torch.empty_like(hidden_MD, memory_format=torch.contiguous_format) if with_slope else None
        for rows, narrow_RD, z_RV in _tiles(hidden_MD, weight_VD):
            if mixed := narrow_RD.dtype != hidden_MD.dtype:
                largest_R1 = z_RV.max(dim=1, keepdim=True).indices  # argmax takes ten times as long
                exact_RK = indexed_dots(narrow_RD, weight_VD, torch.cat([largest_R1, index_MK[rows]], dim=1))
                logits_MK[rows] = exact_RK[:, 1:]
            else:
                logits_MK[rows] = z_RV.gather(1, index_MK[rows]).to(wide)
            peak_R, total_R = exponentials(z_RV)
            if mixed:
                exact_R1 = (exact_RK[:, :1] - peak_R.unsqueeze(1)).exp_()
                total_R = (total_R - 1.0).clamp_(min=0.0) + exact_R1.squeeze(1)  # as rounded, the largest was exp(0)
            lse_M[rows] = peak_R + total_R.log()
            if slope_MD is not None:
                sum_RD = z_RV @ weight_VD
                if mixed:
                    sum_RD = sum_RD.to(wide)
                    _add_columns(sum_RD, weight_VD, largest_R1, exact_R1 - 1.0)
                torch.div(sum_RD, total_R.unsqueeze(1), out=slope_MD[rows])
        ctx.save_for_backward(weight_VD, index_MK, slope_MD, hidden_MD if trained else None)
        return lse_M, logits_MK

    @staticmethod
    def backward(ctx: Any, grad_lse_M: Tensor, grad_logits_MK: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        weight_VD, index_MK, slope_MD, hidden_MD = ctx.saved_tensors
        wide, grad_MD, grad_VD = grad_lse_M.dtype, None, None
        if slope_MD is not None:  # slope * grad_lse + the sum over columns of grad_logits * weight[index]
            grad_MD = torch.empty_like(slope_MD)
            for rows in _slices(len(slope_MD), GATHERED_ROWS):
                sum_RD = slope_MD[rows].to(wide) * grad_lse_M[rows].unsqueeze(1)
                _add_columns(sum_RD, weight_VD, index_MK[rows], grad_logits_MK[rows])
                grad_MD[rows] = sum_RD
        if hidden_MD is not None:  # of a trained weight: from logits computed once more
            sum_VD = torch.zeros_like(weight_VD, dtype=wide, memory_format=torch.contiguous_format)
            for rows, hidden_RD, z_RV in _tiles(hidden_MD, weight_VD):
                grad_RV = z_RV.to(wide)
                _, total_R = exponentials_(grad_RV)
                grad_RV.mul_((grad_lse_M[rows] / total_R).unsqueeze(1))
                for k in range(index_MK.shape[1]):  # one by one: a column that occurs twice adds up, in a fixed order
                    column_R1 = index_MK[rows, k : k + 1]
                    grad_RV.scatter_(1, column_R1, grad_RV.gather(1, column_R1) + grad_logits_MK[rows, k : k + 1])
                sum_VD += grad_RV.to(hidden_RD.dtype).T @ hidden_RD
            grad_VD = sum_VD.to(weight_VD.dtype)
        return grad_MD, grad_VD, None, None


def refuse_second_derivative() -> None:
    """Raises RuntimeError in a backward that is itself recorded."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the fused loss is differentiable once, so backward(create_graph=True) is refused: "
            "for second derivatives pass implementation='reference'"
        )


def multiplies_in_bfloat16(hidden_MD: Tensor, weight_VD: Tensor) -> bool:
    """Are these float32 states on a CPU, and a frozen weight in bfloat16?"""
    kinds = (hidden_MD.dtype, weight_VD.dtype)
    return kinds == (torch.float32, torch.bfloat16) and not hidden_MD.is_cuda and not weight_VD.requires_grad


def tile_rows(rows: int, vocab: int, bytes_per_value: int, device: str) -> int:
    """Of how many rows the logits are held at a time."""
    most = max(FEWEST, TILE_BYTES.get(device, TILE_BYTES["cuda"]) // (bytes_per_value * vocab))
    return min(rows, most, MOST_ON_CPU) if device == "cpu" else min(rows, most)


def exponentials_(z_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and its sum of exp(z - largest), in float32 or wider; z becomes exp(z - largest)."""
    wide = torch.promote_types(z_RV.dtype, torch.float32)
    wide_RV = z_RV if z_RV.dtype == wide else _workspace(len(z_RV), z_RV.shape[1], wide, z_RV.device).copy_(z_RV)
    peak_R = wide_RV.amax(dim=1)
    torch.exp2(wide_RV.sub_(peak_R.unsqueeze(1)).mul_(LOG2_E), out=wide_RV)  # a tenth of what exp takes on a CPU
    if wide_RV is not z_RV:
        z_RV.copy_(wide_RV)
    return peak_R, wide_RV.sum(dim=1)


def indexed_dots(hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor) -> Tensor:
    """<hidden[m], weight[index[m, k]]> [M, K], summed in float32 or wider."""
    dots_MK = hidden_MD.new_empty(index_MK.shape, dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
    for rows in _slices(len(hidden_MD), GATHERED_ROWS):
        wide_RD = hidden_MD[rows].to(dots_MK.dtype)
        for k in range(index_MK.shape[1]):
            dots_MK[rows, k] = (wide_RD * weight_VD[index_MK[rows, k]]).sum(dim=1)
    return dots_MK


def _tiles(hidden_MD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their hidden states in the weight's dtype, their logits [R, V], in the buffer of all tiles)."""
    M, V = len(hidden_MD), len(weight_VD)
    height = tile_rows(M, V, hidden_MD.element_size(), hidden_MD.device.type)
    buffer_RV = _workspace(height, V, weight_VD.dtype, weight_VD.device)
    for rows in _slices(M, height):
        narrow_RD = hidden_MD[rows].to(weight_VD.dtype)
        yield rows, narrow_RD, torch.mm(narrow_RD, weight_VD.T, out=buffer_RV[: len(narrow_RD)])


@torch.inference_mode(False)  # it is kept, for steps in any mode
def _workspace(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, vocab] to write on, until the next of this dtype. A CPU's is kept from step to step: the pages of a fresh
    one cost more than what is written there."""
    if device.type != "cpu":
        return torch.empty(rows, vocab, dtype=dtype, device=device)
    if dtype not in _kept or _kept[dtype].numel() < rows * vocab:
        _kept[dtype] = torch.empty(rows * vocab, dtype=dtype)
    return _kept[dtype][: rows * vocab].view(rows, vocab)


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, max(1, step)):
        yield slice(start, min(start + step, length))


def _add_columns(sum_RD: Tensor, weight_VD: Tensor, index_RK: Tensor, factor_RK: Tensor) -> None:
    """sum[r] += factor[r, k] * weight[index[r, k]], in place, in a fixed order."""
    for index_R, factor_R in zip(index_RK.T, factor_RK.T, strict=True):
        sum_RD += factor_R.unsqueeze(1) * weight_VD[index_R]
