"""What every compiled loop needs: torch's threads, and tensors as arrays.

Chunks of anchors or rows go to threads, each with sums of its own, added up in a fixed order. Totals and dot products
are the only sums that the compiler may order, so that they can be vectorised; where it may order more (fastmath), the
process that compiles has rounded in another way than those that load what it compiled, and a resumed run in another
than one never stopped (tests/model/test_compiled.py).
"""

from typing import Any

import numba
import torch
from numpy.typing import NDArray
from torch import Tensor


def use_torch_threads() -> int:
    """Compiled loops then run on as many threads as torch's operations; their number.

    The first of them sets the threads of the OpenMP that numba shares with torch to all cores: they are set back.
    """
    torchs = torch.get_num_threads()
    threads = max(1, min(torchs, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    numba.set_num_threads(threads)
    if torch.get_num_threads() != torchs:
        torch.set_num_threads(torchs)
    return threads


def array_of(part: Tensor) -> NDArray[Any]:
    """As compiled loops take it."""
    return part.detach().contiguous().numpy()
