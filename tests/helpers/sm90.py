"""Compile the Triton kernels for sm_90 without a GPU, in every dtype, and print, as JSON, what came out.

A process of its own: TRITON_INTERPRET must not be set when the kernels are imported.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ctcdraft.model.loss import reference, triton_lattice, triton_lse

DTYPES = ("bf16", "fp16", "fp32", "fp64")


def kernels(dtype):
    """{name: kernel, its constants, warps, stages} as a launch on tensors of this dtype chooses them."""
    wide = {"WIDE": triton.language.float64 if dtype == "fp64" else triton.language.float32}
    lattice = {"LOG_ZERO": reference.LOG_ZERO, "LANES": triton_lattice.LANES, **wide}
    return {
        "exponentials": (triton_lse.exponentials_kernel, {"BLOCK": triton_lse.BLOCK, **wide}, triton_lse.WARPS, 3),
        "lattice_forward": (triton_lattice._forward_kernel, lattice, triton_lattice.WARPS, 3),
        "lattice_backward": (triton_lattice._backward_kernel, lattice, triton_lattice.WARPS, 3),
    }


def compiled(dtype, kernel, constants, warps, stages):
    wide = "*fp64" if dtype == "fp64" else "*fp32"
    pointers = dict.fromkeys(("z_ptr",), f"*{dtype}")
    pointers |= {"slots_ptr": "*i64", "repeat_ptr": "*i8"}
    signature = {}
    for name in kernel.arg_names:
        kind = "constexpr" if name in constants else "i32"
        signature[name] = pointers.get(name, wide) if name.endswith("_ptr") else kind
    # what a launch finds out by itself: pointers and sizes are multiples of 16
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    keys = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=keys, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = binary.asm["ptx"]
    return {
        "shared_bytes": binary.metadata.shared,
        "barriers": len(re.findall(r"\bbar\.sync|\bbarrier\.sync", ptx)),
        "shuffles": ptx.count("shfl.sync"),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
        "wide_offsets": ptx.count(".s64") + ptx.count("mul.wide"),
        "ptx_lines": ptx.count("\n"),
        "cubin_bytes": len(binary.asm["cubin"]),
    }


if __name__ == "__main__":
    found = {
        dtype: {name: compiled(dtype, *arguments) for name, arguments in kernels(dtype).items()} for dtype in DTYPES
    }
    json.dump(found, sys.stdout, indent=1)
