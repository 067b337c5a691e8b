"""The transition: what a slot emits depends on u, the last token collapsed so far (docs/method.md).

A slot's shortlist S_t is its k likeliest tokens; they alone are moved, and what is outside keeps its logit:

    p_t(v | u) ~ exp(z_t(v) + [v in S_t] delta_t(u, v)),   delta_t(u, v) = <P w_v, gelu(A s_t + B e(u))>

so the normaliser is exact at any vocabulary: what lies outside the shortlist, as one number, plus the shortlist. With
the whole vocabulary as shortlist it is the full transition. Training and drafting both go through `conditional`.

Shape suffixes: N anchors, T slots, K shortlist, C contexts (values of u), R rank, V vocabulary, D hidden of the base.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctcdraft.model.base import Base


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


class Conditional(NamedTuple):
    """delta of the shortlist [N, T, C, K], log of the normaliser and logit of the blank [N, T, C] (None: no blank)."""

    delta_NTCK: Tensor
    total_NTC: Tensor
    blank_NTC: Tensor | None


class Transition(nn.Module):
    """A, B, P, and the blank's share. It begins as none: P and the blank's vector start at 0.

    Embeddings and rows of the LM head come in at the scale of 1, since bases differ in theirs by orders of magnitude.
    """

    def __init__(self, slot_width: int, hidden_size: int, rank: int, *, with_blank: bool) -> None:
        super().__init__()
        self.from_slot = nn.Linear(slot_width, rank)
        self.from_context = nn.Linear(hidden_size, rank, bias=False)
        self.to_token = nn.Linear(hidden_size, rank, bias=False)
        nn.init.zeros_(self.to_token.weight)
        self.to_blank = nn.Linear(rank, 1, bias=False) if with_blank else None
        if self.to_blank is not None:
            nn.init.zeros_(self.to_blank.weight)

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
        self,
        slot_NTR: Tensor,
        context_NTCR: Tensor,
        token_VR: Tensor,
        shortlist: Shortlist,
        blank_NT: Tensor | None,
    ) -> Conditional:
        """Every slot in every context; context_NTCR may have 1 in the place of T."""
        gate_NTCR = F.gelu(slot_NTR.unsqueeze(2) + context_NTCR, approximate="tanh")
        key_NTKR = F.embedding(shortlist.index_NTK, token_VR)
        delta_NTCK = (gate_NTCR @ key_NTKR.transpose(2, 3)).to(shortlist.logits_NTK.dtype)
        blank_NTC = None
        if blank_NT is not None and self.to_blank is not None:
            blank_NTC = blank_NT.unsqueeze(2) + self.to_blank(gate_NTCR).squeeze(3).to(blank_NT.dtype)
        return conditional(delta_NTCK, shortlist, blank_NTC)


def conditional(delta_NTCK: Tensor, shortlist: Shortlist, blank_NTC: Tensor | None) -> Conditional:
    """The normaliser of every slot in every context: rest of the vocabulary, moved shortlist, blank."""
    logits_NTK, lse_NT = shortlist.logits_NTK, shortlist.lse_NT
    least = torch.finfo(lse_NT.dtype).eps  # a shortlist that holds all there is leaves nothing
    share_NT = (logits_NTK.logsumexp(dim=2) - lse_NT).clamp(max=-least)
    rest_NT = lse_NT + torch.log(-torch.expm1(share_NT))
    moved_NTC = (logits_NTK.unsqueeze(2) + delta_NTCK).logsumexp(dim=3)
    total_NTC = torch.logaddexp(rest_NT.unsqueeze(2), moved_NTC)
    if blank_NTC is not None:
        total_NTC = torch.logaddexp(total_NTC, blank_NTC)
    return Conditional(delta_NTCK, total_NTC, blank_NTC)


def along_labels(
    known: Known, shortlist: Shortlist, logits_NTU: Tensor, labels_NU: Tensor, blank_NT: Tensor
) -> Emissions:
    """Every slot behind every prefix of the labels: the context of label k + 1 is label k, of the first the root."""
    U = labels_NU.shape[1]
    context_NSR = torch.cat([known.mixed.root_NR.unsqueeze(1), known.label_NUR], dim=1)
    found = known.transition(known.mixed.slot_NTR, context_NSR.unsqueeze(1), known.token_VR, shortlist, blank_NT)
    assert found.blank_NTC is not None
    place_NTU, inside_NTU = _places(shortlist.index_NTK, labels_NU.unsqueeze(1))
    delta_NTSK, total_NTS = found.delta_NTCK, found.total_NTC
    emit_NTU = logits_NTU + _of_labels(delta_NTSK[:, :, :U], place_NTU, inside_NTU) - total_NTS[:, :, :U]
    stay_NTU = logits_NTU + _of_labels(delta_NTSK[:, :, 1:], place_NTU, inside_NTU) - total_NTS[:, :, 1:]
    coverage_T = inside_NTU.diagonal(dim1=1, dim2=2).float().mean(dim=0)
    return Emissions(emit_NTU, stay_NTU, found.blank_NTC - total_NTS, coverage_T)


def slot_by_slot(known: Known, shortlist: Shortlist, logits_NT: Tensor, labels_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Where slot k writes label k: log p_k(y_k | y_{k-1}) [N, T], the root before the first; and the coverage [T]."""
    context_NTR = torch.cat([known.mixed.root_NR.unsqueeze(1), known.label_NUR[:, : labels_NT.shape[1] - 1]], dim=1)
    found = known.transition(known.mixed.slot_NTR, context_NTR.unsqueeze(2), known.token_VR, shortlist, None)
    place_NT1, inside_NT1 = _places(shortlist.index_NTK, labels_NT.unsqueeze(2))
    moved_NT1 = logits_NT.unsqueeze(2) + _of_labels(found.delta_NTCK, place_NT1, inside_NT1)
    return (moved_NT1 - found.total_NTC).squeeze(2), inside_NT1.squeeze(2).float().mean(dim=0)


def _places(index_NTK: Tensor, labels_NTU: Tensor) -> tuple[Tensor, Tensor]:
    """Where in its slot's shortlist each label stands, and if it does; labels [N, T or 1, U]."""
    match_NTUK = index_NTK.unsqueeze(2) == labels_NTU.unsqueeze(3)
    inside, place = match_NTUK.to(torch.uint8).max(dim=3)
    return place, inside.bool()


def _of_labels(delta_NTUK: Tensor, place_NTU: Tensor, inside_NTU: Tensor) -> Tensor:
    return delta_NTUK.gather(3, place_NTU.unsqueeze(3)).squeeze(3) * inside_NTU
