"""What a head believes about the next tokens, cut down to the candidates that a draft can use.

Shape suffixes: N anchors, T slots, V vocabulary, Y candidates, R rank of the transition.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.best_first import LOG_NOTHING
from ctcdraft.model.topology import Topology
from ctcdraft.model.transition import Tables


class Moves(NamedTuple):
    """How a transition moves what slots emit, by the token that was collapsed last (transition.py).

    slot [T, R]      A x_t
    root [R]         B e(root)
    context [Y, R]   B e(u) of each candidate
    key [R, Y]       P^T w_v of each candidate; blank_key [R]: the blank's vector
    log_rest [T]     the log-probability of all other tokens together, which are not moved
    """

    slot: NDArray[np.float32]
    root: NDArray[np.float32]
    context: NDArray[np.float32]
    key: NDArray[np.float32]
    blank_key: NDArray[np.float32]
    log_rest: NDArray[np.float32]


@dataclass(frozen=True)
class Lattice:
    """Per-slot probabilities over candidate tokens and the blank.

    tokens [Y]       candidate token ids, ascending
    log_p [T, Y]     log p_t(y) over the vocabulary, the blank left out; without the transition
    log_blank [T]    the blank's logit on the same scale; LOG_NOTHING: no blank
    topology         which alignments count
    moves            how the token collapsed last moves them, or None: it does not
    ids [X]          the base's ids of the draft tokens that candidates are numbers of (`DraftVocabulary`), ascending;
                     None: numbers are the base's ids
    """

    tokens: NDArray[np.int64]
    log_p: NDArray[np.float32]
    log_blank: NDArray[np.float32]
    topology: Topology
    moves: Moves | None = None
    ids: NDArray[np.int64] | None = None

    @property
    def slots(self) -> int:
        return len(self.log_p)

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
    moved: tuple[Tensor, Tensor, Tables] | None = None,
) -> Candidates:
    """The top_k tokens that are likeliest in any slot, and their probabilities in every slot over the whole vocabulary.

    blank None is a head whose slot k predicts token k. ids: see `Lattice`. moved: of a transition A x_t [N, T, R], the
    roots [N] as numbers of the vocabulary, and its tables.
    """
    log_p_NTV = logits_NTV.float().log_softmax(dim=2)
    lse_NT = logits_NTV[:, :, 0].float() - log_p_NTV[:, :, 0]  # the same for every token
    log_blank_NT = None if blank_NT is None else blank_NT.float() - lse_NT
    peak_NV = log_p_NTV.amax(dim=1)
    tokens_NY = peak_NV.topk(min(top_k, peak_NV.shape[1]), dim=1).indices.sort(dim=1).values
    log_p_NTY = log_p_NTV.gather(2, tokens_NY.unsqueeze(1).expand(-1, log_p_NTV.shape[1], -1))
    if moved is None:
        return Candidates((tokens_NY, log_p_NTY, log_blank_NT), partial(_lattice, topology, ids, None))
    slot_NTR, root_N, tables = moved
    index_NTY = tokens_NY.unsqueeze(1).expand_as(log_p_NTY)
    log_rest_NT = log_p_NTV.exp().scatter_(2, index_NTY, 0.0).sum(dim=2).log()  # 1 minus the others would cancel
    parts = tokens_NY, log_p_NTY, log_blank_NT, slot_NTR, root_N, log_rest_NT
    return Candidates(parts, partial(_lattice, topology, ids, tables))


def _lattice(
    topology: Topology,
    ids: NDArray[np.int64] | None,
    tables: Tables | None,
    tokens: Any,
    log_p_TY: Any,
    log_blank_T: Any,
    *moved: Any,
) -> Lattice:
    log_blank_T = np.full(len(log_p_TY), LOG_NOTHING) if log_blank_T is None else np.maximum(log_blank_T, LOG_NOTHING)
    moves = None
    if tables is not None:
        slot_TR, root, log_rest_T = moved
        moves = Moves(
            np.ascontiguousarray(slot_TR),
            tables.context_XR[int(root)],
            tables.context_XR[tokens],
            np.ascontiguousarray(tables.token_XR[tokens].T),
            tables.blank_R,
            np.maximum(log_rest_T, LOG_NOTHING),
        )
    return Lattice(tokens, np.ascontiguousarray(log_p_TY), log_blank_T, topology, moves, ids)
