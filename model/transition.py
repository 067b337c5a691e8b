"""The transition: what a slot emits depends on g, what has been collapsed so far (docs/method.md).

A slot's k likeliest tokens, and the j tokens that most often follow the last one of g in the training data, are moved;
what is outside of this shortlist S_t(g) keeps its logit:

    p_t(v | g) ~ exp(z_t(v) + [v in S_t(g)] delta_t(g, v)),   delta_t(g, v) = <P w_v, hardswish(A s_t + r(g))>
    r(empty) = B e(root),   r(gu) = B e(u) + C hardswish(r(g))

A slot that cannot know which word will have begun has all their endings far down its list; behind a given beginning
they are the few successors that it has.

Along a known prefix g is known, so every recursion of the lattice stays exact. The state r(g) has the rank of the
product, so that drafting carries it from node to node within the search: no network is called for a node.

The normaliser is exact at any vocabulary: what lies outside the shortlist, as one number, plus the shortlist. With
the whole vocabulary as shortlist it is the full transition. hardswish, not gelu, since it costs no exponential.

Shape suffixes: N anchors, T slots, K shortlist, J successors, S contexts (prefixes g), W of them in a slot's window
(`Topology.window`), R rank, V vocabulary, D hidden of the base.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ctcdraft.model.kernels import Moved, Prefixes, carried, moved_shortlist
from ctcdraft.model.kernels.reference import LOG_ZERO, NO_TOKEN
from ctcdraft.model.topology import DIAGONAL, Topology
from ctcdraft.model.vocabulary import DraftVocabulary


class Shortlist(NamedTuple):
    """A slot's likeliest tokens and their logits, largest first [N, T, K]; lse of the whole vocabulary [N, T]; the
    logits of the successors of each prefix's last token in its window [N, T, W, J] (empty without a transition)."""

    index_NTK: Tensor
    logits_NTK: Tensor
    lse_NT: Tensor
    successor_NTWJ: Tensor


class Tables(NamedTuple):
    """Of every token B e(u) [V, R], P w_v [V, R] and the successors (-1: none) [V, J]; C transposed, the blank's
    vector. On the host, for drafting. V: draft tokens, of B e(u) and successors also the number of all others."""

    context_VR: NDArray[np.float32]
    token_VR: NDArray[np.float32]
    successor_VJ: NDArray[np.int32]
    carry_RR: NDArray[np.float32]
    blank_R: NDArray[np.float32]


class Known(NamedTuple):
    """A transition and what it needs to follow known labels: A s_t [N, T, R]; what the state is told behind the root
    and behind each label, B e(u) [S, N, R]; P w_v [V, R]; successors of root and labels [N, S, J]; tokens of a
    shortlist."""

    transition: "Transition"
    slot_NTR: Tensor
    told_SNR: Tensor
    token_VR: Tensor
    successor_NSJ: Tensor
    shortlist: int

    def rows(self, kept_X: Tensor) -> "Known":
        """Of these anchors alone."""
        slot_NTR, successor_NSJ = self.slot_NTR[kept_X], self.successor_NSJ[kept_X]
        return self._replace(slot_NTR=slot_NTR, told_SNR=self.told_SNR[:, kept_X], successor_NSJ=successor_NSJ)

    def first(self, labels: int) -> "Known":
        """Along so many labels only, and of as many slots."""
        told_SNR, successor_NSJ = self.told_SNR[: labels + 1], self.successor_NSJ[:, : labels + 1]
        return self._replace(slot_NTR=self.slot_NTR[:, :labels], told_SNR=told_SNR, successor_NSJ=successor_NSJ)


class Emissions(NamedTuple):
    """Log-probabilities along known labels, as `prefix_lattice` takes them; covered [N, T]: does slot t's shortlist
    hold label t + 1?"""

    emit_NTU: Tensor
    stay_NTU: Tensor
    blank_NTS: Tensor
    covered_NT: Tensor


class Transition(nn.Module):
    """A, B, C, P and the blank's vector. It begins as none: C, P and the blank's vector start at 0.

    Embeddings and rows of the LM head come in at the scale of 1, since bases differ in theirs by orders of magnitude.
    successor_VJ: what often follows each token, from data (`learn_successors`); without rows: nothing does.
    """

    successor_VJ: Tensor

    def __init__(self, slot_width: int, hidden_size: int, rank: int, successors: int, *, with_blank: bool) -> None:
        super().__init__()
        table_VJ = torch.zeros(0, successors, dtype=torch.int32)
        self.register_buffer("successor_VJ", table_VJ, persistent=successors > 0)
        self.from_slot = nn.Linear(slot_width, rank)
        self.from_context = nn.Linear(hidden_size, rank, bias=False)
        self.to_token = nn.Linear(hidden_size, rank, bias=False)
        self.carry = nn.Linear(rank, rank, bias=False)
        nn.init.zeros_(self.to_token.weight)
        nn.init.zeros_(self.carry.weight)
        self.blank_R = nn.Parameter(torch.zeros(rank)) if with_blank else None

    def learn_successors(self, table_VJ: Tensor) -> None:
        """Take the table [V, J] of token ids, likeliest first, -1 where there are fewer.

        Raises ValueError where it is none.
        """
        V, J = len(table_VJ), self.successor_VJ.shape[1]
        if table_VJ.dim() != 2 or table_VJ.shape[1] != J or not bool(((table_VJ >= -1) & (table_VJ < V)).all()):
            raise ValueError(f"successors must be a table of [vocabulary, {J}] token ids (-1: none)")
        self.successor_VJ = table_VJ.to(self.successor_VJ.device, torch.int32)

    def check(self, vocabulary: DraftVocabulary) -> None:
        """Raises ValueError where its table of successors is none of these tokens."""
        table_VJ = self.successor_VJ
        if len(table_VJ) not in (0, vocabulary.numbers) or bool((table_VJ >= len(vocabulary)).any()):
            raise ValueError(f"its table of successors is not one of {len(vocabulary)} tokens")

    def successors(self, tokens_X: Tensor) -> Tensor:
        """What often follows each token, [..., J]; -1: nothing."""
        if not len(self.successor_VJ):
            return tokens_X.new_full((*tokens_X.shape, self.successor_VJ.shape[1]), -1)
        return F.embedding(tokens_X, self.successor_VJ).long()

    def known(
        self, slot_NTR: Tensor, labels_NU: Tensor, root_N: Tensor, vocabulary: DraftVocabulary, shortlist: int
    ) -> "Known":
        """What it needs to follow labels [N, U] behind their roots [N], both as numbers; slot: A s_t."""
        token_NS = torch.cat([root_N.unsqueeze(1), labels_NU], dim=1)
        once_K, place_SN = token_NS.T.unique(return_inverse=True)  # anchors share most of their labels
        context_KR = self.contexts(vocabulary.embed(once_K).detach().to(slot_NTR.dtype))
        told_SNR = F.embedding(place_SN, context_KR)
        return Known(self, slot_NTR, told_SNR, self.tokens(vocabulary), self.successors(token_NS), shortlist)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if (table := state_dict.get(f"{prefix}successor_VJ")) is not None:
            self.learn_successors(table)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def contexts(self, embedded_XD: Tensor) -> Tensor:
        """B e(u), [..., R]."""
        return self.from_context(_normed(embedded_XD))

    def tokens(self, vocabulary: DraftVocabulary) -> Tensor:
        """P w_v of every draft token, [V, R]."""
        weight_VD = vocabulary.lm_weight.to(self.to_token.weight.dtype)
        return self.to_token(weight_VD) * vocabulary.lm_scale.to(weight_VD.dtype).unsqueeze(1)

    @torch.no_grad()
    def tables(self, vocabulary: DraftVocabulary) -> Tables:
        """For the whole draft vocabulary, for drafting."""
        every_V = torch.arange(vocabulary.numbers, device=vocabulary.lm_weight.device)
        blank_R = self.carry.weight.new_zeros(len(self.carry.weight)) if self.blank_R is None else self.blank_R
        return Tables(
            _on_host(self.contexts(vocabulary.embed(every_V).to(self.to_token.weight.dtype))),
            _on_host(self.tokens(vocabulary)),
            self.successors(every_V).int().cpu().numpy(),
            _on_host(self.carry.weight.T.contiguous()),
            _on_host(blank_R),
        )

    def forward(
        self,
        known: Known,
        shortlist: Shortlist,
        labels_NU: Tensor,
        slots_N: Tensor,
        topology: Topology,
        implementation: str,
    ) -> tuple[Moved, Tensor]:
        """Every slot behind the prefixes of its window, in the precision of the logits; and [N, T]: does the shortlist
        of slot t hold label t + 1?

        Behind more labels than there are slots before nothing is moved. Slots past slots_N are not looked at.
        """
        slot_NTR, dtype = known.slot_NTR, shortlist.logits_NTK.dtype
        (N, T, R), U = slot_NTR.shape, labels_NU.shape[1]
        blank_R = slot_NTR.new_zeros(R) if self.blank_R is None else self.blank_R
        window_TW = topology.window(T, U).to(labels_NU.device)
        prefixes = Prefixes(
            slot_NTR.to(dtype),
            carried(known.told_SNR, self.carry.weight, implementation).to(dtype),
            known.token_VR.to(dtype),
            blank_R.to(dtype),
            window_TW,
            known.successor_NSJ,
            shortlist.index_NTK,
            shortlist.successor_NTWJ,
            shortlist.logits_NTK,
            F.pad(labels_NU, (0, 1), value=NO_TOKEN),
            F.pad(labels_NU, (1, 0), value=NO_TOKEN) if topology.merge else labels_NU.new_full((N, U + 1), NO_TOKEN),
            slots_N,
        )
        moved = moved_shortlist(prefixes, implementation)
        straight_TW = window_TW == torch.arange(T, device=window_TW.device).unsqueeze(1)
        return moved, (moved.inside_NTW & straight_TW).any(dim=2)


def along_labels(
    known: Known,
    shortlist: Shortlist,
    logits_NTW: Tensor,
    labels_NU: Tensor,
    slots_N: Tensor,
    blank_NT: Tensor,
    topology: Topology,
    implementation: str = "auto",
) -> Emissions:
    """Every slot behind every prefix of the labels that it can stand behind; logits: of the label that comes next."""
    moved, covered_NT = known.transition(known, shortlist, labels_NU, slots_N, topology, implementation)
    return normalised(
        logits_NTW + moved.emit_NTW,
        again(logits_NTW) + moved.stay_NTW,
        blank_NT.unsqueeze(2) + moved.blank_NTW,
        normaliser(moved, shortlist.lse_NT),
        labels_NU.shape[1],
        topology,
        covered_NT,
    )


def again(logits_NTW: Tensor) -> Tensor:
    """The logits of the label that came last, from those of the one that comes next; merging has no band, so that every
    window begins with the empty prefix."""
    return F.pad(logits_NTW[:, :, :-1], (1, 0))


def normalised(
    emit_NTW: Tensor,
    stay_NTW: Tensor,
    blank_NTW: Tensor,
    lse_NTW: Tensor,
    labels: int,
    topology: Topology,
    covered_NT: Tensor,
) -> Emissions:
    """Log-probabilities from logits and their lse over the vocabulary without the blank, which have one column where
    they are the same behind all prefixes; LOG_ZERO for what no alignment of the topology holds.

    Behind s tokens and before slot t (from 0), t - s slots have written no new one. Behind as many as the band is wide
    the next has to: the blank is left out of its normaliser, and no alignment goes on from there without a token.
    """
    T = emit_NTW.shape[1]
    window_TW = topology.window(T, labels).to(emit_NTW.device)
    if topology.band is not None:
        spent_TW = torch.arange(T, device=window_TW.device).unsqueeze(1) - window_TW
        blank_NTW = blank_NTW.masked_fill(spent_TW >= topology.band, LOG_ZERO)
    total_NTW = torch.logaddexp(lse_NTW, blank_NTW).expand_as(emit_NTW)

    def behind_every(values_NTW: Tensor) -> Tensor:
        nothing_NTS = values_NTW.new_full((*values_NTW.shape[:2], labels + 1), LOG_ZERO)
        return nothing_NTS.scatter(2, window_TW.expand_as(values_NTW), values_NTW)

    emit_NTU = behind_every(emit_NTW - total_NTW)[:, :, :-1]
    stay_NTU = behind_every(stay_NTW - total_NTW)[:, :, 1:] if topology.merge else torch.full_like(emit_NTU, LOG_ZERO)
    return Emissions(emit_NTU, stay_NTU, behind_every(blank_NTW - total_NTW), covered_NT)


def slot_by_slot(
    known: Known,
    shortlist: Shortlist,
    logits_NT1: Tensor,
    labels_NT: Tensor,
    slots_N: Tensor,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Where slot k writes label k: log p_k(y_k | y_1..y_{k-1}) [N, T], and is y_k in its shortlist?"""
    moved, covered_NT = known.transition(known, shortlist, labels_NT, slots_N, DIAGONAL, implementation)
    log_p_NT1 = logits_NT1 + moved.emit_NTW - normaliser(moved, shortlist.lse_NT)
    return log_p_NT1.squeeze(2), covered_NT


def normaliser(moved: Moved, lse_NT: Tensor) -> Tensor:
    """Log of all tokens of a slot in each context: rest of the vocabulary, moved shortlist."""
    least = torch.finfo(lse_NT.dtype).eps  # a shortlist that holds all there is leaves nothing
    share_NTW = (moved.still_NTW - lse_NT.unsqueeze(2)).clamp(max=-least)
    rest_NTW = lse_NT.unsqueeze(2) + torch.log(-torch.expm1(share_NTW))
    return torch.logaddexp(rest_NTW, moved.moved_NTW)


def _normed(embedded_XD: Tensor) -> Tensor:
    return F.rms_norm(embedded_XD, embedded_XD.shape[-1:])


def _on_host(part: Tensor) -> NDArray[np.float32]:
    return part.detach().float().cpu().numpy()
