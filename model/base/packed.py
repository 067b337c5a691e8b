"""Linear layers whose weights a CPU's GEMM library (oneDNN) has laid out in its blocks, once.

Otherwise every product lays them out anew, and with the few rows of a draft that takes as long as the product itself
(bench/packed.py).
"""

from copy import deepcopy
from typing import Any

import psutil
import torch
from torch import Tensor, nn

LEAST = 1 << 16  # numbers of a weight: below that a call costs more than is saved
SHARE = 0.5  # of the free memory that the packed weights may take, beside the others


class PackedLinear(nn.Linear):
    """An `nn.Linear` in all it holds; its product uses the packed weight where no gradient is asked for, packed anew
    where `weight` has changed since. Copies are plain layers, to be trained or changed."""

    packed: Tensor
    stamp: tuple[int, int]

    def forward(self, input: Tensor) -> Tensor:
        moved = self.weight.dtype != self.packed.dtype or not self.weight.is_cpu
        if moved or (torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)):
            return super().forward(input)
        if self.stamp != _stamp(self.weight):
            self.lay_out()
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")

    def lay_out(self) -> None:
        self.packed, self.stamp = torch.ops.mkldnn._reorder_linear_weight(self.weight), _stamp(self.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        made = nn.Linear.__new__(nn.Linear)
        memo[id(self)] = made
        own = {name: value for name, value in vars(self).items() if name not in ("packed", "stamp")}
        vars(made).update(deepcopy(own, memo))
        return made


@torch.no_grad()
def pack(module: nn.Module) -> None:
    """Pack the linear layers of a module that lie on a CPU, in place, where memory and the build of torch allow it, and
    the CPU: oneDNN lays out no bfloat16 without AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return
    dtypes = {torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])}
    linears = [
        one
        for one in module.modules()
        if type(one) is nn.Linear
        and one.weight.device.type == "cpu"
        and one.weight.dtype in dtypes
        and one.weight.numel() >= LEAST
        and not one.weight.is_inference()  # nobody could tell that it was written to
    ]
    size = sum(one.weight.nbytes for one in linears)
    if size > SHARE * psutil.virtual_memory().available:
        return
    for one in linears:
        one.__class__ = PackedLinear
        assert isinstance(one, PackedLinear)
        one.lay_out()


def packed_product(weight_XD: Tensor) -> nn.Linear:
    """The layer x -> x W^T, packed where `pack` does it."""
    X, D = weight_XD.shape
    layer = nn.Linear(D, X, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_XD, requires_grad=False)
    pack(layer)
    return layer


def _stamp(weight: Tensor) -> tuple[int, int]:
    """Another one whenever a weight was moved, converted or written to."""
    return weight.data_ptr(), weight._version
