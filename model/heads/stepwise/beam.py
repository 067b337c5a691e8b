"""Heads that take a pass per depth: the passes along known labels, and the beam tree that they draft.

A pass reads a token and the state from which it was drawn, and gives the next state. States are multiplied with the
table that the head's tokens are drawn from. The tree is EAGLE-2's (Li et al. 2024, arXiv 2406.16858): each pass expands
the likeliest nodes of the last depth. Training is unrolled on a head's own states (EAGLE-3, arXiv 2503.01840, section
3.2).

Shape suffixes: B batch, L positions, A anchors of a row (padded), N anchors, T passes, U labels, S entries attended to,
Q rows of one pass, W of them of one anchor, C children of a node, X nodes of one depth, or of states what `Base.hidden`
gives, K all nodes, E what a state holds, F an embedded token.
"""

from abc import abstractmethod

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from ...base.cache import PassingCache, TreeCache
from ...base.context import Anchors, AttentionMask
from ...draft.growth import NO_HINTS, Hints, acceptance_bound
from ...draft.tree import Tree
from ...lattice.candidates import Lattice
from ..head import CHECKED, Head, HeadConfig, Size, Slots, Vocabulary
from ..vocabulary import DraftVocabulary

CHILDREN = 32  # of a node that are scored: one that is not expanded itself can still be in a draft
OwnCache = PassingCache | TreeCache  # what rows of a pass see before them, and where their entries go


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class StepwiseConfig(HeadConfig):
    """slots: passes T, one per depth of the tree."""

    beam: Size = 8  # nodes that a pass expands


class StepwiseHead(Head):
    """Its draft is a Tree of every node that it scored.

    encodes: its first pass reads every position, and a cache of its own keeps what `own_layers` make of them; else it
    reads the anchors alone, on the keys and values of the attended layers.
    """

    config: StepwiseConfig
    reads_labels = True
    encodes = True
    own_layers: tuple[int, ...] = (0,)

    @abstractmethod
    def step(self, state_BQE: Tensor, token_BQF: Tensor, mask: AttentionMask, cache: OwnCache) -> Tensor:
        """The next states [B, Q, E] behind embedded tokens, whose entries the cache then holds."""

    def begin(self, hidden_BQX: Tensor, token_BQF: Tensor, mask: AttentionMask, cache: OwnCache) -> Tensor:
        """The first states [B, Q, E]: behind the token after each position, on the base's hidden states."""
        return self.step(hidden_BQX, token_BQF, mask, cache)

    def new_cache(self, batch: int, capacity: int) -> TreeCache | None:
        return TreeCache(len(self.own_layers), batch, capacity) if self.encodes else None

    def forward(self, hidden_BLX: Tensor, root_BLF: Tensor, anchors: Anchors, label_NUF: Tensor | None = None) -> Slots:
        """T passes along the labels, each on the state of the one before; roots and labels as `embedded`."""
        assert label_NUF is not None
        state_NE, cache, position_BA, seen_BAS = self._first(hidden_BLX, root_BLF, anchors)
        states = [state_NE]
        for step in range(1, min(self.config.slots, label_NUF.shape[1])):
            seen_BAS = _and_themselves(seen_BAS)  # the context, and an anchor's own passes so far
            state_BAE = anchors.spread(state_NE)
            token_BAF = anchors.spread(label_NUF[:, step - 1])
            mask = AttentionMask(position_BA + step, seen_BAS.unsqueeze(1))
            state_NE = anchors.gathered(self.step(state_BAE, token_BAF, mask, cache))
            states.append(state_NE)
        return Slots(torch.stack(states, dim=1))

    def _first(
        self,
        hidden_BLX: Tensor,
        root_BLF: Tensor,
        anchors: Anchors,
        cache: TreeCache | None = None,
        own: TreeCache | None = None,
    ) -> tuple[Tensor, PassingCache, Tensor, Tensor]:
        """The anchors' first states [N, E], what stands before rows of the next pass, where each anchor stands [B, A],
        and which of these entries it sees [B, A, S]. cache, own: see `drafts`."""
        L, device = hidden_BLX.shape[1], hidden_BLX.device
        if not self.encodes:
            known = PassingCache(self.keys_and_values(hidden_BLX, cache), keeps=True, places_BS=anchors.places_BS)
            position_BA, seen_BAS = anchors.context(known.get_seq_length())
            seen_BAS = _and_themselves(seen_BAS)
            hidden_BAX, root_BAF = (anchors.spread(anchors.own(each)) for each in (hidden_BLX, root_BLF))
            state_BAE = self.begin(hidden_BAX, root_BAF, AttentionMask(position_BA, seen_BAS.unsqueeze(1)), known)
            return anchors.gathered(state_BAE), known, position_BA, seen_BAS
        if own is None:
            known, mask = PassingCache(keeps=True), anchors.mask or AttentionMask(torch.arange(L, device=device)[None])
            state_BLE = self.begin(hidden_BLX, root_BLF, mask, known)
        else:
            state_BLE = self.begin(hidden_BLX, root_BLF, own.causal_mask(L, device), own)
            known = PassingCache({layer: own.committed(layer, L) for layer in self.own_layers}, keeps=True)
        return anchors.own(state_BLE), known, *anchors.context(known.get_seq_length())

    @torch.no_grad()
    def drafts(
        self,
        hidden_BLX: Tensor,
        root_BL: Tensor,
        anchors: Anchors,
        vocabulary: Vocabulary,
        cache: TreeCache | None = None,
        hints: Hints = NO_HINTS,
        own: TreeCache | None = None,
    ) -> list[Lattice | Tree]:
        """Of each anchor all nodes that were scored: each pass expands its `beam` likeliest nodes of the last depth,
        all anchors' together. What is likely goes by the noise, and psi does not."""
        tokens, device = vocabulary.tokens, hidden_BLX.device
        root_BLF = self.embedded(tokens, root_BL, hidden_BLX.dtype)
        state_NE, known, position_BA, seen_BAS = self._first(hidden_BLX, root_BLF, anchors, cache, own)
        if own is not None:  # which keeps what the anchors, one of each sequence, see
            own.lengths[anchors.batch_N.tolist()] = (anchors.gathered(position_BA) + 1).tolist()
        beam = 1 if hints.chain else self.config.beam
        noise_NTX = None if hints.noise_NTV is None else hints.noise_NTV[:, :, tokens.ids]
        noise_T = [None] * self.config.slots if noise_NTX is None else noise_NTX.unbind(dim=1)
        state_NWE, seen_BAWS = state_NE.unsqueeze(1), seen_BAS.unsqueeze(2)
        children = self._children(state_NWE, tokens, noise_T[0], hints.least)
        token_NX, log_p_NX, likely_NX = (each_NWC.flatten(1) for each_NWC in children)
        layers = [(token_NX, torch.full_like(token_NX, -1), log_p_NX)]  # and parents, by their numbers among all nodes
        row_NX, first = torch.zeros_like(token_NX), 0  # the row of the last pass that a node came from; nodes before it
        for depth in range(1, self.config.slots):
            best = likely_NX.topk(min(beam, likely_NX.shape[1]), dim=1)
            if hints.least is not None and not best.values.isfinite().any():
                break  # as few passes as AdaEDL asks for
            best_NW, W = best.indices, best.indices.shape[1]
            from_NW = row_NX.gather(1, best_NW)
            from_BAW1 = anchors.spread(from_NW).unsqueeze(3)
            seen_BAWS = seen_BAWS.gather(2, from_BAW1.expand(-1, -1, -1, seen_BAWS.shape[3]))
            seen_BQS = _and_themselves(seen_BAWS.flatten(1, 2))
            state_NWE = state_NWE.gather(1, from_NW.unsqueeze(2).expand(-1, -1, state_NWE.shape[2]))
            token_NWF = self.embedded(tokens, token_NX.gather(1, best_NW), state_NWE.dtype)
            state_BQE, token_BQF = (anchors.spread(each).flatten(1, 2) for each in (state_NWE, token_NWF))
            position_BQ = (position_BA + depth).repeat_interleave(W, dim=1)
            state_BQE = self.step(state_BQE, token_BQF, AttentionMask(position_BQ, seen_BQS.unsqueeze(1)), known)
            state_BAWE, seen_BAWS = (each.unflatten(1, (anchors.most, W)) for each in (state_BQE, seen_BQS))
            state_NWE = anchors.gathered(state_BAWE)
            parents_NW, first = first + best_NW, first + token_NX.shape[1]
            token_NWC, log_p_NWC, likely_NWC = self._children(state_NWE, tokens, noise_T[depth], hints.least)
            token_NX, C = token_NWC.flatten(1), token_NWC.shape[2]
            log_p_NX = (log_p_NWC + log_p_NX.gather(1, best_NW).unsqueeze(2)).flatten(1)
            likely_NX = (likely_NWC + best.values.unsqueeze(2)).flatten(1)
            row_NX = torch.arange(W, device=device).repeat_interleave(C).expand_as(token_NX)
            layers.append((token_NX, parents_NW.repeat_interleave(C, dim=1), log_p_NX))
        token_NK, parent_NK, log_p_NK = (torch.cat(parts, dim=1).cpu().numpy() for parts in zip(*layers, strict=True))
        psi_NK = np.exp(log_p_NK.astype(np.float32))
        depths = np.repeat(np.arange(1, len(layers) + 1), [layer[0].shape[1] for layer in layers])
        found = zip(token_NK, parent_NK, psi_NK, strict=True)
        return [Tree(token_K, parent_K, depths, psi_K) for token_K, parent_K, psi_K in found]

    def _children(
        self, state_NWE: Tensor, tokens: DraftVocabulary, noise_NX: Tensor | None, least: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row's likeliest successors [N, W, C] tokens, log-probabilities, and these where the noise is known.
        least: see `Hints`; -inf is what may not be followed."""
        logits_NWX = tokens.logits(state_NWE).float()
        known_NWX = logits_NWX if noise_NX is None else logits_NWX + noise_NX.unsqueeze(1)
        likely_NWC, index_NWC = known_NWX.topk(min(CHILDREN, len(tokens)), dim=2)
        likely_NWC = log_p_NWC = likely_NWC - known_NWX.logsumexp(dim=2, keepdim=True)
        if noise_NX is not None:
            log_p_NWC = logits_NWX.gather(2, index_NWC) - logits_NWX.logsumexp(dim=2, keepdim=True)
        if least is not None:
            bounds = [acceptance_bound(q_C) for q_C in log_p_NWC.exp().double().flatten(0, 1).cpu().numpy()]
            ends_NW = torch.tensor(bounds, device=likely_NWC.device).view(likely_NWC.shape[:2]) < least
            likely_NWC = likely_NWC.masked_fill(ends_NW.unsqueeze(2), -torch.inf)
        return tokens.ids[index_NWC], log_p_NWC, likely_NWC


def _and_themselves(seen_BQS: Tensor) -> Tensor:
    """What rows see where one more entry of each comes behind, which it alone sees: [B, Q, S + Q]."""
    B, Q, _ = seen_BQS.shape
    return torch.cat([seen_BQS, torch.eye(Q, dtype=torch.bool, device=seen_BQS.device).expand(B, -1, -1)], dim=2)
