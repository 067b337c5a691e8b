"""Compile the Triton kernels for sm_90 without a GPU and print, as JSON, what came out.

A process of its own: TRITON_INTERPRET must not be set when the kernels are imported.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ctcdraft.model.loss import reference, triton_lattice, triton_lse

T = {"WIDE": triton.language.float32}
LATTICE = {"LOG_ZERO": reference.LOG_ZERO, "LANES": triton_lattice.LANES, **T}
ROWS = {"BLOCK": triton_lse.BLOCK, **T}
STREAM = {"ROWS": triton_lse.ROWS, "COLUMNS": triton_lse.COLUMNS, "DEPTH": triton_lse.DEPTH, **T}

KERNELS = {
    "lse": (triton_lse.lse_kernel, {"UPCAST": False, **STREAM}, triton_lse.WARPS, triton_lse.STAGES),
    "exponentials": (triton_lse.exponentials_kernel, ROWS, triton_lse.WARPS, 3),
    "lattice_forward": (triton_lattice._forward_kernel, LATTICE, triton_lattice.WARPS, 3),
    "lattice_backward": (triton_lattice._backward_kernel, LATTICE, triton_lattice.WARPS, 3),
}
POINTERS = {
    "hidden_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "z_ptr": "*bf16",
    "slots_ptr": "*i64",
    "repeat_ptr": "*i8",
}


def compiled(kernel, constants, warps, stages):
    signature = {}
    for name in kernel.arg_names:
        kind = "constexpr" if name in constants else "i32"
        signature[name] = POINTERS.get(name, "*fp32") if name.endswith("_ptr") else kind
    # what a launch finds out by itself: pointers and sizes are multiples of 16
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    keys = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=keys, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = binary.asm["ptx"]
    return {
        "shared_bytes": binary.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "barriers": len(re.findall(r"\bbar\.sync|\bbarrier\.sync", ptx)),
        "shuffles": ptx.count("shfl.sync"),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
        "wide_offsets": ptx.count(".s64") + ptx.count("mul.wide"),
        "ptx_lines": ptx.count("\n"),
        "cubin_bytes": len(binary.asm["cubin"]),
    }


if __name__ == "__main__":
    json.dump({name: compiled(*arguments) for name, arguments in KERNELS.items()}, sys.stdout, indent=1)
