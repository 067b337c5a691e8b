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

from ctcdraft.model.transition import Mixed, Shortlist, Tables, Transition


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
    """What a transition makes of the candidates, C = X + 1 contexts: none yet, or the candidate collapsed last.

    scale [N, T, C]: factor on the emissions outside of a slot's shortlist; blank [N, T, C] (None: no blank);
    ids [N, T, K] of the shortlist's tokens, emission [N, T, C, K].
    """

    scale_NTC: Tensor
    blank_NTC: Tensor | None
    ids_NTK: Tensor
    emission_NTCK: Tensor


class Candidates(NamedTuple):
    """Each slot's top-k tokens, one slot after the other: ids [N, X], their probability in every slot [N, T, X] and the
    blank's [N, T] (None: no blank), normalised over the whole vocabulary; moved: by the last token, or None.
    Fixed shapes, and no wait for a device."""

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

    def unpacked(self, packed: NDArray[np.int32]) -> list[Lattice]:
        """The lattices of all anchors, from what `packed` of candidates of these shapes held."""
        return [self._lattice(row) for row in packed]

    def lattices(self) -> list[Lattice]:
        """The lattices of all anchors, on the host."""
        return self.unpacked(self.packed().cpu().numpy())

    def _lattice(self, packed: NDArray[np.int32]) -> Lattice:
        arrays: list[NDArray[Any] | None] = []
        for part in self._parts:
            if part is None:
                arrays.append(None)
                continue
            here, packed = packed[: part[0].numel()], packed[part[0].numel() :]
            array = here.view(np.float32) if part.is_floating_point() else here.astype(np.int64)
            arrays.append(array.reshape(part.shape[1:]))
        return lattice_of(*arrays)  # type: ignore[arg-type]


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
    found = Shortlist(top.indices, top.values, logits_NTV.logsumexp(dim=2))
    tokens_NX = top.indices[:, :, :top_k].flatten(1)
    context_NCR = torch.cat([mixed.root_NR.unsqueeze(1), F.embedding(tokens_NX, tables.context_VR)], dim=1)
    blank_NT = None if blank_NT is None else blank_NT.float()
    behind = transition.behind(mixed, context_NCR, tables.token_VR, found, blank_NT)
    total_NTC = behind.total_NTC
    moved = Moved(
        (found.lse_NT.unsqueeze(2) - total_NTC).exp(),
        None if behind.blank_NTC is None else (behind.blank_NTC - total_NTC).exp(),
        top.indices,
        (top.values.unsqueeze(2) + behind.delta_NTCK - total_NTC.unsqueeze(3)).exp(),
    )
    return Candidates(tokens_NX, (_columns(logits_NTV, tokens_NX) - found.lse_NT.unsqueeze(2)).exp(), None, moved)


def _columns(logits_NTV: Tensor, tokens_NX: Tensor) -> Tensor:
    return logits_NTV.gather(2, tokens_NX.unsqueeze(1).expand(-1, logits_NTV.shape[1], -1))


def lattice_of(
    tokens_X: NDArray[np.int64],
    emission_TX: NDArray[np.float32],
    blank_T: NDArray[np.float32] | None,
    scale_TC: NDArray[np.float32] | None = None,
    blank_TC: NDArray[np.float32] | None = None,
    ids_TK: NDArray[np.int64] | None = None,
    moved_TCK: NDArray[np.float32] | None = None,
) -> Lattice:
    """The lattice of one anchor's candidates, each token once; the last four are those of `Moved`."""
    tokens, first = np.unique(tokens_X, return_index=True)
    emission = np.ascontiguousarray(emission_TX[:, first])
    if scale_TC is None:
        blank = np.zeros(len(emission), np.float32) if blank_T is None else blank_T
        return Lattice(tokens, emission[:, None], blank[:, None], blank_T is not None)
    contexts = np.concatenate([[0], 1 + first])
    blanks = np.zeros_like(scale_TC) if blank_TC is None else blank_TC
    assert ids_TK is not None
    assert moved_TCK is not None
    spread = _spread(tokens, emission, scale_TC, contexts, ids_TK, moved_TCK)
    return Lattice(tokens, spread, blanks[:, contexts], blank_TC is not None)


@njit(cache=True)
def _spread(tokens, emission, scale, contexts, ids, moved):
    """emission[t, c] * scale[t, u], and where c is in the slot's shortlist what it was moved to."""
    T, C = emission.shape
    out = np.empty((T, len(contexts), C), np.float32)
    column = np.empty(ids.shape[1], np.int64)
    for t in range(T):
        for j in range(ids.shape[1]):
            c = np.searchsorted(tokens, ids[t, j])
            column[j] = c if c < C and tokens[c] == ids[t, j] else -1
        for row in range(len(contexts)):
            u = contexts[row]
            for c in range(C):
                out[t, row, c] = emission[t, c] * scale[t, u]
            for j in range(ids.shape[1]):
                if column[j] >= 0:
                    out[t, row, column[j]] = moved[t, u, j]
    return out
