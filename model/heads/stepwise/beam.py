"""Heads that take a pass per depth: the passes along known labels, and the beam tree that they draft.

A pass reads a token and the state from which it was drawn, and gives the next state. States are multiplied with the
table that the head's tokens are drawn from. The tree is EAGLE-2's (Li et al. 2024, arXiv 2406.16858): each pass expands
the likeliest nodes of the last depth. Training is unrolled on a head's own states (EAGLE-3, arXiv 2503.01840, section
3.2).

Shape suffixes: B batch, L positions, A anchors of a row (padded), N anchors, T passes, U labels, S entries attended to,
Q rows of one pass, X nodes of one depth, or of states what `Base.hidden` gives, D hidden size of the base, E what a
state holds, F an embedded token.
"""

from abc import abstractmethod

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import Cache, DynamicCache

from ...base.cache import TreeCache
from ...base.context import Anchors, AttentionMask, KeysAndValues
from ...draft.tree import Tree
from ...lattice.candidates import Lattice
from ..head import CHECKED, Head, HeadConfig, Size, Slots, Vocabulary
from ..vocabulary import DraftVocabulary

CHILDREN = 32  # of a node that are scored: one that is not expanded itself can still be in a draft


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class StepwiseConfig(HeadConfig):
    """slots: passes T, one per depth of the tree."""

    beam: Size = 8  # nodes that a pass expands


class StepwiseHead(Head):
    """Its draft is a Tree of every node that it scored. attentions: layers of its own cache."""

    config: StepwiseConfig
    reads_labels = True
    attentions = 1

    @abstractmethod
    def step(
        self, state_BQE: Tensor, token_BQF: Tensor, mask: AttentionMask, cache: Cache, read: KeysAndValues
    ) -> Tensor:
        """The next states [B, Q, E] behind embedded tokens, whose entries the cache then holds.

        read: what attended layers of the base made of the positions that the mask begins with; a row sees as much of
        them as of its own entries there.
        """

    def begin(
        self,
        hidden_BLX: Tensor,
        token_BLF: Tensor,
        mask: AttentionMask,
        cache: Cache,
        read: KeysAndValues,
        *,
        anchors: Anchors,
    ) -> Tensor:
        """The first states of the anchors [N, E]: behind the token after each position, with the base's hidden states
        for states. mask, cache, read: see `step`."""
        return anchors.own(self.step(hidden_BLX, token_BLF, mask, cache, read))

    def new_cache(self, batch: int, capacity: int) -> TreeCache:
        return TreeCache(self.attentions, batch, capacity + self.config.slots * self.config.beam)

    def forward(self, hidden_BLX: Tensor, root_BLF: Tensor, anchors: Anchors, label_NUF: Tensor | None = None) -> Slots:
        """T passes along the labels, each on the state of the one before; roots and labels as `embedded`."""
        assert label_NUF is not None
        (B, L, _), cache, read = hidden_BLX.shape, DynamicCache(), self.keys_and_values(hidden_BLX)
        mask = anchors.mask or AttentionMask(torch.arange(L, device=hidden_BLX.device).unsqueeze(0))
        state_NE = self.begin(hidden_BLX, root_BLF, mask, cache, read, anchors=anchors)
        position_BA, seen_BAS = anchors.context(L)
        own_BAA = torch.eye(anchors.most, dtype=torch.bool, device=seen_BAS.device).expand(B, -1, -1)
        states = [state_NE]
        for step in range(1, min(self.config.slots, label_NUF.shape[1])):
            seen_BAS = torch.cat([seen_BAS, own_BAA], dim=2)  # its context, and its own passes so far
            state_BAE = anchors.spread(state_NE)
            token_BAF = anchors.spread(label_NUF[:, step - 1])
            mask = AttentionMask(position_BA + step, seen_BAS.unsqueeze(1))
            state_NE = anchors.gathered(self.step(state_BAE, token_BAF, mask, cache, read))
            states.append(state_NE)
        return Slots(torch.stack(states, dim=1))

    @torch.no_grad()
    def drafts(
        self,
        hidden_BLX: Tensor,
        root_BL: Tensor,
        anchors: Anchors,
        vocabulary: Vocabulary,
        cache: TreeCache | None = None,
        noise_NTV: Tensor | None = None,
        own: TreeCache | None = None,
    ) -> list[Lattice | Tree]:
        (B, L, _), tokens, read = hidden_BLX.shape, vocabulary.tokens, self.keys_and_values(hidden_BLX, cache)
        root_BLF = self.embedded(tokens, root_BL, hidden_BLX.dtype)
        documents = anchors.mask if own is None else None
        own = self.new_cache(B, L) if own is None else own
        mask = documents or own.causal_mask(L, hidden_BLX.device)
        state_NE = self.begin(hidden_BLX, root_BLF, mask, own, read, anchors=anchors)
        before, drafted = own.lengths.copy(), dict[int, Tree]()
        for n in anchors.position_N.argsort(descending=True).tolist():  # a draft overwrites what lies behind its anchor
            b, position = int(anchors.batch_N[n]), int(anchors.position_N[n])
            own.lengths[b] = end = before[b] + position + 1
            seen = {layer: (k[b : b + 1, :, :end], v[b : b + 1, :, :end]) for layer, (k, v) in read.items()}
            at = AttentionMask(mask.positions_BL.expand(B, -1)[b : b + 1, position : position + 1])
            if documents is not None and documents.allowed_BLS is not None:
                at = at._replace(allowed_BLS=documents.allowed_BLS[b : b + 1, :, position : position + 1, :end])
            drafted[n] = self._beam(state_NE[n], b, own, seen, tokens, at)
        return [drafted[n] for n in range(len(drafted))]

    def _beam(
        self,
        state_E: Tensor,
        sequence: int,
        cache: TreeCache,
        read: KeysAndValues,
        tokens: DraftVocabulary,
        at: AttentionMask,
    ) -> Tree:
        """All nodes that were scored: each pass expands the `beam` likeliest nodes of the last depth. at: where the
        anchor stands, and what it sees where that is not all that the cache holds."""
        beam, children = self.config.beam, min(CHILDREN, len(tokens))
        length = int(cache.lengths[sequence])
        device = state_E.device
        log_p_X, token_X = self._children(state_E.unsqueeze(0), tokens, children)
        layers = [(token_X, torch.full_like(token_X, -1), log_p_X)]  # tokens, parents among all nodes, log-probability
        row_X, first = torch.zeros_like(token_X), 0  # the row of the last pass that a node came from; nodes before it
        state_QE = state_E.unsqueeze(0)
        own_1S = torch.ones(1, length, dtype=torch.bool, device=device)
        sees_QS = own_1S if at.allowed_BLS is None else at.allowed_BLS[0, 0]
        for depth in range(1, self.config.slots):
            best_Q = log_p_X.topk(min(beam, len(log_p_X))).indices
            Q, from_Q = len(best_Q), row_X[best_Q]
            sees_QS = torch.cat([sees_QS[from_Q], torch.eye(Q, dtype=torch.bool, device=device)], dim=1)
            token_QF = self.embedded(tokens, token_X[best_Q], state_E.dtype)
            mask = AttentionMask((at.positions_BL + depth).expand(1, Q), sees_QS[None, None])
            with cache.only(sequence):
                state_QE = self.step(state_QE[from_Q].unsqueeze(0), token_QF.unsqueeze(0), mask, cache, read)[0]
            cache.lengths[sequence] += Q
            row_X = torch.arange(Q, device=device).repeat_interleave(children)
            before_Q = log_p_X[best_Q]
            parents_X, first = first + best_Q[row_X], first + len(token_X)
            log_p_X, token_X = self._children(state_QE, tokens, children)
            log_p_X = log_p_X + before_Q[row_X]
            layers.append((token_X, parents_X, log_p_X))
        cache.lengths[sequence] = length  # a draft's own entries do not stay
        token, parent, log_p = (torch.cat(parts).cpu().numpy() for parts in zip(*layers, strict=True))
        depths = np.repeat(np.arange(1, len(layers) + 1), [len(layer[0]) for layer in layers])
        return Tree(token, parent, depths, np.exp(log_p.astype(np.float32)))

    def _children(self, state_QE: Tensor, tokens: DraftVocabulary, children: int) -> tuple[Tensor, Tensor]:
        """(log-probabilities, tokens) of each row's likeliest successors, one row after the other."""
        logits_QX = tokens.logits(state_QE).float()
        top = (logits_QX - logits_QX.logsumexp(dim=1, keepdim=True)).topk(children, dim=1)
        return top.values.flatten(), tokens.ids[top.indices.flatten()]
