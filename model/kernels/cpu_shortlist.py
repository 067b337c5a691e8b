"""`reference.moved_shortlist` compiled for a CPU: rows of P w_v are read where they are, none is copied.

A row serves two places at a time: a slot's likeliest tokens are moved behind every prefix of its window, a prefix's
successors in every slot that has it in its window.

Chunks of anchors go to threads, each with sums of its own, added up in a fixed order. Totals and dot products are the
only sums that the compiler may order, so that they can be vectorised; where it may order more (fastmath), the process
that compiles has rounded in another way than those that load what it compiled, and a resumed run in another than one
never stopped (tests/model/test_compiled.py).

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
NEGLIGIBLE = 1e-2  # of what the largest is rounded by; with them and without, all of it is off by 2e-7 of its norm


def forward(prefixes: Prefixes) -> tuple[Moved, tuple[Tensor, ...]]:
    """What the reference returns, and what `backward` needs: shares of the shortlist's tokens in its sums, moved and as
    it is [N, T, W, J + K]; where in it the next label and the last one are [N, T, W], -1: they are not."""
    N, T, K = prefixes.index_NTK.shape
    J, W = prefixes.successor_NSJ.shape[2], prefixes.window_TW.shape[1]
    of_windows = [prefixes.slot_NTR.new_zeros(N, T, W) for _ in range(5)]
    moved = Moved._make([*of_windows, torch.zeros(N, T, W, dtype=torch.bool)])
    shares = [prefixes.slot_NTR.new_empty(N, T, W, J + K) for _ in range(2)]
    places = [torch.full((N, T, W), -1) for _ in range(2)]
    kept = (*shares, *places)
    _forward(use_torch_threads(), *map(array_of, prefixes), *(part.numpy() for part in (*moved, *kept)))  # type: ignore
    return moved, kept


def backward(prefixes: Prefixes, kept: tuple[Tensor, ...], of_moved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of slot, context, token, blank, and of the logits of successors and likeliest tokens."""
    threads = use_torch_threads()
    alone = [part.new_empty(part.shape) for part in (prefixes.slot_NTR, prefixes.context_SNR)]
    shared = [part.new_zeros(threads, *part.shape) for part in (prefixes.token_VR, prefixes.blank_R)]
    logits = [part.new_empty(part.shape) for part in (prefixes.successor_NTWJ, prefixes.logits_NTK)]
    largest = max((float(part.abs().max()) for part in of_moved if part.numel()), default=0.0)
    nothing = max(NOTHING, NEGLIGIBLE * torch.finfo(prefixes.slot_NTR.dtype).eps * largest)
    known = [array_of(part) for part in (*prefixes[:7], prefixes.slots_N, *kept, *of_moved)]
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
    """hardswish of their sum. A constant that were an integer would make all of it float64, at half the speed."""
    number = out.dtype.type
    zero, three, six = number(0), number(3), number(6)
    for r in range(len(out)):
        at = slot[r] + context[r]
        out[r] = at * min(max(at + three, zero), six) / six


@njit(cache=True)
def _through_gates(gradient, slot, context):
    """The gradient of the sum, from that of its hardswish, in place."""
    number = gradient.dtype.type
    zero, half, one, three = number(0), number(0.5), number(1), number(3)
    for r in range(len(gradient)):
        at = slot[r] + context[r]
        gradient[r] *= zero if at <= -three else one if at >= three else at / three + half


@njit(cache=True)
def _pairs(window, S):
    """Places t * W + w, where slots are looked at behind contexts, in twos that read the same rows of P w_v: slots with
    two of theirs [P, 3], which share the likeliest tokens, and contexts [Q, 3], which share successors. T * W: none."""
    T, W = window.shape
    of_slots, of_contexts = np.full((T * W, 3), T * W), np.full((T * W, 3), T * W)
    open_T, open_S = np.full(T, -1), np.full(S, -1)  # the pair that lacks its second
    P = Q = 0
    for t in range(T):
        for w, s in enumerate(window[t]):
            if s > t:
                continue
            if open_T[t] >= 0:
                of_slots[open_T[t], 2], open_T[t] = t * W + w, -1
            else:
                of_slots[P, 0], of_slots[P, 1], open_T[t] = t, t * W + w, P
                P += 1
            if open_S[s] >= 0:
                of_contexts[open_S[s], 2], open_S[s] = t * W + w, -1
            else:
                of_contexts[Q, 0], of_contexts[Q, 1], open_S[s] = s, t * W + w, Q
                Q += 1
    return of_slots[:P], of_contexts[:Q]


@njit(cache=True, fastmath={"reassoc", "contract"})
def _dots(out_a, out_b, gate_a, gate_b, rows, chosen, count):
    """Products of two gates with each chosen row, four rows at a time."""
    zero = gate_a.dtype.type(0)
    fours = count // 4 * 4
    for i in range(0, fours, 4):
        v0, v1, v2, v3 = chosen[i], chosen[i + 1], chosen[i + 2], chosen[i + 3]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
        for r in range(len(gate_a)):
            a, b = gate_a[r], gate_b[r]
            a0 += rows[v0, r] * a
            a1 += rows[v1, r] * a
            a2 += rows[v2, r] * a
            a3 += rows[v3, r] * a
            b0 += rows[v0, r] * b
            b1 += rows[v1, r] * b
            b2 += rows[v2, r] * b
            b3 += rows[v3, r] * b
        out_a[i], out_a[i + 1], out_a[i + 2], out_a[i + 3] = a0, a1, a2, a3
        out_b[i], out_b[i + 1], out_b[i + 2], out_b[i + 3] = b0, b1, b2, b3
    for i in range(fours, count):
        out_a[i], out_b[i] = _dot(gate_a, rows[chosen[i]]), _dot(gate_b, rows[chosen[i]])


@njit(cache=True, fastmath={"reassoc", "contract"})
def _dot(gate, row):
    """Their product, its sum in any order."""
    total = gate.dtype.type(0)
    for r in range(len(gate)):
        total += row[r] * gate[r]
    return total


@njit(cache=True)
def _place(v, found, successor, logits):
    """Where token v is in a shortlist: `found` among the likeliest (-1: not), or of the successors, of which those with
    a logit of -inf are none; -1: nowhere."""
    if found >= 0:
        return len(successor) + found
    for j in range(len(successor)):
        if successor[j] == v and logits[j] != -np.inf:
            return j
    return -1


@njit(cache=True, error_model="numpy")
def _shares(values, powers):
    """Their log-sum-exp; in place, what each has of it. powers: room for as many."""
    a = b = c = d = values[0]
    for i in range(0, len(values) - 3, 4):  # one after the other would wait for each comparison
        a, b = max(a, values[i]), max(b, values[i + 1])
        c, d = max(c, values[i + 2]), max(d, values[i + 3])
    for x in range(len(values) // 4 * 4, len(values)):
        a = max(a, values[x])
    peak = max(a, b, c, d)
    _exponentials(values, peak, powers)
    total = _total(values)
    for x in range(len(values)):
        values[x] /= total
    return peak + np.log(total)


@njit(cache=True, error_model="numpy")
def _exponentials(values, peak, powers):
    """exp(value - peak) in place, 0 below what float32 holds. Float32 as 2^k exp(r), |r| <= log(2) / 2, with the
    polynomial of Cephes' expf (S. L. Moshier 1989): vectorised, where each by itself takes four times as long."""
    if values.itemsize > 4:
        for x in range(len(values)):
            values[x] = np.exp(values[x] - peak)
        return
    one, half, least = np.float32(1), np.float32(0.5), np.float32(-87)
    for x in range(len(values)):
        at = np.float32(values[x] - peak)
        k = np.floor((least if at < least else at) * np.float32(1.44269504) + half)  # NaN stays
        r = at - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
        y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
        y = (y * r + np.float32(8.3334519073e-3)) * r + np.float32(4.1665795894e-2)
        y = (y * r + np.float32(1.6666665459e-1)) * r + half
        values[x] = np.float32(0) if at < least else y * r * r + r + one
        powers[x] = (np.int32(k) + np.int32(127)) << np.int32(23)
    scale = powers.view(np.float32)
    for x in range(len(values)):
        values[x] *= scale[x]


@njit(cache=True, fastmath={"reassoc", "contract"})
def _total(values):
    """Their sum, in any order."""
    total = values.dtype.type(0)
    for value in values:
        total += value
    return total


@njit(cache=True, parallel=True)
def _forward(
    threads, slot, context, token, blank, window, successor, index, successor_logits, logits, next, last, slots,
    moved, still, emit, stay, of_blank, inside, moved_share, still_share, next_place, last_place,
):  # fmt: skip
    N, T, K = index.shape
    S, J, R, W = successor.shape[1], successor.shape[2], slot.shape[2], window.shape[1]
    of_slots, of_contexts = _pairs(window, S)
    for chunk in prange(threads):
        gate, delta = np.zeros((T * W + 1, R), slot.dtype), np.zeros((T * W + 1, J + K), slot.dtype)  # the last: none's
        chosen, column, some = np.empty(J, np.int64), np.empty(J, np.int64), np.empty((2, J), slot.dtype)
        likely = np.full(len(token), -1)  # where a token is among the slot's likeliest
        powers = np.empty(J + K, np.int32)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            for t in range(slots[n]):
                for w, s in enumerate(window[t]):
                    if s <= t:
                        _gates(gate[t * W + w], slot[n, t], context[s, n])
                        of_blank[n, t, w] = _dot(gate[t * W + w], blank)
            for p in range(len(of_slots)):
                t, a, b = of_slots[p, 0], of_slots[p, 1], of_slots[p, 2]
                if t >= slots[n]:
                    break
                _dots(delta[a, J:], delta[b, J:], gate[a], gate[b], token, index[n, t], K)
            for p in range(len(of_contexts)):
                s, a, b = of_contexts[p, 0], of_contexts[p, 1], of_contexts[p, 2]
                if a >= slots[n] * W:
                    continue
                count = 0
                for j in range(J):
                    chosen[count], column[count] = successor[n, s, j], j
                    count += successor[n, s, j] >= 0
                _dots(some[0], some[1], gate[a], gate[b], token, chosen, count)
                for i in range(count):
                    delta[a, column[i]], delta[b, column[i]] = some[0, i], some[1, i]
            for t in range(slots[n]):
                for k in range(K - 1, -1, -1):  # of the same, the first
                    likely[index[n, t, k]] = k
                for w, s in enumerate(window[t]):
                    as_is, as_moved, by = still_share[n, t, w], moved_share[n, t, w], delta[t * W + w]
                    for j in range(J):
                        v = successor[n, s, j]
                        as_is[j] = -np.inf if v < 0 or likely[v] >= 0 else successor_logits[n, t, w, j]
                    as_is[J:] = logits[n, t]
                    if s <= t:
                        v, u = next[n, s], last[n, s]
                        x = -1 if v < 0 else _place(v, likely[v], successor[n, s], as_is)
                        y = -1 if u < 0 else _place(u, likely[u], successor[n, s], as_is)
                        next_place[n, t, w], last_place[n, t, w], inside[n, t, w] = x, y, x >= 0
                        emit[n, t, w] = by[x] if x >= 0 else 0
                        stay[n, t, w] = by[y] if y >= 0 else 0
                    for x in range(J + K):  # what is none keeps the delta of another anchor
                        as_moved[x] = as_is[x] if as_is[x] == -np.inf else as_is[x] + by[x]
                    still[n, t, w], moved[n, t, w] = _shares(as_is, powers), _shares(as_moved, powers)
                for k in range(K):
                    likely[index[n, t, k]] = -1


@njit(cache=True, parallel=True)
def _backward(
    threads, nothing, slot, context, token, blank, window, successor, index, slots, moved_share, still_share,
    next_place, last_place, of_moved, of_still, of_emit, of_stay, of_blank,
    grad_slot, grad_context, grad_token, grad_blank, grad_successor, grad_logits,
):  # fmt: skip
    N, T, K = index.shape
    S, J, R, W = successor.shape[1], successor.shape[2], slot.shape[2], window.shape[1]
    of_slots, of_contexts = _pairs(window, S)
    for chunk in prange(threads):
        gate, back = np.zeros((T * W + 1, R), slot.dtype), np.zeros((T * W + 1, R), slot.dtype)
        move = np.zeros((T * W + 1, J + K), slot.dtype)
        zero = slot.dtype.type(0)
        chosen, weight = np.empty(J + K, np.int64), np.empty((2, J + K), slot.dtype)
        for n in range(N * chunk // threads, N * (chunk + 1) // threads):
            grad_slot[n], grad_context[:, n], grad_logits[n], grad_successor[n, slots[n] :] = zero, zero, zero, zero
            move[slots[n] * W :], gate[slots[n] * W :] = zero, zero  # of contexts whose second place is past them
            for t in range(slots[n]):
                for w, s in enumerate(window[t]):
                    grad = move[t * W + w]
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
                    for x in range(J + K):
                        grad[x] = zero if abs(grad[x]) <= nothing else grad[x]  # NaN is something
                    _gates(gate[t * W + w], slot[n, t], context[s, n])
                    by = zero if abs(of_blank[n, t, w]) <= nothing else of_blank[n, t, w]
                    for r in range(R):
                        back[t * W + w, r] = by * blank[r]
                        grad_blank[chunk, r] += by * gate[t * W + w, r]
            for p in range(len(of_slots)):
                t, a, b = of_slots[p, 0], of_slots[p, 1], of_slots[p, 2]
                if t >= slots[n]:
                    break
                count = _choose(chosen, weight, index[n, t], move[a, J:], move[b, J:])
                _through_dots(back[a], back[b], grad_token[chunk], gate[a], gate[b], token, chosen, weight, count)
            for p in range(len(of_contexts)):
                s, a, b = of_contexts[p, 0], of_contexts[p, 1], of_contexts[p, 2]
                if a >= slots[n] * W:
                    continue
                count = _choose(chosen, weight, successor[n, s], move[a, :J], move[b, :J])
                _through_dots(back[a], back[b], grad_token[chunk], gate[a], gate[b], token, chosen, weight, count)
            for t in range(slots[n]):
                for w, s in enumerate(window[t]):
                    if s <= t:
                        _through_gates(back[t * W + w], slot[n, t], context[s, n])
                        for r in range(R):
                            grad_slot[n, t, r] += back[t * W + w, r]
                            grad_context[s, n, r] += back[t * W + w, r]


@njit(cache=True)
def _choose(chosen, weight, tokens, a, b):
    """The tokens that are moved in one of two places, and by how much in each; how many."""
    count = 0
    for x in range(len(tokens)):
        chosen[count], weight[0, count], weight[1, count] = tokens[x], a[x], b[x]
        count += (tokens[x] >= 0) & ((a[x] != 0) | (b[x] != 0))
    return count


@njit(cache=True)
def _through_dots(out_a, out_b, out_rows, gate_a, gate_b, rows, chosen, weight, count):
    """Add the gradients of two gates and of the chosen rows, from those of their products, four rows at a time."""
    fours = count // 4 * 4
    for i in range(0, fours, 4):
        v0, v1, v2, v3 = chosen[i], chosen[i + 1], chosen[i + 2], chosen[i + 3]
        a0, a1, a2, a3 = weight[0, i], weight[0, i + 1], weight[0, i + 2], weight[0, i + 3]
        b0, b1, b2, b3 = weight[1, i], weight[1, i + 1], weight[1, i + 2], weight[1, i + 3]
        for r in range(len(out_a)):
            x0, x1, x2, x3 = rows[v0, r], rows[v1, r], rows[v2, r], rows[v3, r]
            out_a[r] += (a0 * x0 + a1 * x1) + (a2 * x2 + a3 * x3)
            out_b[r] += (b0 * x0 + b1 * x1) + (b2 * x2 + b3 * x3)
    for i in range(fours, count):
        for r in range(len(out_a)):
            out_a[r] += weight[0, i] * rows[chosen[i], r]
            out_b[r] += weight[1, i] * rows[chosen[i], r]
    for i in range(count):
        v, a, b = chosen[i], weight[0, i], weight[1, i]
        for r in range(len(gate_a)):
            out_rows[v, r] += a * gate_a[r] + b * gate_b[r]
