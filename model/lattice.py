"""What a head believes about the next tokens, cut down to the candidates that a draft can use.

Shape suffixes: N anchors, T slots, V vocabulary, X = T * k put forward (the same token by several slots), K a slot's
shortlist, C contexts (the last token collapsed so far), R rank of the transition, Y distinct candidates.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.transition import Mixed, Tables, Transition


@dataclass(frozen=True)
class Lattice:
    """Per-slot probabilities over candidate tokens and the blank.

    tokens [Y]       candidate token ids, ascending
    emission [T, C, Y]  p_t(c | u); C = 1 where the last token u does not matter, else C = Y + 1:
                        row 0 before the first token, row 1 + i after tokens[i]
    blank [T, C]     p_t(blank | u)
    merge            True: CTC, equal neighbours collapse. False: slot k writes token k, no blank.
    """

    tokens: NDArray[np.int64]
    emission: NDArray[np.float32]
    blank: NDArray[np.float32]
    merge: bool

    @property
    def slots(self) -> int:
        return self.emission.shape[0]


class Moved(NamedTuple):
    """What a transition needs to move the candidates: contexts B e(u) [N, C, R], C = X + 1 (the root first, then the
    candidates), slots A s_t [N, T, R], and of each slot's shortlist the ids and log-probabilities [N, T, K] and tokens
    P w_v [N, T, K, R]; logit of the blank over the vocabulary's lse [N, T] and its vector [N, R] (None: no blank)."""

    context_NCR: Tensor
    slot_NTR: Tensor
    ids_NTK: Tensor
    log_p_NTK: Tensor
    token_NTKR: Tensor
    blank_NT: Tensor | None
    blank_NR: Tensor | None


class Candidates(NamedTuple):
    """Each slot's top-k tokens, one slot after the other: ids [N, X], their probability in every slot [N, T, X] and the
    blank's [N, T] (None: no blank), normalised over the whole vocabulary; moved: with a transition, which then has the
    blank too. Fixed shapes, and no wait for a device."""

    tokens_NX: Tensor
    emission_NTX: Tensor
    blank_NT: Tensor | None
    moved: Moved | None = None

    @property
    def _parts(self) -> list[Tensor | None]:
        return [self.tokens_NX, self.emission_NTX, self.blank_NT, *(self.moved or ())]

    def packed(self) -> Tensor:
        """All of it as int32 [N, numbers], for one copy to the host."""
        parts = [part for part in self._parts if part is not None]
        bits = [part.float().view(torch.int32) if part.is_floating_point() else part.int() for part in parts]
        return torch.cat([part.flatten(1) for part in bits], dim=1)

    def unpacked(self, packed_NZ: NDArray[np.int32]) -> list[Lattice]:
        """The lattices of all anchors, from what `packed` of candidates of these shapes held."""
        arrays: list[NDArray[Any] | None] = []
        for part in self._parts:
            if part is None:
                arrays.append(None)
                continue
            size = part[0].numel()
            here, packed_NZ = np.ascontiguousarray(packed_NZ[:, :size]), packed_NZ[:, size:]
            array = here.view(np.float32) if part.is_floating_point() else here.astype(np.int64)
            arrays.append(array.reshape(part.shape))
        return _lattices(arrays)

    def lattices(self) -> list[Lattice]:
        """The lattices of all anchors, on the host."""
        if self.tokens_NX.is_cuda:
            return self.unpacked(self.packed().cpu().numpy())
        wide = (None if part is None else part.float() if part.is_floating_point() else part for part in self._parts)
        return _lattices([None if part is None else part.detach().numpy() for part in wide])


def _lattices(arrays: list[NDArray[Any] | None]) -> list[Lattice]:
    assert arrays[0] is not None
    return [lattice_of(*(None if a is None else a[n] for a in arrays)) for n in range(len(arrays[0]))]


def candidates_of(logits_NTV: Tensor, blank_NT: Tensor | None, top_k: int) -> Candidates:
    """From the logits of every slot; blank None is a head whose slot k predicts token k."""
    logits_NTV = logits_NTV.float()
    lse_NT = logits_NTV.logsumexp(dim=2)
    if blank_NT is not None:
        lse_NT = torch.logaddexp(lse_NT, blank_NT.float())
    tokens_NX = logits_NTV.topk(min(top_k, logits_NTV.shape[2]), dim=2).indices.flatten(1)
    emission_NTX = (_columns(logits_NTV, tokens_NX) - lse_NT.unsqueeze(2)).exp()
    return Candidates(tokens_NX, emission_NTX, None if blank_NT is None else (blank_NT.float() - lse_NT).exp())


def moved_candidates_of(
    logits_NTV: Tensor,
    blank_NT: Tensor | None,
    top_k: int,
    *,
    transition: Transition,
    mixed: Mixed,
    tables: Tables,
    shortlist: int,
) -> Candidates:
    """The same where a transition moves each slot's `shortlist` likeliest tokens; the first top_k are put forward."""
    logits_NTV = logits_NTV.float()
    top = logits_NTV.topk(min(shortlist, logits_NTV.shape[2]), dim=2)
    tokens_NX = top.indices[:, :, :top_k].flatten(1)
    N = len(tokens_NX)
    lse_NT1 = logits_NTV.logsumexp(dim=2, keepdim=True)
    moved = Moved(
        torch.cat([mixed.root_NR.unsqueeze(1), F.embedding(tokens_NX, tables.context_VR)], dim=1),
        mixed.slot_NTR,
        top.indices,
        top.values - lse_NT1,
        F.embedding(top.indices, tables.token_VR),
        None if blank_NT is None else blank_NT.float() - lse_NT1.squeeze(2),
        None if transition.blank_R is None else transition.blank_R.expand(N, -1),
    )
    return Candidates(tokens_NX, (_columns(logits_NTV, tokens_NX) - lse_NT1).exp(), None, moved)


def _columns(logits_NTV: Tensor, tokens_NX: Tensor) -> Tensor:
    return logits_NTV.gather(2, tokens_NX.unsqueeze(1).expand(-1, logits_NTV.shape[1], -1))


def lattice_of(tokens_X: Any, emission_TX: Any, blank_T: NDArray[np.float32] | None, *moved: Any) -> Lattice:
    """The lattice of one anchor's candidates, each token once, from arrays; moved: the parts of `Moved`."""
    tokens, first = np.unique(tokens_X, return_index=True)
    emission = np.ascontiguousarray(emission_TX[:, first])
    if not moved:
        blank = np.zeros(len(emission), np.float32) if blank_T is None else blank_T
        return Lattice(tokens, emission[:, None], blank[:, None], blank_T is not None)
    context_CR, slot_TR, ids_TK, log_p_TK, token_TKR, blank_T, blank_R = moved
    merge = blank_T is not None
    if blank_T is None or blank_R is None:
        blank_T, blank_R = np.full(len(slot_TR), -np.inf, np.float32), np.zeros(slot_TR.shape[1], np.float32)
    context_YR = np.concatenate([context_CR[:1], context_CR[1 + first]])
    p_TCY, blank_TC = _moved(tokens, emission, context_YR, slot_TR, ids_TK, log_p_TK, token_TKR, blank_T, blank_R)
    return Lattice(tokens, p_TCY, blank_TC, merge)


@njit(cache=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
def _moved(tokens, emission, context, slot, ids, log_p, token, blank, blank_vector):
    """p_t(y | u) [T, C, Y] and p_t(blank | u) [T, C]: the transition, one slot and context after the other."""
    T, Y = emission.shape
    C, R = context.shape
    K = ids.shape[1]
    out, blanks = np.empty((T, C, Y), np.float32), np.empty((T, C), np.float32)
    gate, moved, scale = np.empty(R, np.float32), np.empty(K, np.float32), np.empty(K, np.int32)
    place = np.empty(K, np.int64)
    for t in range(T):
        rest = np.float32(1.0)
        for k in range(K):
            at = np.searchsorted(tokens, ids[t, k])
            place[k] = at if at < Y and tokens[at] == ids[t, k] else -1
            rest -= np.exp(log_p[t, k])
        rest = max(rest, np.float32(0.0))
        for c in range(C):
            share = np.float32(0.0)
            for r in range(R):
                x = slot[t, r] + context[c, r]
                gate[r] = x * min(max(x + np.float32(3.0), np.float32(0.0)), np.float32(6.0)) * np.float32(1 / 6)
                share += gate[r] * blank_vector[r]
            for k in range(K):
                delta = np.float32(0.0)
                for r in range(R):
                    delta += gate[r] * token[t, k, r]
                moved[k] = log_p[t, k] + delta
            _exp(moved, scale)
            total = rest
            for k in range(K):
                total += moved[k]
            p_blank = np.exp(min(blank[t] + share, np.float32(80.0)))
            inverse = np.float32(1.0) / (total + p_blank)
            blanks[t, c] = p_blank * inverse
            for y in range(Y):
                out[t, c, y] = emission[t, y] * inverse
            for k in range(K):
                if place[k] >= 0:
                    out[t, c, place[k]] = moved[k] * inverse
    return out, blanks


@njit(cache=True, fastmath={"contract"})
def _exp(x, scale):
    """exp in place, to 1e-7 of its value, |log2| up to 126: a polynomial and an exponent, which the compiler can
    write for 8 numbers at once (Cephes' coefficients of 2^f)."""
    for k in range(len(x)):
        power = min(max(x[k] * np.float32(1.4426950408889634), np.float32(-126.0)), np.float32(126.0))
        whole = np.floor(power + np.float32(0.5))
        f = power - whole
        scale[k] = (np.int32(whole) + 127) << 23
        p = np.float32(1.535336188319500e-4) * f + np.float32(1.339887440266574e-3)
        p = p * f + np.float32(9.618437357674640e-3)
        p = p * f + np.float32(5.550332471162809e-2)
        p = p * f + np.float32(2.402264791363012e-1)
        p = p * f + np.float32(6.931472028550421e-1)
        x[k] = p * f + np.float32(1.0)
    powers = scale.view(np.float32)
    for k in range(len(x)):
        x[k] *= powers[k]
