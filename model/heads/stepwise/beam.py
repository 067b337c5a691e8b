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
        B, L, _ = hidden_BLX.shape
        places_BS = None if self.encodes else anchors.places_BS  # its own entries are still to come
        cache = PassingCache(self.keys_and_values(hidden_BLX), keeps=True, places_BS=places_BS)
        position_BA, seen_BAS = anchors.context(L)
        own_BAA = torch.eye(anchors.most, dtype=torch.bool, device=seen_BAS.device).expand(B, -1, -1)
        if self.encodes:
            mask = anchors.mask or AttentionMask(torch.arange(L, device=hidden_BLX.device).unsqueeze(0))
            state_NE = anchors.own(self.begin(hidden_BLX, root_BLF, mask, cache))
        else:
            seen_BAS = torch.cat([seen_BAS, own_BAA], dim=2)
            hidden_BAX, root_BAF = (anchors.spread(anchors.own(each)) for each in (hidden_BLX, root_BLF))
            mask = AttentionMask(position_BA, seen_BAS.unsqueeze(1))
            state_NE = anchors.gathered(self.begin(hidden_BAX, root_BAF, mask, cache))
        states = [state_NE]
        for step in range(1, min(self.config.slots, label_NUF.shape[1])):
            seen_BAS = torch.cat([seen_BAS, own_BAA], dim=2)  # its context, and its own passes so far
            state_BAE = anchors.spread(state_NE)
            token_BAF = anchors.spread(label_NUF[:, step - 1])
            mask = AttentionMask(position_BA + step, seen_BAS.unsqueeze(1))
            state_NE = anchors.gathered(self.step(state_BAE, token_BAF, mask, cache))
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
        hints: Hints = NO_HINTS,
        own: TreeCache | None = None,
    ) -> list[Lattice | Tree]:
        (B, L, _), tokens, device = hidden_BLX.shape, vocabulary.tokens, hidden_BLX.device
        root_BLF = self.embedded(tokens, root_BL, hidden_BLX.dtype)
        mask = anchors.mask or AttentionMask(torch.arange(L, device=device).unsqueeze(0))
        positions_BL, documents, places_BS = mask.positions_BL.expand(B, -1), mask.allowed_BLS, anchors.places_BS
        read = self.keys_and_values(hidden_BLX, cache)
        if self.encodes:
            own = TreeCache(len(self.own_layers), B, L) if own is None else own
            mask = own.causal_mask(L, device) if documents is None else mask
            state_BLE = self.begin(hidden_BLX, root_BLF, mask, own)
            read = {layer: own.committed(layer, L) for layer in self.own_layers}
        drafted: list[Lattice | Tree] = []
        for n, (b, row) in enumerate(zip(anchors.batch_N.tolist(), anchors.position_N.tolist(), strict=True)):
            one, at = slice(b, b + 1), slice(row, row + 1)
            position_11 = positions_BL[one, at]
            end = int(position_11) + 1 if documents is None else row + 1
            seen_1S = torch.ones(1, end, dtype=torch.bool, device=device)
            if documents is not None:
                seen_1S = documents[b, 0, at, :end]
            before = {layer: (keys[one, :, :end], values[one, :, :end]) for layer, (keys, values) in read.items()}
            known = PassingCache(before, keeps=True, places_BS=None if places_BS is None else places_BS[one, :end])
            if self.encodes:
                state_1E = state_BLE[b, at]
            else:
                seen_1S = torch.cat([seen_1S, seen_1S.new_ones(1, 1)], dim=1)
                first = AttentionMask(position_11, seen_1S[None, None])
                state_1E = self.begin(hidden_BLX[one, at], root_BLF[one, at], first, known)[0]
            noise_TX = None if hints.noise_NTV is None else hints.noise_NTV[n, :, tokens.ids]
            own_hints = hints._replace(noise_NTV=noise_TX)
            drafted.append(self._beam(state_1E, known, AttentionMask(position_11, seen_1S), tokens, own_hints))
            if own is not None:
                own.lengths[b] = end
        return drafted

    def _beam(
        self, state_1E: Tensor, cache: PassingCache, at: AttentionMask, tokens: DraftVocabulary, hints: Hints
    ) -> Tree:
        """All nodes that were scored: each pass expands the `beam` likeliest nodes of the last depth, as far as they
        may have children. at: where the anchor stands, and which entries of the cache it sees [1, S]. hints: of one
        anchor, noise [T, X] of the draft tokens; what is likely goes by it, and psi does not."""
        beam, device = 1 if hints.chain else self.config.beam, state_1E.device
        noise_T = [None] * self.config.slots if hints.noise_NTV is None else hints.noise_NTV.unbind()
        log_p_X, likely_X, token_X = self._children(state_1E, tokens, noise_T[0], hints.least)
        layers = [(token_X, torch.full_like(token_X, -1), log_p_X)]  # tokens, parents among all nodes, log-probability
        row_X, first = torch.zeros_like(token_X), 0  # the row of the last pass that a node came from; nodes before it
        state_QE, sees_QS = state_1E, at.allowed_BLS
        assert sees_QS is not None
        for depth in range(1, self.config.slots):
            best_Q = likely_X.topk(min(beam, len(likely_X))).indices
            if hints.least is not None:  # as few passes as AdaEDL asks for
                best_Q = best_Q[likely_X[best_Q].isfinite()]
                if not len(best_Q):
                    break
            Q, from_Q = len(best_Q), row_X[best_Q]
            sees_QS = torch.cat([sees_QS[from_Q], torch.eye(Q, dtype=torch.bool, device=device)], dim=1)
            token_QF = self.embedded(tokens, token_X[best_Q], state_1E.dtype)
            mask = AttentionMask((at.positions_BL + depth).expand(1, Q), sees_QS[None, None])
            state_QE = self.step(state_QE[from_Q].unsqueeze(0), token_QF.unsqueeze(0), mask, cache)[0]
            above_Q, first = (log_p_X[best_Q], likely_X[best_Q], first + best_Q), first + len(token_X)
            log_p_X, likely_X, token_X = self._children(state_QE, tokens, noise_T[depth], hints.least)
            row_X = torch.arange(Q, device=device).repeat_interleave(len(token_X) // Q)
            log_p_above_X, likely_above_X, parents_X = (each_Q[row_X] for each_Q in above_Q)
            log_p_X, likely_X = log_p_X + log_p_above_X, likely_X + likely_above_X
            layers.append((token_X, parents_X, log_p_X))
        token, parent, log_p = (torch.cat(parts).cpu().numpy() for parts in zip(*layers, strict=True))
        depths = np.repeat(np.arange(1, len(layers) + 1), [len(layer[0]) for layer in layers])
        return Tree(token, parent, depths, np.exp(log_p.astype(np.float32)))

    def _children(
        self, state_QE: Tensor, tokens: DraftVocabulary, noise_X: Tensor | None, least: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probabilities, the same where the noise is known, tokens) of each row's likeliest successors, one row
        after the other. least: see `Hints`; -inf is what may not be followed."""
        logits_QX = tokens.logits(state_QE).float()
        log_p_QX = logits_QX - logits_QX.logsumexp(dim=1, keepdim=True)
        known_QX = log_p_QX if noise_X is None else (log_p_QX + noise_X).log_softmax(dim=1)
        likely_QC, index_QC = known_QX.topk(min(CHILDREN, len(tokens)), dim=1)
        log_p_QC = log_p_QX.gather(1, index_QC)
        if least is not None:
            q_QC = log_p_QC.exp().double().cpu().numpy()
            ends = torch.tensor([acceptance_bound(q_C) < least for q_C in q_QC], device=likely_QC.device)
            likely_QC[ends] = -torch.inf
        return log_p_QC.flatten(), likely_QC.flatten(), tokens.ids[index_QC.flatten()]
