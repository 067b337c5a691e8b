"""The log-sum-exp of logits in Triton: the pass between the two GEMMs of `linear_lse`, and, where no gradient is asked
(evaluation, figures), an lse with no logits in memory at all.

No locks and no float atomics, every sum in a fixed order. Offsets are 64 bit: rows times vocabulary passes 2^31.

Without logits each program walks its share of the vocabulary over one block of rows and leaves a maximum and a sum of
its own; the shares are then joined. With a gradient the pass between GEMMs is the faster one, since the second GEMM
needs the softmax anyway (docs/results/fused_ctc.md).

Shape suffixes: M rows, R rows of a tile, V vocabulary, D hidden, P shares of the vocabulary.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # of a row of logits, one program each
# One program's tile of rows x vocabulary, the step along D, and its stages, by the bytes of an element: the tensor
# cores want a large tile of 16 bits, and what they do not multiply must fit into the registers and shared memory.
TILES = {2: (128, 256, 64, 3), 4: (64, 64, 32, 2), 8: (32, 64, 32, 2)}
PROGRAMS = 264  # as many as fill a large GPU twice


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


def exponentials_(z_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and its sum of exp(z - largest), in float32 or wider; z becomes exp(z - largest)."""
    R, V = z_RV.shape
    wide = torch.promote_types(z_RV.dtype, torch.float32)
    peak_R, total_R = z_RV.new_empty(2, R, dtype=wide)
    kind = tl.float64 if wide == torch.float64 else tl.float32
    exponentials_kernel[(R,)](z_RV, peak_R, total_R, V, z_RV.stride(0), WIDE=kind, BLOCK=BLOCK, num_warps=WARPS)
    return peak_R, total_R


def lse(hidden_MD: Tensor, weight_VD: Tensor) -> Tensor:
    """lse [M] of the rows of hidden @ weight.T, float32 or wider, without a gradient."""
    hidden_MD, weight_VD = hidden_MD.contiguous(), weight_VD.contiguous()
    M, D, V = *hidden_MD.shape, weight_VD.shape[0]
    wide = torch.promote_types(hidden_MD.dtype, torch.float32)
    if M == 0:
        return hidden_MD.new_empty(0, dtype=wide)
    rows, columns, depth, stages = TILES[hidden_MD.element_size()]
    row_blocks = triton.cdiv(M, rows)
    shares = max(1, min(PROGRAMS // row_blocks, triton.cdiv(V, columns)))
    share = triton.cdiv(triton.cdiv(V, shares), columns) * columns
    shares = triton.cdiv(V, share)
    peak_PM, total_PM = hidden_MD.new_empty(2, shares, M, dtype=wide)
    lse_kernel[(row_blocks, shares)](
        hidden_MD, weight_VD, peak_PM, total_PM, M, V, D, share, hidden_MD.stride(0), weight_VD.stride(0),
        WIDE=tl.float64 if wide == torch.float64 else tl.float32,
        UPCAST=os.environ.get("TRITON_INTERPRET") == "1",  # its bfloat16 dot is wrong
        ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=WARPS, num_stages=stages,
    )  # fmt: skip
    return (peak_PM + total_PM.log()).logsumexp(dim=0)
