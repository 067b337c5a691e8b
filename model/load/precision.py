"""base.dtype=auto: bf16 on a machine that computes faster in it, else float32."""

import hashlib
import json
import platform
import time
import timeit
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ..folders import claimed

Dtype = Literal["auto", "fp32", "bf16", "fp64"]
PAYS = 1.3  # times as fast as float32: below that, the digits are worth more
GEMM = (128, 576, 1536)  # rows, inner and outer size: the MLP of a small LLM, a larger one gains more
SECONDS = 1.0  # of rounds: what else the machine does slows many in a row


def resolve_dtype(dtype: Dtype, cache: Path, device: str = "auto") -> Dtype:
    """The dtype that `auto` comes to on this machine, as a name: bf16 or fp32. Any other name is given back.

    On CUDA it is bf16 where the device has it. On a CPU it is bf16 where the CPU has units for it *and* a GEMM is
    measured to be faster by a factor of `PAYS`; the outcome is kept in `cache`, so that all ranks and later commands
    choose alike.
    """
    if dtype != "auto":
        return dtype
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    if not cpu_has_bf16():
        return "fp32"
    key = hashlib.sha256(f"{_cpu()} {torch.__version__}".encode()).hexdigest()[:12]
    record = cache / f"bf16-{key}.json"
    with claimed(record.with_name(f"{record.name}.lock"), wait=True):
        try:
            speedup = float(json.loads(record.read_text())["speedup"])
        except (OSError, ValueError, KeyError, TypeError):  # not there yet, damaged, or measured in a moment
            speedup = bf16_speedup()
            record.write_text(json.dumps({"cpu": _cpu(), "torch": torch.__version__, "speedup": speedup}) + "\n")
    return "bf16" if speedup >= PAYS else "fp32"


def cpu_has_bf16() -> bool:
    """Has this CPU units for bf16 (AVX512-BF16 or AMX)? Others emulate it slowly."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # not public: they may be gone one day
    return any(getattr(torch.cpu, name, bool)() for name in probes)


def bf16_speedup() -> float:
    """How many times as fast as in float32 a GEMM is in bf16 on one thread, in the best round of each."""
    rows, inner, outer = GEMM
    products = [
        partial(torch.mm, torch.ones(rows, inner, dtype=kind), torch.ones(inner, outer, dtype=kind))
        for kind in (torch.float32, torch.bfloat16)
    ]
    threads, start, rounds = torch.get_num_threads(), time.perf_counter(), list[list[float]]()
    torch.set_num_threads(1)  # a second one would wait wherever another process has its core
    while time.perf_counter() - start < SECONDS:
        rounds.append([timeit.timeit(product, number=1) for product in products])
    torch.set_num_threads(threads)
    fp32, bf16 = map(min, zip(*rounds, strict=True))
    return fp32 / bf16


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
