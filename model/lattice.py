"""What a head believes about the next tokens, cut down to the candidates that a draft can use.

Shape suffixes: N anchors, T slots, V vocabulary, X = T * k put forward (the same token by several slots), K a slot's
shortlist, R rank of the transition, Y distinct candidates.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.transition import Mixed, Tables, Transition


class Behind(NamedTuple):
    """A transition, cut down to the candidates of one anchor: what slots emit behind a prefix (transition.py).

    root [R]            state of the empty prefix, B e(root)
    step [Y, R]         B e(y) of the candidates: the state behind gy is step[y] + carry @ hardswish(state behind g)
    carry [R, R]
    slot [T, R]         A s_t
    place [T, K]        which candidate a slot's shortlist holds (-1: none of them)
    log_p, token [T, K], [T, K, R]  its log-probabilities without the transition, and P w_v
    rest [T]            probability of the vocabulary outside of it
    log_blank, blank_R  the blank's log-probability [T] and vector [R]; -inf: no blank
    """

    root: NDArray[np.float32]
    step: NDArray[np.float32]
    carry: NDArray[np.float32]
    slot: NDArray[np.float32]
    place: NDArray[np.int64]
    log_p: NDArray[np.float32]
    token: NDArray[np.float32]
    rest: NDArray[np.float32]
    log_blank: NDArray[np.float32]
    blank_R: NDArray[np.float32]


@dataclass(frozen=True)
class Lattice:
    """Per-slot probabilities over candidate tokens and the blank.

    tokens [Y]       candidate token ids, ascending
    emission [T, Y]  p_t(y); behind: without the transition, over the vocabulary alone
    blank [T]        p_t(blank), not used with `behind`
    merge            True: CTC, equal neighbours collapse. False: slot k writes token k, no blank.
    behind           how the prefix collapsed so far moves them, or None: it does not
    """

    tokens: NDArray[np.int64]
    emission: NDArray[np.float32]
    blank: NDArray[np.float32]
    merge: bool
    behind: Behind | None = None

    @property
    def slots(self) -> int:
        return self.emission.shape[0]


class Moved(NamedTuple):
    """What a transition needs to move the candidates, as tensors of all anchors: see `Behind`. ids: of the shortlists.
    blank: its logit over the vocabulary's lse."""

    root_NR: Tensor
    step_NXR: Tensor
    carry_NRR: Tensor
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
        mixed.root_NR,
        F.embedding(tokens_NX, tables.context_VR),
        transition.carry.weight.expand(N, -1, -1),
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
        return Lattice(tokens, emission, blank, blank_T is not None)
    root_R, step_XR, carry_RR, slot_TR, ids_TK, log_p_TK, token_TKR, log_blank_T, blank_R = moved
    at_TK = np.searchsorted(tokens, ids_TK).clip(max=len(tokens) - 1)
    place_TK = np.where(tokens[at_TK] == ids_TK, at_TK, -1)
    rest_T = (1.0 - np.exp(log_p_TK).sum(axis=1)).clip(min=0.0)
    merge, none_T = log_blank_T is not None, np.zeros(len(slot_TR), np.float32)
    if log_blank_T is None:
        log_blank_T, blank_R = none_T - np.inf, np.zeros_like(root_R)
    parts = root_R, step_XR[first], carry_RR, slot_TR, place_TK, log_p_TK, token_TKR, rest_T, log_blank_T, blank_R
    return Lattice(tokens, emission, none_T, merge, Behind(*parts))
