"""The transition: what a slot emits depends on g, what has been collapsed so far (docs/method.md).

A slot's shortlist S_t is its k likeliest tokens; they alone are moved, and what is outside keeps its logit:

    p_t(v | g) ~ exp(z_t(v) + [v in S_t] delta_t(g, v)),   delta_t(g, v) = <P w_v, hardswish(A s_t + r(g))>
    r(empty) = B e(root),   r(gu) = B e(u) + C hardswish(r(g))

Along a known prefix g is known, so every recursion of the lattice stays exact. The state r(g) has the rank of the
product, so that drafting carries it from node to node within the search: no network is called for a node.

The normaliser is exact at any vocabulary: what lies outside the shortlist, as one number, plus the shortlist. With
the whole vocabulary as shortlist it is the full transition. hardswish, not gelu, since it costs no exponential.

Shape suffixes: N anchors, T slots, K shortlist, C contexts (prefixes g), R rank, V vocabulary, D hidden of the base.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.model.base import Base
from ctcdraft.model.kernels import Prefixes, moved_shortlist


class Shortlist(NamedTuple):
    """A slot's likeliest tokens and their logits, largest first [N, T, K]; lse of the whole vocabulary [N, T]."""

    index_NTK: Tensor
    logits_NTK: Tensor
    lse_NT: Tensor


class Mixed(NamedTuple):
    """What the transition needs of an anchor: A s_t of its slots [N, T, R] and B e(root) [N, R]."""

    slot_NTR: Tensor
    root_NR: Tensor


class Tables(NamedTuple):
    """B e(u) and P w_v of every token [V, R]."""

    context_VR: Tensor
    token_VR: Tensor


class Known(NamedTuple):
    """A transition and what it needs to follow known labels: B e(y) [N, U, R], P w_v [V, R], tokens of a shortlist."""

    transition: "Transition"
    mixed: Mixed
    label_NUR: Tensor
    token_VR: Tensor
    shortlist: int

    def rows(self, kept_X: Tensor) -> "Known":
        """Of these anchors alone."""
        mixed = Mixed(self.mixed.slot_NTR[kept_X], self.mixed.root_NR[kept_X])
        return self._replace(mixed=mixed, label_NUR=self.label_NUR[kept_X])

    def masked(self, valid_NT: Tensor) -> "Known":
        """Without what the other slots hold, NaN included; of as many slots as `valid` has."""
        slot_NTR = self.mixed.slot_NTR[:, : valid_NT.shape[1]].masked_fill(~valid_NT.unsqueeze(2), 0.0)
        return self._replace(mixed=self.mixed._replace(slot_NTR=slot_NTR))


class Emissions(NamedTuple):
    """Log-probabilities along known labels, as `prefix_lattice` takes them; coverage [T]: how often slot t's shortlist
    holds label t + 1."""

    emit_NTU: Tensor
    stay_NTU: Tensor
    blank_NTS: Tensor
    coverage_T: Tensor


class Transition(nn.Module):
    """A, B, C, P, and the blank's vector. It begins as none: C, P and the blank's vector start at 0.

    Embeddings and rows of the LM head come in at the scale of 1, since bases differ in theirs by orders of magnitude.
    """

    def __init__(self, slot_width: int, hidden_size: int, rank: int, *, with_blank: bool) -> None:
        super().__init__()
        self.from_slot = nn.Linear(slot_width, rank)
        self.from_context = nn.Linear(hidden_size, rank, bias=False)
        self.to_token = nn.Linear(hidden_size, rank, bias=False)
        self.carry = nn.Linear(rank, rank, bias=False)
        nn.init.zeros_(self.to_token.weight)
        nn.init.zeros_(self.carry.weight)
        self.blank_R = nn.Parameter(torch.zeros(rank)) if with_blank else None

    def mixed(self, slot_NTM: Tensor, root_ND: Tensor) -> Mixed:
        """A s_t and B e(root)."""
        return Mixed(self.from_slot(slot_NTM), self.contexts(root_ND))

    def contexts(self, embedded_XD: Tensor) -> Tensor:
        """B e(u), [..., R]."""
        return self.from_context(F.rms_norm(embedded_XD, embedded_XD.shape[-1:]))

    def tokens(self, base: Base) -> Tensor:
        """P w_v of every token of the base, [V, R]."""
        weight_VD = base.lm_weight.to(self.to_token.weight.dtype)
        return self.to_token(weight_VD) * base.lm_scale_V.to(weight_VD.dtype).unsqueeze(1)

    @torch.no_grad()
    def tables(self, base: Base) -> Tables:
        """Both for the whole vocabulary, for drafting."""
        every_V = torch.arange(base.vocab_size, device=base.device)
        return Tables(self.contexts(base.embed(every_V).to(self.to_token.weight.dtype)), self.tokens(base))

    def forward(
        self, known: Known, shortlist: Shortlist, place_NTU: Tensor, diagonal: bool, implementation: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`moved_shortlist` along known labels, in the precision of the logits."""
        slot_NTR, root_NR = known.mixed
        dtype = shortlist.logits_NTK.dtype
        blank_R = slot_NTR.new_zeros(slot_NTR.shape[2]) if self.blank_R is None else self.blank_R
        states = [root_NR]
        for label_NR in known.label_NUR.unbind(1):
            states.append(label_NR + self.carry(F.hardswish(states[-1])))
        prefixes = Prefixes(
            slot_NTR.to(dtype),
            torch.stack(states, dim=1).to(dtype),
            known.token_VR.to(dtype),
            blank_R.to(dtype),
            shortlist.index_NTK,
            shortlist.logits_NTK,
            place_NTU,
        )
        return moved_shortlist(prefixes, diagonal, implementation)


def along_labels(
    known: Known,
    shortlist: Shortlist,
    logits_NTU: Tensor,
    labels_NU: Tensor,
    blank_NT: Tensor,
    implementation: str = "auto",
) -> Emissions:
    """Every slot behind every prefix of the labels."""
    U = labels_NU.shape[1]
    place_NTU = _places(shortlist.index_NTK, labels_NU.unsqueeze(1))
    moved_NTS, emit_NTU, stay_NTU, share_NTS = known.transition(known, shortlist, place_NTU, False, implementation)
    blank_NTS = blank_NT.unsqueeze(2) + share_NTS
    total_NTS = normaliser(moved_NTS, shortlist, blank_NTS)
    return Emissions(
        logits_NTU + emit_NTU - total_NTS[:, :, :U],
        logits_NTU + stay_NTU - total_NTS[:, :, 1:],
        blank_NTS - total_NTS,
        (place_NTU.diagonal(dim1=1, dim2=2) >= 0).float().mean(dim=0),
    )


def slot_by_slot(
    known: Known, shortlist: Shortlist, logits_NT: Tensor, labels_NT: Tensor, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Where slot k writes label k: log p_k(y_k | y_1..y_{k-1}) [N, T], and the coverage [T]."""
    T = labels_NT.shape[1]
    known = known._replace(label_NUR=known.label_NUR[:, :T])
    place_NTT = _places(shortlist.index_NTK, labels_NT.unsqueeze(1))
    moved_NTS, emit_NTT, _, _ = known.transition(known, shortlist, place_NTT, True, implementation)
    total_NTS = normaliser(moved_NTS, shortlist, None)
    log_p_NT = logits_NT + (emit_NTT - total_NTS[:, :, :T]).diagonal(dim1=1, dim2=2)
    return log_p_NT, (place_NTT.diagonal(dim1=1, dim2=2) >= 0).float().mean(dim=0)


def normaliser(moved_NTC: Tensor, shortlist: Shortlist, blank_NTC: Tensor | None) -> Tensor:
    """Log of all there is of a slot in each context: rest of the vocabulary, moved shortlist, blank."""
    lse_NT = shortlist.lse_NT
    least = torch.finfo(lse_NT.dtype).eps  # a shortlist that holds all there is leaves nothing
    share_NT = (shortlist.logits_NTK.logsumexp(dim=2) - lse_NT).clamp(max=-least)
    rest_NT = lse_NT + torch.log(-torch.expm1(share_NT))
    total_NTC = torch.logaddexp(rest_NT.unsqueeze(2), moved_NTC)
    return total_NTC if blank_NTC is None else torch.logaddexp(total_NTC, blank_NTC)


def _places(index_NTK: Tensor, labels_NTU: Tensor) -> Tensor:
    """Where in its slot's shortlist each label stands, -1 where it does not: [N, T, U]; labels [N, 1, U]."""
    inside, place = (index_NTK.unsqueeze(2) == labels_NTU.unsqueeze(3)).to(torch.uint8).max(dim=3)
    return place.masked_fill(inside == 0, -1)
