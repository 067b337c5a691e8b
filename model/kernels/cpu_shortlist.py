"""`reference.moved_shortlist` compiled for a CPU: rows of P w_v are read where they are, none is copied.

Chunks of anchors go to threads, each with sums of its own, added up in a fixed order. A dot product is the only sum
that the compiler may order, so that it can be vectorised; where it may order more (fastmath), the process that compiles
has rounded in another way than those that load what it compiled, and a resumed run in another than one never stopped
(tests/model/test_compiled.py).

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

from ctcdraft.model.kernels.reference import Moved, Prefixes

# Gradients below the larger of these are 0: arithmetic near float32's smallest numbers takes a hundred times as long,
# and some prefixes are hardly reached by any alignment.
NOTHING = 1e-30
NEGLIGIBLE = 1e-5  # of what the largest gradient is rounded by


def forward(prefixes: Prefixes) -> tuple[Moved, tuple[Tensor, ...]]:
    """What the reference returns, and what `backward` needs: shares of the shortlist's tokens in its sums, moved and as
    it is [N, T, W, J + K]; where in it the next label and the last one are [N, T, W], -1: they are not."""
    N, T, K = prefixes.index_NTK.shape
    J, W = prefixes.successor_NSJ.shape[2], prefixes.window_TW.shape[1]
    of_windows = [prefixes.slot_NTR.new_zeros(N, T, W) for _ in range(5)]
    moved = Moved._make([*of_windows, torch.zeros(N, T, W, dtype=torch.bool)])
    shares = [prefixes.slot_NTR.new_zeros(N, T, W, J + K) for _ in range(2)]
    places = [torch.full((N, T, W), -1) for _ in range(2)]
    kept = (*shares, *places)
    _forward(use_torch_threads(), *map(array_of, prefixes), *(part.numpy() for part in (*moved, *kept)))  # type: ignore
    return moved, kept


def backward(prefixes: Prefixes, kept: tuple[Tensor, ...], of_moved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of slot, context, token, blank, and of the logits of successors and likeliest tokens."""
    threads = use_torch_threads()
    alone = [part.new_zeros(part.shape) for part in (prefixes.slot_NTR, prefixes.context_NSR)]
    shared = [part.new_zeros(threads, *part.shape) for part in (prefixes.token_VR, prefixes.blank_R)]
    logits = [part.new_zeros(part.shape) for part in (prefixes.successor_NTWJ, prefixes.logits_NTK)]
    largest = max((float(part.abs().max()) for part in of_moved if part.numel()), default=0.0)
    nothing = max(NOTHING, NEGLIGIBLE * torch.finfo(prefixes.slot_NTR.dtype).eps * largest)
    known = [array_of(part) for part in (*prefixes[:7], *kept, *of_moved)]
    out = [part.numpy() for part in (*alone, *shared, *logits)]
    _backward(threads, known[0].dtype.type(nothing), *known, *out)  # type: ignore[call-arg]
    return *alone, *(part.sum(dim=0) for part in shared), *logits


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


@njit(cache=True, fastmath={"reassoc"})
def _dot(gate, row):
    """Their product, its sum in any order."""
    total = gate[0] * 0
    for r in range(len(gate)):
        total += row[r] * gate[r]
    return total


@njit(cache=True)
def _is_among(v, tokens):
    found = False
    for token in tokens:
        found |= token == v
    return found


@njit(cache=True)
def _place(v, successor, index, logits):
    """Where token v is in a shortlist of successors, of which those with a logit of -inf are none, and of likeliest
    tokens; -1: nowhere."""
    for j in range(len(successor)):
        if successor[j] == v and logits[j] != -np.inf:
            return j
    for k in range(len(index)):
        if index[k] == v:
            return len(successor) + k
    return -1


@njit(cache=True)
def _shares(values):
    """Their log-sum-exp; in place, what each has of it."""
    peak, total = values[0], values.dtype.type(0)
    for value in values:
        peak = max(peak, value)
    for x in range(len(values)):
        values[x] = np.exp(values[x] - peak)
        total += values[x]
    for x in range(len(values)):
        values[x] /= total
    return peak + np.log(total)


@njit(cache=True, parallel=True)
def _forward(
    threads, slot, context, token, blank, window, successor, index, successor_logits, logits, next, last,
    moved, still, emit, stay, of_blank, inside, moved_share, still_share, next_place, last_place,
):  # fmt: skip
    N, T, K = index.shape
    J, R = successor.shape[2], slot.shape[2]
    for chunk in prange(threads):
        gate, delta = np.empty(R, slot.dtype), np.zeros(J + K, slot.dtype)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(T):
                for w, s in enumerate(window[t]):
                    as_is, as_moved = still_share[n, t, w], moved_share[n, t, w]
                    for j in range(J):
                        v = successor[n, s, j]
                        passed = v < 0 or _is_among(v, index[n, t])
                        as_is[j] = -np.inf if passed else successor_logits[n, t, w, j]
                    as_is[J:] = logits[n, t]
                    delta[:] = 0
                    if s <= t:
                        _gates(gate, slot[n, t], context[n, s])
                        for j in range(J):
                            if as_is[j] != -np.inf:
                                delta[j] = _dot(gate, token[successor[n, s, j]])
                        for k in range(K):
                            delta[J + k] = _dot(gate, token[index[n, t, k]])
                        of_blank[n, t, w] = _dot(gate, blank)
                        x = next_place[n, t, w] = _place(next[n, s], successor[n, s], index[n, t], as_is)
                        y = last_place[n, t, w] = _place(last[n, s], successor[n, s], index[n, t], as_is)
                        inside[n, t, w] = x >= 0
                        emit[n, t, w] = delta[x] if x >= 0 else 0
                        stay[n, t, w] = delta[y] if y >= 0 else 0
                    for x in range(J + K):
                        as_moved[x] = as_is[x] + delta[x]
                    still[n, t, w], moved[n, t, w] = _shares(as_is), _shares(as_moved)


@njit(cache=True, parallel=True)
def _backward(
    threads, nothing, slot, context, token, blank, window, successor, index, moved_share, still_share, next_place,
    last_place, of_moved, of_still, of_emit, of_stay, of_blank,
    grad_slot, grad_context, grad_token, grad_blank, grad_successor, grad_logits,
):  # fmt: skip
    N, T, K = index.shape
    J, R = successor.shape[2], slot.shape[2]
    for chunk in prange(threads):
        grad = np.empty(J + K, slot.dtype)
        chosen, move = np.empty(J + K, np.int64), np.empty(J + K, slot.dtype)  # what is moved, by how much
        gate, back = np.empty(R, slot.dtype), np.empty(R, slot.dtype)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(T):
                for w, s in enumerate(window[t]):
                    for x in range(J + K):
                        grad[x] = of_moved[n, t, w] * moved_share[n, t, w, x]
                    for j in range(J):
                        grad_successor[n, t, w, j] = grad[j] + of_still[n, t, w] * still_share[n, t, w, j]
                    for k in range(K):
                        grad_logits[n, t, k] += grad[J + k] + of_still[n, t, w] * still_share[n, t, w, J + k]
                    if s > t:
                        continue
                    if next_place[n, t, w] >= 0:
                        grad[next_place[n, t, w]] += of_emit[n, t, w]
                    if last_place[n, t, w] >= 0:
                        grad[last_place[n, t, w]] += of_stay[n, t, w]
                    count = 0
                    for x in range(J + K):
                        v = successor[n, s, x] if x < J else index[n, t, x - J]
                        if v >= 0 and not abs(grad[x]) <= nothing:  # NaN is something
                            chosen[count], move[count] = v, grad[x]
                            count += 1
                    blanks = of_blank[n, t, w]
                    if abs(blanks) <= nothing:
                        blanks *= 0
                        if count == 0:
                            continue
                    _gates(gate, slot[n, t], context[n, s])
                    for r in range(R):
                        back[r] = blanks * blank[r]
                        grad_blank[chunk, r] += blanks * gate[r]
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
