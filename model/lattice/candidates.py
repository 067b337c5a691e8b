"""What a head believes about the next tokens, cut down to the candidates that a draft can use.

Shape suffixes: N anchors, T slots, V vocabulary, Y candidates, R rank of the transition.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .best_first import LOG_NOTHING
from .topology import Topology

NOTHING = float(LOG_NOTHING)


class Tables(NamedTuple):
    """Of every token B e(u) [X + 1, R], the last row for all that are no draft tokens, and P^T w_v [X, R]; and the
    blank's vector [R]. On the host, for drafting."""

    context_XR: NDArray[np.float32]
    token_XR: NDArray[np.float32]
    blank_R: NDArray[np.float32]


class Lattice(NamedTuple):
    """What slots emit over candidate tokens and the blank, behind any of these tokens: on the host, to be searched.

    tokens [Y]       candidates, as the base's ids, ascending
    log_p [T, Y]     log p_t(y) over the vocabulary, the blank left out; without the transition
    log_blank [T]    the blank's log-odds against all tokens together; LOG_NOTHING: no blank
    log_rest [T]     the log-probability of all other tokens together, which a transition does not move
    merge, band      which alignments count, see `Topology`; the band as a number

    and how the token collapsed last moves them (transition.py; without a transition R = 0):

    slot [T, R]      A x_t
    root [R]         B e(root)
    context [Y, R]   B e(u) of each candidate
    key [R, Y]       P^T w_v of each candidate; blank_key [R]: the blank's vector
    """

    tokens: NDArray[np.int64]
    log_p: NDArray[np.float32]
    log_blank: NDArray[np.float32]
    log_rest: NDArray[np.float32]
    merge: bool
    band: int
    slot: NDArray[np.float32]
    root: NDArray[np.float32]
    context: NDArray[np.float32]
    key: NDArray[np.float32]
    blank_key: NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """What the slots of all anchors put forward, on the device: fixed shapes, and no wait for it.

    parts: tokens [N, Y], log_p [N, T, Y], log_blank and log_rest [N, T], and of the transition, whose tables are given,
    A x_t [N, T, R] and the root [N, 1]. Tokens are numbers of draft tokens (`DraftVocabulary`). ids [X]:
    the base's ids of these, ascending; None: the same numbers.
    """

    parts: tuple[Tensor, ...]
    topology: Topology
    ids: NDArray[np.int64] | None
    tables: Tables

    def lattices(self) -> list[Lattice]:
        """The lattices of all anchors, on the host."""
        return self.unpacked(self.packed().cpu().numpy())

    def packed(self) -> Tensor:
        """All of it as int32 [N, numbers], for one copy to the host."""
        bits = [part.view(torch.int32) if part.is_floating_point() else part.int() for part in self.parts]
        return torch.cat([part.flatten(1) for part in bits], dim=1).detach()

    def unpacked(self, packed_NZ: NDArray[np.int32]) -> list[Lattice]:
        """The lattices of all anchors, from what `packed` of candidates of these shapes held."""
        ends = np.cumsum([part[0].numel() for part in self.parts])[:-1]
        lattices = []
        for packed_Z in packed_NZ:
            tokens, log_p, log_blank, log_rest, slot, root = np.split(packed_Z, ends)
            number_Y, T = tokens.astype(np.int64), len(log_blank)
            lattice = Lattice(
                tokens=number_Y if self.ids is None else self.ids[number_Y],
                log_p=log_p.view(np.float32).reshape(T, -1),
                log_blank=log_blank.view(np.float32),
                log_rest=log_rest.view(np.float32),
                merge=self.topology.merge,
                band=self.topology.width(T),
                slot=slot.view(np.float32).reshape(T, -1),
                root=self.tables.context_XR[int(root[0])],
                context=self.tables.context_XR[number_Y],
                key=np.ascontiguousarray(self.tables.token_XR[number_Y].T),
                blank_key=self.tables.blank_R,
            )
            lattices.append(lattice)
        return lattices


def candidates_of(
    logits_NTV: Tensor,
    blank_NT: Tensor | None,
    top_k: int,
    topology: Topology,
    *,
    ids: NDArray[np.int64] | None = None,
    moved: tuple[Tensor, Tensor, Tables] | None = None,
    noise_NTV: Tensor | None = None,
) -> Candidates:
    """The top_k tokens that are likeliest in any slot, and their probabilities in every slot over the whole vocabulary.

    blank: its log-odds; None: of a head whose slot k predicts token k. ids: see `Candidates`. moved: of a transition
    A x_t [N, T, R], the roots [N] as numbers of the vocabulary, and its tables. noise: added where tokens are chosen,
    and nowhere else.
    """
    log_p_NTV = logits_NTV.float().log_softmax(dim=2)
    log_blank_NT = log_p_NTV.new_full(log_p_NTV.shape[:2], NOTHING) if blank_NT is None else blank_NT.float()
    peak_NV = (log_p_NTV if noise_NTV is None else log_p_NTV + noise_NTV).amax(dim=1)
    tokens_NY = peak_NV.topk(min(top_k, peak_NV.shape[1]), dim=1).indices.sort(dim=1).values
    index_NTY = tokens_NY.unsqueeze(1).expand(-1, log_p_NTV.shape[1], -1)
    log_rest_NT = log_p_NTV.exp().scatter_(2, index_NTY, 0.0).sum(dim=2).log()  # 1 minus the others would cancel
    if moved is None:
        N, T, V = log_p_NTV.shape
        unmoved = np.zeros((V + 1, 0), np.float32)
        moved = log_p_NTV.new_zeros(N, T, 0), tokens_NY.new_zeros(N), Tables(unmoved, unmoved, unmoved[0])
    slot_NTR, root_N, tables = moved
    parts = (
        tokens_NY,
        log_p_NTV.gather(2, index_NTY),
        log_blank_NT.clamp(min=NOTHING),
        log_rest_NT.clamp(min=NOTHING),
        slot_NTR.float(),
        root_N.unsqueeze(1),
    )
    return Candidates(parts, topology, ids, tables)
