"""base.dtype=auto: bf16 on a machine that computes faster in it, else float32."""

from typing import Literal

import torch

Dtype = Literal["auto", "fp32", "bf16", "fp64"]


def resolve_dtype(dtype: Dtype, device: str = "auto") -> Dtype:
    """The dtype that `auto` comes to on this machine, as a name: bf16 where the GPU, or the CPU, has units for it, else
    fp32. Any other name is given back."""
    if dtype != "auto":
        return dtype
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return "bf16" if (torch.cuda.is_bf16_supported() if on_gpu else cpu_has_bf16()) else "fp32"


def cpu_has_bf16() -> bool:
    """Has this CPU units for bf16 (AVX512-BF16 or AMX)? Others emulate it slowly."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # not public: they may be gone one day
    return any(getattr(torch.cpu, name, bool)() for name in probes)
