"""The control `eagle`: a one-layer autoregressive feature drafter that drafts a beam tree, one pass per depth.

Li et al. 2024 (EAGLE, arXiv 2401.15077; EAGLE-2's dynamic tree, arXiv 2406.16858), trained with unrolled steps on its
own features (EAGLE-3, arXiv 2503.01840, section 3.2). A pass reads a token and the feature from which that token was
drawn, and predicts the next feature, which the frozen LM head turns into a distribution.

Shape suffixes: B batch, L positions, A anchors of a row (padded), N anchors, T passes, U labels, S entries attended to,
Q rows of one pass, X nodes of one depth, D hidden size of the base, W width.
"""

from typing import Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ..base.cache import TreeCache
from ..base.context import Anchors, AttentionMask
from ..draft.tree import Tree
from ..lattice.candidates import Lattice
from .block import Block
from .head import CHECKED, Head, HeadConfig, Size, Slots, Vocabulary
from .vocabulary import DraftVocabulary


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class EagleConfig(HeadConfig):
    """slots: passes T, one per depth of the tree."""

    kind: Literal["eagle"] = "eagle"
    width: Size = 128  # of eagle's layer
    heads: Size = 4  # attention heads of that layer
    beam: Size = 8  # nodes that a pass expands, and children of each

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"head.width={self.width} is no even multiple of head.heads={self.heads}")


class EagleHead(Head):
    """Its draft is a Tree of every node that it scored."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.enter = nn.Linear(2 * hidden_size, config.width, bias=False)
        self.block = Block(config.width, config.heads)
        self.norm = nn.RMSNorm(config.width)
        self.leave = nn.Linear(config.width, hidden_size, bias=False)

    def new_cache(self, batch: int, capacity: int) -> TreeCache:
        return TreeCache(1, batch, capacity + self.config.slots * self.config.beam)

    def forward(self, hidden_BLD: Tensor, root_BLD: Tensor, anchors: Anchors, label_NUD: Tensor | None = None) -> Slots:
        """T passes along the labels' embeddings, each on the feature of the one before."""
        assert label_NUD is not None
        (B, L, _), cache = hidden_BLD.shape, DynamicCache()
        mask = anchors.mask or AttentionMask(torch.arange(L, device=hidden_BLD.device).unsqueeze(0))
        feature_ND = anchors.own(self._pass(hidden_BLD, root_BLD, mask, cache))
        position_BA, seen_BAS = anchors.context(L)
        own_BAA = torch.eye(anchors.most, dtype=torch.bool, device=seen_BAS.device).expand(B, -1, -1)
        states = [feature_ND]
        for step in range(1, min(self.config.slots, label_NUD.shape[1])):
            seen_BAS = torch.cat([seen_BAS, own_BAA], dim=2)  # its context, and its own passes so far
            read_BAD = anchors.spread(feature_ND), anchors.spread(label_NUD[:, step - 1])
            feature_BAD = self._pass(*read_BAD, AttentionMask(position_BA + step, seen_BAS.unsqueeze(1)), cache)
            feature_ND = anchors.gathered(feature_BAD)
            states.append(feature_ND)
        return Slots(torch.stack(states, dim=1), None)

    @property
    def lm_rows(self) -> int:
        return 1 + (self.config.slots - 1) * self.config.beam

    @torch.no_grad()
    def drafts(
        self,
        hidden_BLD: Tensor,
        root_BL: Tensor,
        anchors: Anchors,
        vocabulary: Vocabulary,
        cache: TreeCache | None = None,
        noise_NTV: Tensor | None = None,
    ) -> list[Lattice | Tree]:
        (B, L, _), root_BLD = hidden_BLD.shape, vocabulary.embed(root_BL, hidden_BLD.dtype)
        if cache is None:
            assert anchors.mask is None, "drafts at known anchors are made in rows of one document"
            cache = self.new_cache(B, L)
        feature_BLD = self._pass(hidden_BLD, root_BLD, cache.causal_mask(L, hidden_BLD.device), cache)
        before, drafted = cache.lengths.copy(), dict[int, Tree]()
        for n in anchors.position_N.argsort(descending=True).tolist():  # a draft overwrites what lies behind its anchor
            b, position = int(anchors.batch_N[n]), int(anchors.position_N[n])
            cache.lengths[b] = before[b] + position + 1
            drafted[n] = self._beam(feature_BLD[b, position], b, cache, vocabulary.tokens)
        return [drafted[n] for n in range(len(drafted))]

    def _pass(self, feature_BLD: Tensor, token_BLD: Tensor, mask: AttentionMask, cache: Cache) -> Tensor:
        x = self.enter(torch.cat([token_BLD, feature_BLD], dim=-1))
        return self.leave(self.norm(self.block(x, mask, cache)))

    def _beam(self, feature_D: Tensor, sequence: int, cache: TreeCache, tokens: DraftVocabulary) -> Tree:
        """All nodes that were scored: each pass expands the `beam` likeliest nodes of the last depth."""
        beam, length, device = min(self.config.beam, len(tokens)), int(cache.lengths[sequence]), feature_D.device
        log_p_X, token_X = self._children(feature_D.unsqueeze(0), tokens, beam)
        layers = [(token_X, torch.full_like(token_X, -1), log_p_X)]  # tokens, parents among all nodes, log-probability
        row_X, first = torch.zeros_like(token_X), 0  # the row of the last pass that a node came from; nodes before it
        feature_QD, sees_QS = feature_D.unsqueeze(0), torch.ones(1, length, dtype=torch.bool, device=device)
        for depth in range(1, self.config.slots):
            best_Q = log_p_X.topk(min(beam, len(log_p_X))).indices
            Q, from_Q = len(best_Q), row_X[best_Q]
            sees_QS = torch.cat([sees_QS[from_Q], torch.eye(Q, dtype=torch.bool, device=device)], dim=1)
            read_QD = tokens.base.embed(token_X[best_Q]).to(feature_D.dtype)
            mask = AttentionMask(torch.full((1, Q), length + depth - 1, device=device), sees_QS[None, None])
            with cache.only(sequence):
                feature_QD = self._pass(feature_QD[from_Q].unsqueeze(0), read_QD.unsqueeze(0), mask, cache)[0]
            cache.lengths[sequence] += Q
            row_X, before_Q = torch.arange(Q, device=device).repeat_interleave(beam), log_p_X[best_Q]
            parents_X, first = first + best_Q[row_X], first + len(token_X)
            log_p_X, token_X = self._children(feature_QD, tokens, beam)
            log_p_X = log_p_X + before_Q[row_X]
            layers.append((token_X, parents_X, log_p_X))
        cache.lengths[sequence] = length  # a draft's own entries do not stay
        token, parent, log_p = (torch.cat(parts).cpu().numpy() for parts in zip(*layers, strict=True))
        depths = np.repeat(np.arange(1, len(layers) + 1), [len(layer[0]) for layer in layers])
        return Tree(token, parent, depths, np.exp(log_p.astype(np.float32)))

    def _children(self, feature_QD: Tensor, tokens: DraftVocabulary, beam: int) -> tuple[Tensor, Tensor]:
        """(log-probabilities, tokens) of each row's likeliest successors, one row after the other."""
        logits_QX = tokens.logits(feature_QD).float()
        top = (logits_QX - logits_QX.logsumexp(dim=1, keepdim=True)).topk(beam, dim=1)
        return top.values.flatten(), tokens.ids_of(top.indices.flatten())
