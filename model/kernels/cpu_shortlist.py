"""`reference.moved_shortlist` compiled for a CPU: all that one anchor's slot needs stays in the first cache.

Of a slot t only the contexts that can come before it are computed: at most t labels (`diagonal`: exactly t). Forward
keeps delta [N, T, S, K]; backward reads it and makes everything else anew. Chunks of anchors go to threads, each
with sums of its own, added up in a fixed order.

Suffixes as in reference.py: N anchors, T slots, U labels, S = U + 1 contexts, K shortlist, R rank, V vocabulary.
"""

from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor


def forward(
    slot_NTR: Tensor,
    context_NSR: Tensor,
    token_VR: Tensor,
    blank_R: Tensor,
    index_NTK: Tensor,
    logits_NTK: Tensor,
    place_NTU: Tensor,
    diagonal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the reference returns, and delta [N, T, S, K]."""
    floats = [_array(part) for part in (slot_NTR, context_NSR, token_VR, blank_R, logits_NTK)]
    N, T, U = place_NTU.shape
    lse_NT1 = logits_NTK.logsumexp(dim=2, keepdim=True)
    moved_NTS = lse_NT1.expand(N, T, U + 1).contiguous()
    emit_NTU, stay_NTU, blank_NTS = (
        lse_NT1.new_zeros(N, T, U),
        lse_NT1.new_zeros(N, T, U),
        moved_NTS.new_zeros(N, T, U + 1),
    )
    delta_NTSK = lse_NT1.new_zeros(N, T, U + 1, index_NTK.shape[2])
    out = [part.numpy() for part in (moved_NTS, emit_NTU, stay_NTU, blank_NTS, delta_NTSK)]
    _forward(use_torch_threads(), *floats, index_NTK.numpy(), place_NTU.numpy(), diagonal, *out)  # type: ignore[call-arg]
    return moved_NTS, emit_NTU, stay_NTU, blank_NTS, delta_NTSK


def backward(
    slot_NTR: Tensor,
    context_NSR: Tensor,
    token_VR: Tensor,
    blank_R: Tensor,
    index_NTK: Tensor,
    logits_NTK: Tensor,
    place_NTU: Tensor,
    diagonal: bool,
    moved_NTS: Tensor,
    delta_NTSK: Tensor,
    *grads: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of slot, context, token, blank and logits, from those of the four that `forward` returned."""
    inputs = (slot_NTR, context_NSR, token_VR, blank_R, logits_NTK)
    threads = use_torch_threads()
    grad_slot, grad_context, grad_logits = (torch.zeros_like(part) for part in (slot_NTR, context_NSR, logits_NTK))
    grad_token, grad_blank = token_VR.new_zeros(threads, *token_VR.shape), blank_R.new_zeros(threads, *blank_R.shape)
    out = [part.numpy() for part in (grad_slot, grad_context, grad_token, grad_blank, grad_logits)]
    states = [_array(part) for part in (moved_NTS, delta_NTSK, *grads)]
    numbers = (index_NTK.numpy(), place_NTU.numpy(), diagonal)
    _backward(threads, *map(_array, inputs), *numbers, *states, *out)  # type: ignore[call-arg]
    return grad_slot, grad_context, grad_token.sum(dim=0), grad_blank.sum(dim=0), grad_logits


def use_torch_threads() -> int:
    """Compiled loops then run on as many threads as torch's operations; their number."""
    threads = max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    numba.set_num_threads(threads)
    return threads


def _array(part: Tensor) -> NDArray[Any]:
    return part.detach().contiguous().numpy()


@njit(cache=True, parallel=True, fastmath=True)
def _forward(threads, slot, context, token, blank, logits, index, place, diagonal, moved, emit, stay, blanked, delta):
    N, T, K = index.shape
    R, U = slot.shape[2], place.shape[2]
    for chunk in prange(threads):
        key = np.empty((R, K), slot.dtype)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(T):
                for k in range(K):
                    for r in range(R):
                        key[r, k] = token[index[n, t, k], r]
                for s in range(min(t, U) if diagonal else 0, min(t, U) + 1):
                    d = delta[n, t, s]
                    share = slot[n, t, 0] * 0
                    for r in range(R):
                        x = slot[n, t, r] + context[n, s, r]
                        g = x * min(max(x + 3, 0), 6) / 6
                        share += g * blank[r]
                        for k in range(K):
                            d[k] += g * key[r, k]
                    blanked[n, t, s] = share
                    top = logits[n, t, 0] + d[0]
                    for k in range(K):
                        top = max(top, logits[n, t, k] + d[k])
                    total = top * 0
                    for k in range(K):
                        total += np.exp(logits[n, t, k] + d[k] - top)
                    moved[n, t, s] = top + np.log(total)
                    if s < U and place[n, t, s] >= 0:
                        emit[n, t, s] = d[place[n, t, s]]
                    if s > 0 and place[n, t, s - 1] >= 0:
                        stay[n, t, s - 1] = d[place[n, t, s - 1]]


@njit(cache=True, parallel=True, fastmath=True)
def _backward(
    threads, slot, context, token, blank, logits, index, place, diagonal, moved, delta,
    grad_moved, grad_emit, grad_stay, grad_blanked, grad_slot, grad_context, grad_token, grad_blank, grad_logits,
):  # fmt: skip
    N, T, K = index.shape
    R, U = slot.shape[2], place.shape[2]
    for chunk in prange(threads):
        key, grad_key = np.empty((R, K), slot.dtype), np.empty((R, K), slot.dtype)
        move = np.empty(K, slot.dtype)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(T):
                for k in range(K):
                    for r in range(R):
                        key[r, k] = token[index[n, t, k], r]
                grad_key[:] = 0
                for s in range(U + 1):
                    reached = s == min(t, U) if diagonal else s <= t
                    if not reached and grad_moved[n, t, s] == 0:
                        continue
                    for k in range(K):
                        p = np.exp(logits[n, t, k] + delta[n, t, s, k] - moved[n, t, s])
                        move[k] = p * grad_moved[n, t, s]
                        grad_logits[n, t, k] += move[k]
                    if not reached:
                        continue
                    if s < U and place[n, t, s] >= 0:
                        move[place[n, t, s]] += grad_emit[n, t, s]
                    if s > 0 and place[n, t, s - 1] >= 0:
                        move[place[n, t, s - 1]] += grad_stay[n, t, s - 1]
                    for r in range(R):
                        x = slot[n, t, r] + context[n, s, r]
                        g = x * min(max(x + 3, 0), 6) / 6
                        back = grad_blanked[n, t, s] * blank[r]
                        for k in range(K):
                            back += move[k] * key[r, k]
                            grad_key[r, k] += g * move[k]
                        grad_blank[chunk, r] += g * grad_blanked[n, t, s]
                        if x <= -3:
                            back = back * 0
                        elif x < 3:
                            back = back * (x / 3 + 0.5)
                        grad_slot[n, t, r] += back
                        grad_context[n, s, r] += back
                for k in range(K):
                    for r in range(R):
                        grad_token[chunk, index[n, t, k], r] += grad_key[r, k]
