"""`linear_lse_gather` over one reused tile of logits: never more than a fixed number of bytes of [M, V].

The derivative of a row's lse with respect to hidden is `softmax @ weight`. It does not depend on what is done
with lse afterwards, so it is computed while a tile's logits are still there: two GEMMs in all. Tiles that hold
a part of the vocabulary are joined by a running maximum (online softmax: Milakov and Gimelshein 2018,
arXiv 1805.02867).

Shape suffixes: M rows, V vocabulary, D hidden, K gathered columns; R rows and C columns of one tile.
"""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A CPU wants a tile that stays in its cache between the two GEMMs, about as high as wide (measured: docs/
# fused_ctc.md). A GPU wants large GEMMs over the whole vocabulary.
TILE_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
CPU_ROWS = 2048
GRADIENT_ROWS = 4096
LOG_2 = math.log(2.0)
SAFE_BITS = 30  # |log2| up to which sums of exp2 are far from overflow and underflow in float32
LEAST = 128  # rows or columns below which a GEMM itself gets slow


class Forward(NamedTuple):
    """lse [M] and logits [M, K] in float32 or wider, slope = d lse / d hidden [M, D] or None."""

    lse_M: Tensor
    logits_MK: Tensor
    slope_MD: Tensor | None

    def rows(self, rows: slice) -> "Forward":
        return Forward(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


def tile_shape(rows: int, vocab: int, bytes_per_value: int, device: str) -> tuple[int, int]:
    """How many rows and columns of logits are held at a time."""
    values = TILE_BYTES.get(device, TILE_BYTES["cuda"]) // bytes_per_value
    if device != "cpu":
        return min(rows, max(LEAST, values // vocab)), vocab
    height = _even(rows, CPU_ROWS)
    return height, _even(vocab, max(LEAST, values // max(1, height)))


def _even(length: int, most: int) -> int:
    """The step that cuts a length into as few parts as `most` does, of the same size."""
    return -(-length // max(1, -(-length // most)))


def forward(hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, with_slope: bool, ops: ModuleType) -> Forward:
    """Every row; `ops` holds the pass over the logits (this module's `softmax_`, or Triton's)."""
    M, V = hidden_MD.shape[0], weight_VD.shape[0]
    out = _empty(hidden_MD, index_MK, with_slope)
    height, width = tile_shape(M, V, hidden_MD.element_size(), hidden_MD.device.type)
    buffer = hidden_MD.new_empty(height * width)
    for rows in _slices(M, height):
        if width == V:
            _whole_rows(hidden_MD[rows], weight_VD, index_MK[rows], out.rows(rows), buffer, ops)
        else:
            _rows_by_tiles(hidden_MD[rows], weight_VD, index_MK[rows], out.rows(rows), buffer, width)
    return out


def _empty(hidden_MD: Tensor, index_MK: Tensor, with_slope: bool) -> Forward:
    M = hidden_MD.shape[0]
    wide = torch.promote_types(hidden_MD.dtype, torch.float32)
    return Forward(
        hidden_MD.new_empty(M, dtype=wide),
        hidden_MD.new_empty(index_MK.shape, dtype=wide),
        torch.empty_like(hidden_MD, memory_format=torch.contiguous_format) if with_slope else None,
    )


def weight_gradient(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    index_MK: Tensor,
    lse_M: Tensor,
    grad_lse_M: Tensor,
    grad_logits_MK: Tensor,
    ops: ModuleType,
) -> Tensor:
    """The gradient [V, D] of a trained weight, from logits computed once more.

    Tiles of vocabulary outside and rows inside, so that each row of it is summed up in float32 (or wider) and
    rounded once. `ops.logits_gradient_` turns a tile of logits into their gradient, in place.
    """
    M, V = hidden_MD.shape[0], weight_VD.shape[0]
    height, width = _gradient_tile(M, V, hidden_MD)
    buffer = hidden_MD.new_empty(height * width)
    grad_VD = torch.empty_like(weight_VD, memory_format=torch.contiguous_format)
    for columns in _slices(V, width):
        weight_CD = weight_VD[columns]
        grad_CD = torch.zeros_like(weight_CD, dtype=lse_M.dtype)
        for rows in _slices(M, height):
            z_RC = _logits(hidden_MD[rows], weight_CD, buffer)
            local_RK = index_MK[rows] - columns.start
            ops.logits_gradient_(z_RC, lse_M[rows], grad_lse_M[rows], local_RK, grad_logits_MK[rows])
            _add_product(grad_CD, z_RC.T, hidden_MD[rows])
        grad_VD[columns] = grad_CD
    return grad_VD


def softmax_(z_RC: Tensor, write: bool) -> Tensor:
    """The lse [R] of whole rows of logits; with `write` they become their softmax, in place."""
    lse_R = z_RC.to(torch.promote_types(z_RC.dtype, torch.float32)).logsumexp(dim=1)
    if write:
        z_RC.copy_(z_RC.to(lse_R.dtype).sub_(lse_R.unsqueeze(1)).exp_())
    return lse_R


def logits_gradient_(z_RC: Tensor, lse_R: Tensor, grad_lse_R: Tensor, index_RK: Tensor, grad_logits_RK: Tensor) -> None:
    """In place: logits -> softmax * grad_lse + grad_logits at index (outside [0, C): not in this tile).

    With grad_logits = -(grad_lse * occupancy) this is the CTC gradient, softmax minus occupancy.
    """
    wide_RC = z_RC.to(lse_R.dtype).sub_(lse_R.unsqueeze(1)).exp_().mul_(grad_lse_R.unsqueeze(1))
    inside_RK = (index_RK >= 0) & (index_RK < z_RC.shape[1])
    for k in range(index_RK.shape[1]):  # one by one: a column that occurs twice adds up, in a fixed order
        column_R1 = index_RK[:, k : k + 1].where(inside_RK[:, k : k + 1], 0)
        share_R1 = grad_logits_RK[:, k : k + 1].where(inside_RK[:, k : k + 1], 0.0)
        wide_RC.scatter_(1, column_R1, wide_RC.gather(1, column_R1) + share_R1)
    z_RC.copy_(wide_RC)


def hidden_gradient(
    weight_VD: Tensor, index_MK: Tensor, slope_MD: Tensor, grad_lse_M: Tensor, grad_logits_MK: Tensor
) -> Tensor:
    """slope * grad_lse + the sum over columns of grad_logits * weight[index], summed in float32 or wider."""
    grad_MD = torch.empty_like(slope_MD)
    for rows in _slices(len(slope_MD), GRADIENT_ROWS):
        total_RD = slope_MD[rows].to(grad_lse_M.dtype) * grad_lse_M[rows].unsqueeze(1)
        if index_MK.shape[1] and weight_VD.dtype == total_RD.dtype:
            total_RD += F.embedding_bag(
                index_MK[rows], weight_VD, per_sample_weights=grad_logits_MK[rows].contiguous(), mode="sum"
            )
        else:  # embedding_bag would round the factors to half precision
            for k in range(index_MK.shape[1]):
                column_RD = weight_VD.index_select(0, index_MK[rows, k]).to(total_RD.dtype)
                total_RD.addcmul_(column_RD, grad_logits_MK[rows, k : k + 1])
        grad_MD[rows] = total_RD
    return grad_MD


def _whole_rows(
    hidden_RD: Tensor, weight_VD: Tensor, index_RK: Tensor, out: Forward, buffer: Tensor, ops: ModuleType
) -> None:
    z_RV = _logits(hidden_RD, weight_VD, buffer)
    out.logits_MK.copy_(z_RV.gather(1, index_RK))
    out.lse_M.copy_(ops.softmax_(z_RV, out.slope_MD is not None))
    if out.slope_MD is not None:
        torch.mm(z_RV, weight_VD, out=out.slope_MD)


def _rows_by_tiles(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    index_RK: Tensor,
    out: Forward,
    buffer: Tensor,
    width: int,
    shifted: bool = False,
) -> None:
    """Logits in units of log 2: the GEMM scales them at no cost, and exp2 takes half the time of exp.

    Where a row's first logits are small nothing is subtracted before exp2, which saves two passes; a sum that
    leaves the safe range all the same sends the rows through once more, shifted by a running maximum.
    """
    peak_R = torch.full_like(out.lse_M, -torch.inf)
    total_R = torch.zeros_like(peak_R)
    slope_RD = None if out.slope_MD is None else torch.zeros_like(hidden_RD, dtype=peak_R.dtype)
    found_RK = torch.empty_like(out.logits_MK)
    for columns in _slices(len(weight_VD), width):
        weight_CD = weight_VD[columns]
        z_RC = _logits(hidden_RD, weight_CD, buffer, scale=1.0 / LOG_2)
        wide_RC = z_RC.to(found_RK.dtype)
        local_RK = index_RK - columns.start
        inside_RK = (local_RK >= 0) & (local_RK < wide_RC.shape[1])
        found_RK = torch.where(inside_RK, wide_RC.gather(1, local_RK.where(inside_RK, 0)), found_RK)
        if columns.start == 0:
            shifted = shifted or not bool((z_RC[:, :LEAST].amax(dim=1).abs() < SAFE_BITS).all())
            peak_R.fill_(-torch.inf if shifted else 0.0)
        shrink_R1 = _absorb(z_RC, peak_R, total_R, shifted)
        if slope_RD is not None:
            if shrink_R1 is not None:
                slope_RD.mul_(shrink_R1)
            _add_product(slope_RD, z_RC, weight_CD)
    if not shifted and not bool((total_R.log2().abs() < 2 * SAFE_BITS).all()):
        return _rows_by_tiles(hidden_RD, weight_VD, index_RK, out, buffer, width, shifted=True)
    out.lse_M.copy_((peak_R + total_R.log2()) * LOG_2)
    out.logits_MK.copy_(found_RK.mul_(LOG_2))
    if slope_RD is not None and out.slope_MD is not None:
        out.slope_MD.copy_(slope_RD.div_(total_R.unsqueeze(1)))


def _absorb(z_RC: Tensor, peak_R: Tensor, total_R: Tensor, shifted: bool) -> Tensor | None:
    """Take a tile into the running maximum `peak` and sum `total`; the tile becomes 2^(z - peak). All in place.

    Returns 2^(old peak - peak) [R, 1], the factor by which what was summed up before must shrink; None where the
    peak stays (not `shifted`).
    """
    shrink_R1 = None
    wide_RC = z_RC.to(peak_R.dtype)
    if shifted:
        new_peak_R = torch.maximum(peak_R, wide_RC.amax(dim=1))
        shrink_R1 = (peak_R - new_peak_R).exp2_().unsqueeze(1)
        total_R.mul_(shrink_R1.squeeze(1))
        peak_R.copy_(new_peak_R)
        wide_RC.sub_(peak_R.unsqueeze(1))
    total_R.add_(wide_RC.exp2_().sum(dim=1))
    if wide_RC.dtype != z_RC.dtype:
        z_RC.copy_(wide_RC)
    return shrink_R1


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, max(1, step)):
        yield slice(start, min(start + step, length))


def _gradient_tile(M: int, V: int, hidden_MD: Tensor) -> tuple[int, int]:
    """Few and tall tiles on a GPU: each holds a float32 [C, D] sum, and rows inside are read again per tile."""
    height, width = tile_shape(M, V, hidden_MD.element_size(), hidden_MD.device.type)
    if hidden_MD.device.type == "cpu":
        return height, width
    width = min(V, 8192)
    return min(M, max(LEAST, TILE_BYTES["cuda"] // hidden_MD.element_size() // width)), width


def _logits(hidden_RD: Tensor, weight_CD: Tensor, buffer: Tensor, scale: float = 1.0) -> Tensor:
    shape = (len(hidden_RD), len(weight_CD))
    return buffer[: shape[0] * shape[1]].view(shape).addmm_(hidden_RD, weight_CD.T, beta=0, alpha=scale)


def _add_product(sum_RD: Tensor, left_RC: Tensor, right_CD: Tensor) -> None:
    if left_RC.dtype == sum_RD.dtype:
        sum_RD.addmm_(left_RC, right_CD)
    else:  # a half-precision sum would be rounded once per tile
        sum_RD.add_(torch.mm(left_RC, right_CD))
