"""lse and gathered logits with no logits in memory at all: for when no gradient is asked (evaluation, figures).

Two phases, no locks and no float atomics: each program walks its share of the vocabulary over one block of rows
and leaves a maximum and a sum of its own; the shares are then joined in a fixed order. With a gradient the
chunked path is the faster one, since its second GEMM needs the softmax anyway (docs/fused_ctc.md).

Shape suffixes: M rows, V vocabulary, D hidden, K gathered columns, P shares of the vocabulary.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 128, 256, 64  # one program's tile of rows x vocabulary, and the step along D
WARPS, STAGES = 8, 3
PROGRAMS = 264  # as many as fill a large GPU twice
DOT_ROWS = 16  # rows of one program of the gather


@triton.jit
def lse_kernel(
    hidden_ptr, weight_ptr, peak_ptr, total_ptr, M, V, D, share, hidden_stride, weight_stride,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """peak, total [P, M] of one share of the vocabulary: max z and sum exp(z - max)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_row = row < M
    hidden_ptr += row.to(tl.int64)[:, None] * hidden_stride
    first = tl.program_id(1) * share
    peak = tl.full([ROWS], float("-inf"), WIDE)
    total = tl.zeros([ROWS], WIDE)
    depth = tl.arange(0, DEPTH)
    for start in range(first, tl.minimum(first + share, V), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside_column = column < tl.minimum(first + share, V)
        tile_ptr = weight_ptr + column.to(tl.int64)[None, :] * weight_stride
        z = tl.zeros([ROWS, COLUMNS], WIDE)
        for d in range(0, D, DEPTH):
            inside_depth = d + depth < D
            h = tl.load(hidden_ptr + d + depth[None, :], mask=inside_row[:, None] & inside_depth[None, :], other=0.0)
            w = tl.load(tile_ptr + d + depth[:, None], mask=inside_column[None, :] & inside_depth[:, None], other=0.0)
            if UPCAST:
                h, w = h.to(WIDE), w.to(WIDE)
            z = tl.dot(h, w, z, input_precision="ieee", out_dtype=WIDE)
        z = tl.where(inside_column[None, :], z, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(z, axis=1))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(z - new_peak[:, None]), axis=1)
        peak = new_peak
    out = tl.program_id(1).to(tl.int64) * M + row
    tl.store(peak_ptr + out, peak, mask=inside_row)
    tl.store(total_ptr + out, total, mask=inside_row)


@triton.jit
def indexed_dot_kernel(
    hidden_ptr, weight_ptr, index_ptr, logits_ptr, M, K, D, hidden_stride, weight_stride, index_stride,
    WIDE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """logits[m, k] = <hidden[m], weight[index[m, k]]>, one column k per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1)
    inside_row = row < M
    column = tl.load(index_ptr + row.to(tl.int64) * index_stride + k, mask=inside_row, other=0).to(tl.int64)
    hidden_ptr += row.to(tl.int64)[:, None] * hidden_stride
    weight_ptr += column[:, None] * weight_stride
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS], WIDE)
    for d in range(0, D, DEPTH):
        inside = inside_row[:, None] & (d + depth < D)[None, :]
        h = tl.load(hidden_ptr + d + depth[None, :], mask=inside, other=0.0).to(WIDE)
        w = tl.load(weight_ptr + d + depth[None, :], mask=inside, other=0.0).to(WIDE)
        total += tl.sum(h * w, axis=1)
    tl.store(logits_ptr + row.to(tl.int64) * K + k, total, mask=inside_row)


def lse_gather(hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor) -> tuple[Tensor, Tensor]:
    """lse [M] and logits [M, K], float32 or wider, without a gradient."""
    hidden_MD, weight_VD, index_MK = hidden_MD.contiguous(), weight_VD.contiguous(), index_MK.contiguous()
    M, D, V, K = *hidden_MD.shape, weight_VD.shape[0], index_MK.shape[1]
    wide = torch.promote_types(hidden_MD.dtype, torch.float32)
    wide_type = tl.float64 if wide == torch.float64 else tl.float32
    logits_MK = hidden_MD.new_empty(M, K, dtype=wide)
    if M == 0:
        return hidden_MD.new_empty(0, dtype=wide), logits_MK
    row_blocks = triton.cdiv(M, ROWS)
    shares = max(1, min(PROGRAMS // row_blocks, triton.cdiv(V, COLUMNS)))
    share = triton.cdiv(triton.cdiv(V, shares), COLUMNS) * COLUMNS
    shares = triton.cdiv(V, share)
    peak_PM, total_PM = hidden_MD.new_empty(2, shares, M, dtype=wide)
    lse_kernel[(row_blocks, shares)](
        hidden_MD, weight_VD, peak_PM, total_PM, M, V, D, share, hidden_MD.stride(0), weight_VD.stride(0),
        WIDE=wide_type, UPCAST=os.environ.get("TRITON_INTERPRET") == "1",  # its bfloat16 dot is wrong
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if K:
        indexed_dot_kernel[(triton.cdiv(M, DOT_ROWS), K)](
            hidden_MD, weight_VD, index_MK, logits_MK, M, K, D,
            hidden_MD.stride(0), weight_VD.stride(0), index_MK.stride(0),
            WIDE=wide_type, ROWS=DOT_ROWS, DEPTH=DEPTH * 2, num_warps=4,
        )  # fmt: skip
    return (peak_PM + total_PM.log()).logsumexp(dim=0), logits_MK
