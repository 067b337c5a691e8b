"""The pass between the two GEMMs of `linear_lse` in Triton: a tile of logits becomes its exponentials in place.

No locks and no float atomics, every sum in a fixed order. Offsets are 64 bit: rows times vocabulary passes 2^31.

Shape suffixes: R rows of a tile, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # of a row of logits, one program each


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


def exponentials_(z_RV: Tensor) -> tuple[Tensor, Tensor]:
    """See `linear_lse.exponentials_`."""
    R, V = z_RV.shape
    wide = torch.promote_types(z_RV.dtype, torch.float32)
    peak_R, total_R = z_RV.new_empty(2, R, dtype=wide)
    kind = tl.float64 if wide == torch.float64 else tl.float32
    exponentials_kernel[(R,)](z_RV, peak_R, total_R, V, z_RV.stride(0), WIDE=kind, BLOCK=BLOCK, num_warps=WARPS)
    return peak_R, total_R
