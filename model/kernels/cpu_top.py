"""The largest values of each row, tile after tile, compiled for a CPU: a value is looked at twice only where it beats
the smallest that is held. torch's topk takes as long as the GEMM that made the tile.

Suffixes as in chunked.py: R rows, C columns of a tile, S held.
"""

from numba import njit, prange
from torch import Tensor

from ctcdraft.model.kernels.cpu_shortlist import use_torch_threads

BLOCK = 16


def merge_top(top_RS: Tensor, index_RS: Tensor, z_RC: Tensor, first_column: int) -> None:
    """Take a tile into the running largest values (-inf: none yet) and their columns, largest first, in place."""
    use_torch_threads()
    _merge(top_RS.numpy(), index_RS.numpy(), z_RC.numpy(), first_column)


@njit(cache=True, parallel=True)
def _merge(top, index, z, first_column):
    R, C = z.shape
    S = top.shape[1]
    for r in prange(R):
        row, values, places = z[r], top[r], index[r]
        least = values[S - 1]
        for block in range(0, C, BLOCK):
            stop = min(block + BLOCK, C)
            beaten = False
            for c in range(block, stop):
                beaten |= row[c] > least
            if not beaten:
                continue
            for c in range(block, stop):
                value = row[c]
                if value > least:
                    at = S - 1
                    while at > 0 and values[at - 1] < value:
                        values[at], places[at] = values[at - 1], places[at - 1]
                        at -= 1
                    values[at], places[at] = value, first_column + c
                    least = values[S - 1]
