"""The linear-lse-gather primitive: `reference` | `chunked` | `autograd` glue, and the function that picks."""

from torch import Tensor

from ctcdraft.model.kernels import reference
from ctcdraft.model.kernels.autograd import LinearLseGather

IMPLEMENTATIONS = ("auto", "chunked", "reference")


def linear_lse_gather(
    hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of every row of `hidden @ weight.T`, and its logits at `index`, without keeping [M, V].

    hidden [M, D], weight [V, D] (frozen), index [M, K] int64 in [0, V). Returns lse [M], logits [M, K].
    Differentiable once with respect to hidden. A column that occurs twice in a row adds up in the gradient.
    Raises ValueError on an unknown implementation, or on a weight that wants a gradient where none is made.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown: choose one of {IMPLEMENTATIONS}")
    if implementation == "reference":
        return reference.linear_lse_gather(hidden_MD, weight_VD, index_MK)
    if weight_VD.requires_grad:
        raise ValueError("linear_lse_gather: the chunked weight is frozen; pass weight.detach()")
    return LinearLseGather.apply(hidden_MD, weight_VD, index_MK)


__all__ = ["IMPLEMENTATIONS", "linear_lse_gather"]
