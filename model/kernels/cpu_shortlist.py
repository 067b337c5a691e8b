"""`reference.moved_shortlist` compiled for a CPU: all that one anchor's slot needs stays in the first cache.

Of a slot t only the contexts that can come before it are computed: t - band to t labels. Forward
keeps p [N, T, S, J + K], the softmax of what is moved; backward reads it and makes everything else anew. Chunks of
anchors go to threads, each with sums of its own, added up in a fixed order. No sum may be reordered (fastmath): the
process that compiles would then round in another way than those that load what it compiled, and a resumed run in
another than one never stopped. So loops run over numbers that do not depend on each other, which needs no permission to
be vectorised.

Suffixes as in reference.py: N anchors, T slots, U labels, S = U + 1 contexts, K shortlist, J successors, R rank,
V vocabulary.
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
# and most prefixes are hardly reached by any alignment (of a trained head's products a fifth is left).
NOTHING = 1e-30
NEGLIGIBLE = 1e-5  # of what the largest gradient is rounded by
LEAST_LOG = -60.0  # what is less likely than its exponential beside the likeliest is impossible


def forward(prefixes: Prefixes, band: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the reference returns, and p [N, T, S, J + K]."""
    N, T, U = prefixes.emit_NTU.shape
    J, K = prefixes.successor_NSJ.shape[2], prefixes.index_NTK.shape[2]
    lse_NT1 = prefixes.logits_NTK.logsumexp(dim=2, keepdim=True)
    moved_NTS, still_NTS = (lse_NT1.expand(N, T, U + 1).contiguous() for _ in range(2))
    emit_NTU, stay_NTU = lse_NT1.new_zeros(N, T, U), lse_NT1.new_zeros(N, T, U)
    blank_NTS = torch.zeros_like(moved_NTS)
    p_NTSX = lse_NT1.new_empty(N, T, U + 1, J + K)
    out = [part.numpy() for part in (moved_NTS, still_NTS, emit_NTU, stay_NTU, blank_NTS, p_NTSX)]
    _forward(use_torch_threads(), *map(_array, prefixes), band, *out)  # type: ignore[call-arg]
    return moved_NTS, still_NTS, emit_NTU, stay_NTU, blank_NTS, p_NTSX


def backward(
    prefixes: Prefixes, band: int, still_NTS: Tensor, p_NTSX: Tensor, *grads: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of slot, context, token, blank, the successors' logits and the shortlist's, from those of the five that
    `forward` returned."""
    threads = use_torch_threads()
    own = (prefixes.slot_NTR, prefixes.context_NSR, prefixes.successor_logits_NTSJ, prefixes.logits_NTK)
    grad_slot, grad_context, grad_next, grad_logits = (torch.zeros_like(part) for part in own)
    shared = (prefixes.token_VR, prefixes.blank_R)
    grad_token, grad_blank = (part.new_zeros(threads, *part.shape) for part in shared)
    out = [part.numpy() for part in (grad_slot, grad_context, grad_token, grad_blank, grad_next, grad_logits)]
    states = [_array(part) for part in (still_NTS, p_NTSX, *grads)]
    largest = max((float(part.abs().max()) for part in grads if part.numel()), default=0.0)
    nothing = max(NOTHING, NEGLIGIBLE * torch.finfo(still_NTS.dtype).eps * largest)
    _backward(threads, states[0].dtype.type(nothing), *map(_array, prefixes), band, *states, *out)  # type: ignore[call-arg]
    return grad_slot, grad_context, grad_token.sum(dim=0), grad_blank.sum(dim=0), grad_next, grad_logits


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
def _kept(gradient, nothing):
    return gradient if abs(gradient) > nothing else gradient * 0


@njit(cache=True)
def _transposed(out, x, row):
    for r in range(len(row)):
        out[r, x] = row[r]


@njit(cache=True)
def _added(out, row):
    for r in range(len(row)):
        out[r] += row[r]


@njit(cache=True)
def _products(out, weights, rows):
    """out + weights @ rows, eight rows at a time."""
    eights = len(weights) // 8 * 8
    for i in range(0, eights, 8):
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        w4, w5, w6, w7 = weights[i + 4], weights[i + 5], weights[i + 6], weights[i + 7]
        for x in range(len(out)):
            first = (w0 * rows[i, x] + w1 * rows[i + 1, x]) + (w2 * rows[i + 2, x] + w3 * rows[i + 3, x])
            second = (w4 * rows[i + 4, x] + w5 * rows[i + 5, x]) + (w6 * rows[i + 6, x] + w7 * rows[i + 7, x])
            out[x] += first + second
    for i in range(eights, len(weights)):
        for x in range(len(out)):
            out[x] += weights[i] * rows[i, x]


@njit(cache=True, parallel=True)
def _forward(
    threads, slot, context, token, blank, successor, next_logits, index, logits, emit_place, stay_place, band,
    moved, still, emit, stay, blanked, p,
):  # fmt: skip
    N, T, K = index.shape
    R, U, J = slot.shape[2], emit_place.shape[2], successor.shape[2]
    for chunk in prange(threads):
        next_key = np.empty((U + 1, R, J), slot.dtype)
        key = np.empty((R, K + 1), slot.dtype)  # the blank is one token more
        d, gate = np.empty(J + K + 1, slot.dtype), np.empty(R, slot.dtype)
        seen = np.full(len(token), -1)  # the last slot (of all anchors) whose shortlist held a token
        key[:, K] = blank
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for s in range(U + 1):
                for j in range(J):
                    _transposed(next_key[s], j, token[max(successor[n, s, j], 0)])
            for t in range(T):
                listed = logits[n, t, 0] * 0  # in all the shortlist holds, its first token being 1
                for k in range(K):
                    seen[index[n, t, k]] = n * T + t
                    listed += np.exp(logits[n, t, k] - logits[n, t, 0])
                    _transposed(key, k, token[index[n, t, k]])
                for s in range(max(t - band, 0), min(t, U) + 1):
                    _gates(gate, slot[n, t], context[n, s])
                    d[:] = 0
                    _products(d[:J], gate, next_key[s])
                    _products(d[J:], gate, key)
                    blanked[n, t, s] = d[J + K]
                    top = logits[n, t, 0] + d[J]
                    for k in range(K):
                        p[n, t, s, J + k] = logits[n, t, k] + d[J + k]
                        top = max(top, p[n, t, s, J + k])
                    unmoved = listed
                    for j in range(J):
                        if successor[n, s, j] < 0 or seen[successor[n, s, j]] == n * T + t:
                            p[n, t, s, j] = -np.inf
                            continue
                        p[n, t, s, j] = next_logits[n, t, s, j] + d[j]
                        top = max(top, p[n, t, s, j])
                        unmoved += np.exp(next_logits[n, t, s, j] - logits[n, t, 0])
                    total = top * 0
                    for x in range(J + K):
                        below = p[n, t, s, x] - top
                        p[n, t, s, x] = np.exp(below) if below > LEAST_LOG else top * 0
                        total += p[n, t, s, x]
                    for x in range(J + K):
                        p[n, t, s, x] /= total
                    moved[n, t, s] = top + np.log(total)
                    still[n, t, s] = logits[n, t, 0] + np.log(unmoved)
                    if s < U and emit_place[n, t, s] >= 0:
                        emit[n, t, s] = d[emit_place[n, t, s]]
                    if s > 0 and stay_place[n, t, s - 1] >= 0:
                        stay[n, t, s - 1] = d[stay_place[n, t, s - 1]]


@njit(cache=True, parallel=True)
def _backward(
    threads, nothing, slot, context, token, blank, successor, next_logits, index, logits, emit_place, stay_place,
    band, still, p, grad_moved, grad_still, grad_emit, grad_stay, grad_blanked,
    grad_slot, grad_context, grad_token, grad_blank, grad_next, grad_logits,
):  # fmt: skip
    N, T, K = index.shape
    R, U, J = slot.shape[2], emit_place.shape[2], successor.shape[2]
    for chunk in prange(threads):
        next_key, grad_next_key = np.empty((U + 1, J, R), slot.dtype), np.empty((U + 1, J, R), slot.dtype)
        key, grad_key = np.empty((K + 1, R), slot.dtype), np.empty((K + 1, R), slot.dtype)
        next_held, held = np.zeros((U + 1, J), np.bool_), np.ones(K + 1, np.bool_)
        move, share = np.empty(J + K + 1, slot.dtype), np.empty(K, slot.dtype)
        gate, back = np.empty(R, slot.dtype), np.empty(R, slot.dtype)
        seen = np.full(len(token), -1)
        key[K], grad_key[K] = blank, 0
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            next_held[:] = False
            for t in range(T):
                held[:K] = False
                for k in range(K):
                    seen[index[n, t, k]] = n * T + t
                    share[k] = np.exp(logits[n, t, k] - logits[n, t, 0])
                for s in range(U + 1):
                    reached = t - band <= s <= t
                    unmoved = grad_still[n, t, s] if reached else grad_still[n, t, s] + grad_moved[n, t, s]
                    unmoved = _kept(unmoved, nothing)
                    if unmoved != 0:
                        unmoved *= np.exp(logits[n, t, 0] - still[n, t, s])
                        for k in range(K):
                            grad_logits[n, t, k] += share[k] * unmoved
                    if not reached:
                        continue
                    of_moved = _kept(grad_moved[n, t, s], nothing)
                    for x in range(J + K):
                        move[x] = _kept(p[n, t, s, x] * of_moved, nothing)
                    for k in range(K):
                        grad_logits[n, t, k] += move[J + k]
                    for j in range(J if of_moved != 0 or unmoved != 0 else 0):
                        if successor[n, s, j] >= 0 and seen[successor[n, s, j]] != n * T + t:
                            grad_next[n, t, s, j] = move[j]
                            if unmoved != 0:
                                grad_next[n, t, s, j] += np.exp(next_logits[n, t, s, j] - logits[n, t, 0]) * unmoved
                    move[J + K] = _kept(grad_blanked[n, t, s], nothing)
                    if s < U and emit_place[n, t, s] >= 0:
                        move[emit_place[n, t, s]] += _kept(grad_emit[n, t, s], nothing)
                    if s > 0 and stay_place[n, t, s - 1] >= 0:
                        move[stay_place[n, t, s - 1]] += _kept(grad_stay[n, t, s - 1], nothing)
                    if not move.any():
                        continue
                    _gates(gate, slot[n, t], context[n, s])
                    back[:] = 0
                    _outer(back, next_held[s], next_key[s], grad_next_key[s], token, successor[n, s], move[:J], gate)
                    _outer(back, held, key, grad_key, token, index[n, t], move[J:], gate)
                    _through_gates(back, slot[n, t], context[n, s])
                    _added(grad_slot[n, t], back)
                    _added(grad_context[n, s], back)
                for k in range(K):
                    if held[k]:
                        _added(grad_token[chunk, index[n, t, k]], grad_key[k])
            for s in range(U + 1):
                for j in range(J):
                    if next_held[s, j]:
                        _added(grad_token[chunk, max(successor[n, s, j], 0)], grad_next_key[s, j])
        grad_blank[chunk] += grad_key[K]


@njit(cache=True)
def _outer(back, held, key, grad_key, token, chosen, move, gate):
    """Gradients of the gate and of the keys, from those of their products; a key comes in when it is first needed."""
    for k in range(len(move)):
        if move[k] == 0:
            continue
        mine, gradient = key[k], grad_key[k]
        if not held[k]:
            held[k] = True
            row = token[max(chosen[k], 0)]
            for r in range(len(gate)):
                mine[r], gradient[r] = row[r], 0
        _add_both(back, gradient, move[k], mine, gate)


@njit(cache=True)
def _add_both(back, gradient, move, key, gate):
    for r in range(len(gate)):
        back[r] += move * key[r]
        gradient[r] += move * gate[r]
