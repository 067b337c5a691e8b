"""The linear-lse-gather primitive and the prefix lattice, and who computes them."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from . import linear_lse, reference
from .reference import Emissions

IMPLEMENTATIONS = ("auto", "chunked", "triton", "reference")
HAS_TRITON = find_spec("triton") is not None


def linear_lse_gather(
    hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of every row of `hidden @ weight.T`, and its logits at `index`, without keeping [M, V].

    hidden [M, D], weight [V, D], index [M, K] int64 in [0, V). Returns lse [M] and logits [M, K], in float32
    or wider. Differentiable once with respect to hidden and to a weight that requires a gradient; a column that
    occurs twice in a row adds up. Raises ValueError on shapes or dtypes that do not fit and on an
    implementation that is unknown or cannot run here, RuntimeError on a second derivative. On a CPU float32 states
    may meet a frozen weight in bfloat16: the GEMMs are then bfloat16's (`linear_lse`).
    """
    name = _choose(implementation, hidden_MD)
    fits = hidden_MD.dim() == weight_VD.dim() == index_MK.dim() == 2
    if not fits or hidden_MD.shape[1] != weight_VD.shape[1] or len(index_MK) != len(hidden_MD):
        raise ValueError(
            "linear_lse_gather takes hidden [M, D], weight [V, D] and index [M, K], "
            f"got {[*hidden_MD.shape]}, {[*weight_VD.shape]} and {[*index_MK.shape]}"
        )
    if hidden_MD.dtype != weight_VD.dtype and not linear_lse.multiplies_in_bfloat16(hidden_MD, weight_VD):
        raise ValueError(f"hidden is {hidden_MD.dtype} and weight {weight_VD.dtype}: convert one of them")
    if name == "reference":
        return reference.linear_lse_gather(hidden_MD, weight_VD.to(hidden_MD.dtype), index_MK)
    trains = torch.is_grad_enabled() and (hidden_MD.requires_grad or weight_VD.requires_grad)
    if not trains:  # under no_grad too, autograd would otherwise ask for the slope
        hidden_MD, weight_VD = hidden_MD.detach(), weight_VD.detach()
    if name == "triton":  # which is not there on every machine
        from .triton_lse import exponentials_
    else:
        from .linear_lse import exponentials_
    with torch.cuda.device_of(hidden_MD):  # where Triton launches
        return linear_lse.LinearLseGather.apply(hidden_MD, weight_VD, index_MK, exponentials_)


def prefix_lattice(emissions: Emissions, implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """Prefix and end log-probabilities of one label sequence per anchor: see `reference.prefix_lattice`, which all but
    `triton` are."""
    if _choose(implementation, emissions.emit_NTU) == "triton":
        from .triton_lattice import PrefixLattice

        with torch.cuda.device_of(emissions.emit_NTU):
            return PrefixLattice.apply(*emissions)
    return reference.prefix_lattice(emissions)


def _choose(implementation: str, tensor: Tensor) -> str:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown: choose one of {IMPLEMENTATIONS}")
    if implementation == "auto":
        return "triton" if tensor.is_cuda and HAS_TRITON else "chunked"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if implementation == "triton" and not (HAS_TRITON and (tensor.is_cuda or interpreted)):
        raise ValueError(
            "implementation='triton' needs the triton package and tensors on a GPU (or TRITON_INTERPRET=1): "
            "use 'auto' or 'chunked'"
        )
    return implementation
