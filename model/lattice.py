"""What a head believes about the next tokens, cut down to the candidates that a draft can use.

Shape suffixes: N anchors, T slots, V vocabulary, X = T * k put forward (the same token by several slots), K a slot's
shortlist, R rank of the transition, Y distinct candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.kernels import largest
from ctcdraft.model.topology import Topology
from ctcdraft.model.transition import Tables


class Behind(NamedTuple):
    """A transition at one anchor: what slots emit behind a prefix (transition.py).

    root_token          the token before the first slot
    slot [T, R]         A s_t
    place [T, K]        which candidate a slot's shortlist holds; held [T, Y]: the same, for each candidate
    log_p [T, K]        the shortlist's log-probabilities without the transition; every [T, V]: of all tokens
    log_blank [T]       the blank's log-probability; -inf: no blank
    tables              B e(u), P w_v, successors of all tokens; C; the blank's vector
    """

    root_token: int
    slot: NDArray[np.float32]
    place: NDArray[np.int64]
    held: NDArray[np.bool_]
    log_p: NDArray[np.float32]
    every: NDArray[np.float32]
    log_blank: NDArray[np.float32]
    tables: Tables


@dataclass(frozen=True)
class Lattice:
    """Per-slot probabilities over candidate tokens and the blank.

    tokens [Y]       candidate token ids, ascending
    emission [T, Y]  p_t(y) over the vocabulary, the blank left out; behind: without the transition
    blank [T]        p_t(blank), not used with `behind`
    topology         which alignments count
    behind           how the prefix collapsed so far moves them, or None: it does not
    ids [X]          the base's ids of the draft tokens that candidates are numbers of (`DraftVocabulary`), ascending;
                     None: numbers are the base's ids
    """

    tokens: NDArray[np.int64]
    emission: NDArray[np.float32]
    blank: NDArray[np.float32]
    topology: Topology
    behind: Behind | None = None
    ids: NDArray[np.int64] | None = None

    @property
    def slots(self) -> int:
        return self.emission.shape[0]

    def ids_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The base's ids of draft tokens."""
        return numbers if self.ids is None else self.ids[numbers]

    def numbers_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The draft tokens among the base's ids."""
        if self.ids is None:
            return ids
        numbers = np.searchsorted(self.ids, ids)
        return numbers[self.ids.take(numbers, mode="clip") == ids]


@dataclass(frozen=True)
class Candidates:
    """What the slots of all anchors put forward, on the device: fixed shapes, and no wait for it.

    parts: tensors of all anchors [N, ...] (None: there is none); lattice: what one anchor's make on the host.
    """

    parts: tuple[Tensor | None, ...]
    lattice: Callable[..., Lattice]

    def lattices(self) -> list[Lattice]:
        """The lattices of all anchors, on the host."""
        if any(part.is_cuda for part in self.parts if part is not None):
            return self.unpacked(self.packed().cpu().numpy())
        wide = (None if part is None else part.float() if part.is_floating_point() else part for part in self.parts)
        return self._each([None if part is None else part.detach().numpy() for part in wide])

    def packed(self) -> Tensor:
        """All of it as int32 [N, numbers], for one copy to the host."""
        there = [part for part in self.parts if part is not None]
        bits = [part.float().view(torch.int32) if part.is_floating_point() else part.int() for part in there]
        return torch.cat([part.flatten(1) if part.dim() > 1 else part.unsqueeze(1) for part in bits], dim=1)

    def unpacked(self, packed_NZ: NDArray[np.int32]) -> list[Lattice]:
        """The lattices of all anchors, from what `packed` of candidates of these shapes held."""
        arrays: list[NDArray[Any] | None] = []
        for part in self.parts:
            if part is None:
                arrays.append(None)
                continue
            size = part[0].numel()
            here, packed_NZ = np.ascontiguousarray(packed_NZ[:, :size]), packed_NZ[:, size:]
            array = here.view(np.float32) if part.is_floating_point() else here.astype(np.int64)
            arrays.append(array.reshape(part.shape))
        return self._each(arrays)

    def _each(self, arrays: list[NDArray[Any] | None]) -> list[Lattice]:
        first = arrays[0]
        assert first is not None
        return [self.lattice(*(None if a is None else a[n] for a in arrays)) for n in range(len(first))]


def candidates_of(
    logits_NTV: Tensor,
    blank_NT: Tensor | None,
    top_k: int,
    topology: Topology,
    ids: NDArray[np.int64] | None = None,
) -> Candidates:
    """Each slot's top-k tokens with their probabilities over the whole vocabulary, from the logits of every slot.

    blank None is a head whose slot k predicts token k. ids: see `Lattice`.
    """
    logits_NTV = logits_NTV.float()
    lse_NT = logits_NTV.logsumexp(dim=2)
    if blank_NT is not None:
        blank_NT = torch.sigmoid(blank_NT.float() - lse_NT)
    N, _, V = logits_NTV.shape
    tokens_NX = largest(logits_NTV.flatten(0, 1), min(top_k, V)).view(N, -1)
    columns_NTX = logits_NTV.gather(2, tokens_NX.unsqueeze(1).expand(-1, logits_NTV.shape[1], -1))
    return Candidates(
        (tokens_NX, (columns_NTX - lse_NT.unsqueeze(2)).exp(), blank_NT), partial(_plain_lattice, topology, ids)
    )


def movable_candidates_of(
    logits_NTV: Tensor,
    blank_NT: Tensor | None,
    slot_NTR: Tensor,
    root_N: Tensor,
    tables: Tables,
    shortlist: int,
    topology: Topology,
    ids: NDArray[np.int64] | None = None,
) -> Candidates:
    """The same where a transition moves each slot's `shortlist` likeliest tokens, which are all put forward.

    slot: A s_t of the transition. ids: see `Lattice`; roots are numbers too.
    """
    logits_NTV = logits_NTV.float()
    every_NTV = logits_NTV.log_softmax(dim=2)
    tokens_NTK = largest(every_NTV.flatten(0, 1), shortlist).view(*every_NTV.shape[:2], -1)
    lse_NT = logits_NTV[:, :, 0] - every_NTV[:, :, 0]  # the same for every token
    log_blank_NT = None if blank_NT is None else blank_NT.float() - lse_NT
    parts = root_N, slot_NTR, tokens_NTK, every_NTV, log_blank_NT
    return Candidates(parts, partial(_moved_lattice, tables, topology, ids))


def _plain_lattice(topology: Topology, ids: Any, tokens_X: Any, emission_TX: Any, blank_T: Any) -> Lattice:
    """Each candidate once."""
    tokens, first = np.unique(tokens_X, return_index=True)
    emission = np.ascontiguousarray(emission_TX[:, first])
    blank = np.zeros(len(emission), np.float32) if blank_T is None else blank_T
    return Lattice(tokens, emission, blank, topology, ids=ids)


def _moved_lattice(
    tables: Tables,
    topology: Topology,
    ids: Any,
    root_token: Any,
    slot_TR: Any,
    tokens_TK: Any,
    every_TV: Any,
    log_blank_T: Any,
) -> Lattice:
    tokens, place_TK, held_TY, log_p_TK, log_p_TY = _listed(tokens_TK, every_TV)
    none_T = np.zeros(len(tokens_TK), np.float32)
    log_blank = none_T - np.inf if log_blank_T is None else log_blank_T
    parts = int(root_token), slot_TR, place_TK, held_TY, log_p_TK, every_TV, log_blank, tables
    return Lattice(tokens, np.exp(log_p_TY), none_T, topology, Behind(*parts), ids)


@njit(cache=True)
def _listed(tokens_TK: NDArray[np.int64], every_TV: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
    """The shortlists' tokens, each once; place, held and log_p of a `Behind`; log-probabilities of the tokens."""
    (T, K), tokens = tokens_TK.shape, np.unique(tokens_TK)
    place, held = np.empty((T, K), np.int64), np.zeros((T, len(tokens)), np.bool_)
    log_p, log_every = np.empty((T, K), np.float32), np.empty((T, len(tokens)), np.float32)
    for t in range(T):
        for y in range(len(tokens)):
            log_every[t, y] = every_TV[t, tokens[y]]
        for k in range(K):
            y = np.searchsorted(tokens, tokens_TK[t, k])
            place[t, k], held[t, y], log_p[t, k] = y, True, log_every[t, y]
    return tokens, place, held, log_p, log_every
