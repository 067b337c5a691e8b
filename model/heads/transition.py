"""The transition: what a slot emits depends on u, the token that was collapsed last (docs/method.md).

A slot's state moves before it meets the LM head, by a product of low rank:

    p_t(v | u) ~ exp <w_v, s_t + P hardswish(A x_t + B e(u))>        (u: the root, behind nothing)

with x_t the slot within the head and s_t what it leaves. Along known labels a slot has one state per prefix that it can
stand behind; while drafting, <w_v, P gate> is a product of rank R over a table of P^T w_v. A gated Markov head, as in
DSpark (vllm-project/speculators); hardswish, not gelu, since it costs no exponential.

Shape suffixes: N anchors, T slots, S contexts (prefixes of the labels), W of them in a slot's window
(`Topology.window`), R rank, X draft tokens, D hidden of the base.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..lattice.candidates import Tables
from ..lattice.topology import Topology
from .vocabulary import DraftVocabulary


class Slots(NamedTuple):
    """states [N, T, D], to be multiplied with the base's LM head; the blank's log-odds against all tokens together
    [N, T], or None; A x_t [N, T, R] of a transition, or None; which slots are to be learnt [N, T], None: all."""

    states_NTD: Tensor
    blank_NT: Tensor | None = None
    slot_NTR: Tensor | None = None
    learnt_NT: Tensor | None = None


class Transition(nn.Module):
    """A, B, P and the blank's vector. It begins as none: P and the blank's vector start at 0.

    Embeddings come in at the scale of 1, since bases differ in theirs by orders of magnitude.
    """

    def __init__(self, hidden_size: int, rank: int, *, with_blank: bool) -> None:
        super().__init__()
        self.from_slot = nn.Linear(hidden_size, rank)
        self.from_context = nn.Linear(hidden_size, rank, bias=False)
        self.to_state = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.to_state.weight)
        self.blank_R = nn.Parameter(torch.zeros(rank)) if with_blank else None

    def forward(self, slots: Slots, token_NS: Tensor, vocabulary: DraftVocabulary, topology: Topology) -> Slots:
        """The same with states [N, T, W, D] and log-odds of the blank [N, T, W] behind the prefixes of each slot's
        window. token_NS: the last token of each prefix of the labels, the root first, as numbers of the vocabulary."""
        states_NTD, blank_NT, slot_NTR, _ = slots
        assert slot_NTR is not None
        window_TW = topology.window(slot_NTR.shape[1], token_NS.shape[1] - 1).to(token_NS.device)
        once_K, place_NS = token_NS.unique(return_inverse=True)  # anchors share most of their labels
        context_KR = self.contexts(vocabulary.embed(once_K).detach().to(slot_NTR.dtype))
        gate_NTWR = F.hardswish(slot_NTR.unsqueeze(2) + F.embedding(place_NS[:, window_TW], context_KR))
        if blank_NT is not None and self.blank_R is not None:
            blank_NT = blank_NT.unsqueeze(2) + gate_NTWR @ self.blank_R
        return slots._replace(states_NTD=states_NTD.unsqueeze(2) + self.to_state(gate_NTWR), blank_NT=blank_NT)

    def contexts(self, embedded_XD: Tensor) -> Tensor:
        """B e(u), [..., R]."""
        return self.from_context(F.rms_norm(embedded_XD, embedded_XD.shape[-1:]))

    @torch.no_grad()
    def tables(self, vocabulary: DraftVocabulary) -> Tables:
        """For the whole draft vocabulary, for drafting."""
        weight_DR = self.to_state.weight
        every_X = torch.arange(len(vocabulary) + 1, device=vocabulary.lm_weight.device)
        blank_R = weight_DR.new_zeros(weight_DR.shape[1]) if self.blank_R is None else self.blank_R
        return Tables(
            _on_host(self.contexts(vocabulary.embed(every_X).to(weight_DR.dtype))),
            _on_host(vocabulary.lm_weight[:, : len(weight_DR)].to(weight_DR.dtype) @ weight_DR),
            _on_host(blank_R),
        )


def _on_host(part: Tensor) -> NDArray[np.float32]:
    return part.detach().float().cpu().numpy()
