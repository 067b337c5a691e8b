"""`reference.shortlist_deltas` compiled for a CPU: rows of P w_v are read where they are, none is copied.

Chunks of anchors go to threads, each with sums of its own, added up in a fixed order. No sum may be reordered
(fastmath): the process that compiles would then round in another way than those that load what it compiled, and a
resumed run in another than one never stopped. So loops run over numbers that do not depend on each other, which
needs no permission to be vectorised.

Suffixes as in reference.py: N anchors, T slots, S contexts, W of them in a slot's window, K shortlist, J successors,
R rank, V vocabulary, X = J + K + 1 of them and the blank.
"""

from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.kernels.reference import Prefixes

# Gradients below the larger of these are 0: arithmetic near float32's smallest numbers takes a hundred times as long,
# and some prefixes are hardly reached by any alignment.
NOTHING = 1e-30
NEGLIGIBLE = 1e-5  # of what the largest gradient is rounded by


def forward(prefixes: Prefixes) -> Tensor:
    """What the reference returns."""
    N, T, K = prefixes.index_NTK.shape
    J, W = prefixes.successor_NSJ.shape[2], prefixes.window_TW.shape[1]
    delta_NTWX = prefixes.slot_NTR.new_zeros(N, T, W, J + K + 1)
    _forward(use_torch_threads(), *map(array_of, prefixes), delta_NTWX.numpy())  # type: ignore[call-arg]
    return delta_NTWX


def backward(prefixes: Prefixes, grad_NTWX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of slot, context, token and blank."""
    threads = use_torch_threads()
    grad_slot, grad_context = torch.zeros_like(prefixes.slot_NTR), torch.zeros_like(prefixes.context_NSR)
    shared = (prefixes.token_VR, prefixes.blank_R)
    grad_token, grad_blank = (part.new_zeros(threads, *part.shape) for part in shared)
    out = [part.numpy() for part in (grad_slot, grad_context, grad_token, grad_blank)]
    grad, largest = array_of(grad_NTWX), float(grad_NTWX.abs().max()) if grad_NTWX.numel() else 0.0
    nothing = max(NOTHING, NEGLIGIBLE * torch.finfo(grad_NTWX.dtype).eps * largest)
    _backward(threads, grad.dtype.type(nothing), *map(array_of, prefixes), grad, *out)  # type: ignore[call-arg]
    return grad_slot, grad_context, grad_token.sum(dim=0), grad_blank.sum(dim=0)


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


@njit(cache=True)
def _gates(out, slot, context):
    """hardswish of their sum."""
    for r in range(len(out)):
        at = slot[r] + context[r]
        out[r] = at * min(max(at + 3, 0), 6) / 6


@njit(cache=True)
def _through_gates(gradient, slot, context):
    """The gradient of the sum, from that of its hardswish, in place."""
    for r in range(len(gradient)):
        at = slot[r] + context[r]
        gradient[r] *= 0 if at <= -3 else 1 if at >= 3 else at / 3 + 0.5


@njit(cache=True)
def _dot(part, gate, token, v):
    """<P w_v, gate>, in sixteen sums side by side; part has room for a quarter of them."""
    R = len(gate)
    quarter, sixteenth = R // 4, R // 16
    for r in range(quarter):
        first = token[v, r] * gate[r] + token[v, r + quarter] * gate[r + quarter]
        second = token[v, r + 2 * quarter] * gate[r + 2 * quarter] + token[v, r + 3 * quarter] * gate[r + 3 * quarter]
        part[r] = first + second
    total = gate[0] * 0
    for r in range(sixteenth):
        total += (part[r] + part[r + sixteenth]) + (part[r + 2 * sixteenth] + part[r + 3 * sixteenth])
    for r in range(4 * sixteenth, quarter):
        total += part[r]
    for r in range(4 * quarter, R):
        total += token[v, r] * gate[r]
    return total


@njit(cache=True, parallel=True)
def _forward(threads, slot, context, token, blank, window, successor, index, delta):
    N, T, K = index.shape
    J, R = successor.shape[2], slot.shape[2]
    blanks = blank.reshape(1, R)
    for chunk in prange(threads):
        gate, part = np.empty(R, slot.dtype), np.empty(R, slot.dtype)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(T):
                for w, s in enumerate(window[t]):
                    if s > t:
                        break
                    _gates(gate, slot[n, t], context[n, s])
                    for j in range(J):
                        if successor[n, s, j] >= 0:
                            delta[n, t, w, j] = _dot(part, gate, token, successor[n, s, j])
                    for k in range(K):
                        delta[n, t, w, J + k] = _dot(part, gate, token, index[n, t, k])
                    delta[n, t, w, J + K] = _dot(part, gate, blanks, 0)


@njit(cache=True, parallel=True)
def _backward(
    threads, nothing, slot, context, token, blank, window, successor, index, grad,
    grad_slot, grad_context, grad_token, grad_blank,
):  # fmt: skip
    N, T, K = index.shape
    J, R = successor.shape[2], slot.shape[2]
    for chunk in prange(threads):
        chosen, move = np.empty(J + K, np.int64), np.empty(J + K, slot.dtype)  # what is moved, by how much
        gate, back = np.empty(R, slot.dtype), np.empty(R, slot.dtype)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(T):
                for w, s in enumerate(window[t]):
                    if s > t:
                        break
                    count = 0
                    for x in range(J + K):
                        v = successor[n, s, x] if x < J else index[n, t, x - J]
                        if v >= 0 and not abs(grad[n, t, w, x]) <= nothing:  # NaN is something
                            chosen[count], move[count] = v, grad[n, t, w, x]
                            count += 1
                    of_blank = grad[n, t, w, J + K]
                    if abs(of_blank) <= nothing:
                        of_blank *= 0
                        if count == 0:
                            continue
                    _gates(gate, slot[n, t], context[n, s])
                    for r in range(R):
                        back[r] = of_blank * blank[r]
                        grad_blank[chunk, r] += of_blank * gate[r]
                    _add_rows(back, token, chosen, move, count)
                    for i in range(count):
                        v, by = chosen[i], move[i]
                        for r in range(R):
                            grad_token[chunk, v, r] += by * gate[r]
                    _through_gates(back, slot[n, t], context[n, s])
                    for r in range(R):
                        grad_slot[n, t, r] += back[r]
                        grad_context[n, s, r] += back[r]


@njit(cache=True)
def _add_rows(out, rows, chosen, weight, count):
    """out + the sum of weight[i] * rows[chosen[i]], four at a time."""
    fours = count // 4 * 4
    for i in range(0, fours, 4):
        a, b, c, d = chosen[i], chosen[i + 1], chosen[i + 2], chosen[i + 3]
        w, x, y, z = weight[i], weight[i + 1], weight[i + 2], weight[i + 3]
        for r in range(len(out)):
            out[r] += (w * rows[a, r] + x * rows[b, r]) + (y * rows[c, r] + z * rows[d, r])
    for i in range(fours, count):
        for r in range(len(out)):
            out[r] += weight[i] * rows[chosen[i], r]
