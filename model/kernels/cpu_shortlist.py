"""`reference.moved_shortlist` compiled for a CPU: all that one anchor's slot needs stays in the first cache.

Of a slot t only the contexts that can come before it are computed: at most t labels (`diagonal`: exactly t). Forward
keeps p [N, T, S, K], the softmax of the moved shortlist; backward reads it and makes everything else anew. Chunks of
anchors go to threads, each with sums of its own, added up in a fixed order. No sum may be reordered (fastmath): the
process that compiles would then round in another way than those that load what it compiled, and a resumed run in
another than one never stopped. So loops run over numbers that do not depend on each other, which needs no permission to
be vectorised.

Suffixes as in reference.py: N anchors, T slots, U labels, S = U + 1 contexts, K shortlist, R rank, V vocabulary.
"""

from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.kernels.reference import Prefixes


def forward(prefixes: Prefixes, diagonal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the reference returns, and p [N, T, S, K]."""
    N, T, U = prefixes.place_NTU.shape
    lse_NT1 = prefixes.logits_NTK.logsumexp(dim=2, keepdim=True)
    moved_NTS = lse_NT1.expand(N, T, U + 1).contiguous()
    emit_NTU, stay_NTU = lse_NT1.new_zeros(N, T, U), lse_NT1.new_zeros(N, T, U)
    blank_NTS = torch.zeros_like(moved_NTS)
    p_NTSK = lse_NT1.new_empty(N, T, U + 1, prefixes.index_NTK.shape[2])
    out = [part.numpy() for part in (moved_NTS, emit_NTU, stay_NTU, blank_NTS, p_NTSK)]
    _forward(use_torch_threads(), *map(_array, prefixes), diagonal, *out)  # type: ignore[call-arg]
    return moved_NTS, emit_NTU, stay_NTU, blank_NTS, p_NTSK


def backward(
    prefixes: Prefixes, diagonal: bool, moved_NTS: Tensor, p_NTSK: Tensor, *grads: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of slot, context, token, blank and logits, from those of the four that `forward` returned."""
    threads = use_torch_threads()
    own = (prefixes.slot_NTR, prefixes.context_NSR, prefixes.logits_NTK)
    grad_slot, grad_context, grad_logits = (torch.zeros_like(part) for part in own)
    shared = (prefixes.token_VR, prefixes.blank_R)
    grad_token, grad_blank = (part.new_zeros(threads, *part.shape) for part in shared)
    out = [part.numpy() for part in (grad_slot, grad_context, grad_token, grad_blank, grad_logits)]
    states = [_array(part) for part in (moved_NTS, p_NTSK, *grads)]
    _backward(threads, *map(_array, prefixes), diagonal, *states, *out)  # type: ignore[call-arg]
    return grad_slot, grad_context, grad_token.sum(dim=0), grad_blank.sum(dim=0), grad_logits


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


def _array(part: Tensor) -> NDArray[Any]:
    return part.detach().contiguous().numpy()


@njit(cache=True)
def _hardswish(x):
    return x * min(max(x + 3, 0), 6) / 6


@njit(cache=True, parallel=True)
def _forward(threads, slot, context, token, blank, index, logits, place, diagonal, moved, emit, stay, blanked, p):
    N, T, K = index.shape
    R, U = slot.shape[2], place.shape[2]
    for chunk in prange(threads):
        key = np.zeros((-(-R // 4) * 4, K + 1), slot.dtype)  # the blank is one token more; filled up to whole fours
        d, gate = np.empty(K + 1, slot.dtype), np.zeros(len(key), slot.dtype)
        key[:R, K] = blank
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(T):
                for k in range(K):
                    for r in range(R):
                        key[r, k] = token[index[n, t, k], r]
                for s in range(min(t, U) if diagonal else 0, min(t, U) + 1):
                    for r in range(R):
                        gate[r] = _hardswish(slot[n, t, r] + context[n, s, r])
                    d[:] = 0
                    for r in range(0, R, 4):
                        g0, g1, g2, g3 = gate[r], gate[r + 1], gate[r + 2], gate[r + 3]
                        for k in range(K + 1):
                            total = d[k] + g0 * key[r, k]
                            d[k] = total + g1 * key[r + 1, k] + g2 * key[r + 2, k] + g3 * key[r + 3, k]
                    blanked[n, t, s] = d[K]
                    top = logits[n, t, 0] + d[0]
                    for k in range(K):
                        top = max(top, logits[n, t, k] + d[k])
                    total = top * 0
                    for k in range(K):
                        p[n, t, s, k] = np.exp(logits[n, t, k] + d[k] - top)
                        total += p[n, t, s, k]
                    for k in range(K):
                        p[n, t, s, k] /= total
                    moved[n, t, s] = top + np.log(total)
                    if s < U and place[n, t, s] >= 0:
                        emit[n, t, s] = d[place[n, t, s]]
                    if s > 0 and place[n, t, s - 1] >= 0:
                        stay[n, t, s - 1] = d[place[n, t, s - 1]]


@njit(cache=True, parallel=True)
def _backward(
    threads, slot, context, token, blank, index, logits, place, diagonal, moved, p,
    grad_moved, grad_emit, grad_stay, grad_blanked, grad_slot, grad_context, grad_token, grad_blank, grad_logits,
):  # fmt: skip
    N, T, K = index.shape
    R, U = slot.shape[2], place.shape[2]
    for chunk in prange(threads):
        key, grad_key = np.empty((K + 1, R), slot.dtype), np.empty((K + 1, R), slot.dtype)
        move = np.empty(K + 1, slot.dtype)
        gate, back = np.empty(R, slot.dtype), np.empty(R, slot.dtype)
        key[K] = blank
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(T):
                for k in range(K):
                    key[k] = token[index[n, t, k]]
                grad_key[:] = 0
                for s in range(U + 1):
                    reached = s == min(t, U) if diagonal else s <= t
                    if not reached and grad_moved[n, t, s] == 0:
                        continue
                    if not reached:
                        for k in range(K):
                            grad_logits[n, t, k] += np.exp(logits[n, t, k] - moved[n, t, s]) * grad_moved[n, t, s]
                        continue
                    for k in range(K):
                        move[k] = p[n, t, s, k] * grad_moved[n, t, s]
                        grad_logits[n, t, k] += move[k]
                    move[K] = grad_blanked[n, t, s]
                    if s < U and place[n, t, s] >= 0:
                        move[place[n, t, s]] += grad_emit[n, t, s]
                    if s > 0 and place[n, t, s - 1] >= 0:
                        move[place[n, t, s - 1]] += grad_stay[n, t, s - 1]
                    for r in range(R):
                        gate[r] = _hardswish(slot[n, t, r] + context[n, s, r])
                    back[:] = 0
                    for k in range(K + 1):
                        for r in range(R):
                            back[r] += move[k] * key[k, r]
                            grad_key[k, r] += move[k] * gate[r]
                    for r in range(R):
                        x = slot[n, t, r] + context[n, s, r]
                        back[r] *= 0 if x <= -3 else 1 if x >= 3 else x / 3 + 0.5
                        grad_slot[n, t, r] += back[r]
                        grad_context[n, s, r] += back[r]
                for k in range(K):
                    grad_token[chunk, index[n, t, k]] += grad_key[k]
                grad_blank[chunk] += grad_key[K]
