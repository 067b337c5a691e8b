"""The control `eagle`: a one-layer autoregressive feature drafter that drafts a beam tree, one pass per depth.

Li et al. 2024 (EAGLE, arXiv 2401.15077; EAGLE-2's dynamic tree, arXiv 2406.16858), trained with unrolled steps on its
own features (EAGLE-3, arXiv 2503.01840, section 3.2). A pass reads a token and the feature from which that token was
drawn, and predicts the next feature, which the frozen LM head turns into a distribution.

Shape suffixes: B batch, L positions, A anchors of a row (padded), N anchors, T passes, U labels, S entries attended to,
Q rows of one pass, D hidden size of the base, W width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ctcdraft.model.cache import TreeCache
from ctcdraft.model.head import Context, Head, HeadConfig, Slots, Vocabulary
from ctcdraft.model.lattice import Lattice
from ctcdraft.model.layers import Anchors, Block, Sight
from ctcdraft.model.tree import Tree
from ctcdraft.model.vocabulary import DraftVocabulary


class EagleHead(Head):
    """slots: passes T; beam: nodes that a pass expands, and children that each of them gets."""

    one_pass = False

    def __init__(self, config: HeadConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.enter = nn.Linear(2 * hidden_size, config.width, bias=False)
        self.block = Block(config.width, config.heads)
        self.norm = nn.RMSNorm(config.width)
        self.leave = nn.Linear(config.width, hidden_size, bias=False)

    def new_cache(self, batch: int, capacity: int, of_base: TreeCache | None = None) -> TreeCache:
        return TreeCache(1, batch, capacity + self.config.slots * self.config.beam)

    def encode(self, hidden_BLD: Tensor, root_BLD: Tensor, sight: Sight, cache: TreeCache | None = None) -> Context:
        """The feature [B, L, D] that follows each position."""
        return Context(self._pass(hidden_BLD, root_BLD, sight, cache), root_BLD, {})

    def fill(self, context: Context, anchors: Anchors, sight: Sight) -> Slots:
        """The first pass alone: the others depend on what it drafts."""
        return Slots(anchors.own(context.states_BLX).unsqueeze(1), None)

    def forward(
        self,
        hidden_BLD: Tensor,
        root_BLD: Tensor,
        batch_N: Tensor,
        position_N: Tensor,
        sight: Sight | None = None,
        label_NUD: Tensor | None = None,
    ) -> Slots:
        """T passes along the labels' embeddings, each on the feature of the one before."""
        assert label_NUD is not None
        sight = sight or Sight.one_document(hidden_BLD)
        grown = _Grown()
        anchors = Anchors.of(batch_N, position_N)
        feature_ND = anchors.own(self._pass(hidden_BLD, root_BLD, sight, grown))
        rows = _AnchorRows.of(anchors, sight, *hidden_BLD.shape[:2])
        states = [feature_ND]
        for step in range(1, min(self.config.slots, label_NUD.shape[1])):
            read_BAD = (rows.spread(feature_ND), rows.spread(label_NUD[:, step - 1]))
            feature_ND = anchors.gathered(self._pass(*read_BAD, rows.sight(step), grown))
            states.append(feature_ND)
        return Slots(torch.stack(states, dim=1), None)

    @torch.no_grad()
    def drafts(
        self,
        hidden_BLD: Tensor,
        root_BL: Tensor,
        counts: Sequence[int],
        cache: TreeCache,
        vocabulary: Vocabulary,
    ) -> list[Lattice | Tree]:
        sight = cache.sight(hidden_BLD.shape[1], hidden_BLD.device)
        feature_BLD = self._pass(hidden_BLD, vocabulary.embed(root_BL, hidden_BLD.dtype), sight, cache)
        cache.keep([range(count) for count in counts])
        return [self._beam(feature_BLD[b, count - 1], b, cache, vocabulary.tokens) for b, count in enumerate(counts)]

    @torch.no_grad()
    def drafts_at(
        self,
        hidden_BLD: Tensor,
        root_BL: Tensor,
        batch_N: Tensor,
        position_N: Tensor,
        sight: Sight | None,
        vocabulary: Vocabulary,
    ) -> list[Lattice | Tree]:
        assert sight is None, "drafts at known anchors are made in rows of one document"
        B, L, _ = hidden_BLD.shape
        cache = self.new_cache(B, L)
        root_BLD = vocabulary.embed(root_BL, hidden_BLD.dtype)
        feature_BLD = self._pass(hidden_BLD, root_BLD, cache.sight(L, hidden_BLD.device), cache)
        drafted: dict[int, Tree] = {}
        for n in position_N.argsort(descending=True).tolist():  # a draft overwrites what lies behind its anchor
            b, position = int(batch_N[n]), int(position_N[n])
            cache.lengths[b] = position + 1
            drafted[n] = self._beam(feature_BLD[b, position], b, cache, vocabulary.tokens)
        return [drafted[n] for n in range(len(drafted))]

    def _pass(self, feature_BLD: Tensor, token_BLD: Tensor, sight: Sight, cache: "TreeCache | _Grown | None") -> Tensor:
        x = self.enter(torch.cat([token_BLD, feature_BLD], dim=-1))
        return self.leave(self.norm(self.block(x, sight, cache)))

    def _beam(self, feature_D: Tensor, sequence: int, cache: TreeCache, tokens: DraftVocabulary) -> Tree:
        """All nodes that were scored: each pass expands the `beam` likeliest nodes of the last depth."""
        beam, device = min(self.config.beam, len(tokens)), feature_D.device
        length = int(cache.lengths[sequence])
        log_p_X, tokens_X = self._children(feature_D.unsqueeze(0), tokens, beam)
        nodes = [_Layer(tokens_X, torch.full_like(tokens_X, -1), log_p_X)]
        parent_X, feature_XD = torch.zeros_like(tokens_X), feature_D.expand(len(tokens_X), -1)
        sees_QS = torch.zeros(0, 0, dtype=torch.bool, device=device)  # whom each drafted row sees of the drafted rows
        first, row_of_X = 0, torch.full_like(tokens_X, -1)  # row of a node's parent among the drafted rows
        cache.alone(sequence)
        for depth in range(1, self.config.slots):
            best_Q = nodes[-1].log_p_X.topk(min(beam, len(nodes[-1].log_p_X))).indices
            Q, drafted = len(best_Q), len(sees_QS)
            sees_QS = _grown_mask(sees_QS, row_of_X[best_Q])
            slots_Q = length + drafted + torch.arange(Q, device=device)
            mask_QS = torch.cat([sees_QS.new_ones(Q, length), sees_QS[drafted:]], dim=1)
            positions_1Q = torch.full((1, Q), length + depth - 1, device=device)
            cache.at(slots_Q, length + drafted + Q)
            token_QD = tokens.base.embed(nodes[-1].tokens_X[best_Q]).to(feature_D.dtype)
            sight = Sight(positions_1Q, mask_QS[None, None])
            feature_QD = self._pass(feature_XD[best_Q].unsqueeze(0), token_QD.unsqueeze(0), sight, cache)[0]
            log_p_X, tokens_X = self._children(feature_QD, tokens, beam)
            parent_X = torch.arange(Q, device=device).repeat_interleave(beam)
            log_p_X = log_p_X + nodes[-1].log_p_X[best_Q][parent_X]
            nodes.append(_Layer(tokens_X, first + best_Q[parent_X], log_p_X))
            first, row_of_X, feature_XD = first + len(nodes[-2].tokens_X), drafted + parent_X, feature_QD[parent_X]
        cache.at(None)
        cache.alone(None)
        return _tree_of(nodes)

    def _children(self, feature_QD: Tensor, tokens: DraftVocabulary, beam: int) -> tuple[Tensor, Tensor]:
        """(log-probabilities, tokens) of each row's likeliest successors, one row after the other."""
        logits_QX = tokens.logits(feature_QD).float()
        top = (logits_QX - logits_QX.logsumexp(dim=1, keepdim=True)).topk(beam, dim=1)
        return top.values.flatten(), tokens.ids_of(top.indices.flatten())


class _Layer(NamedTuple):
    """The nodes of one depth: token, parent's number among all nodes (-1: the root), log-probability of the path."""

    tokens_X: Tensor
    parents_X: Tensor
    log_p_X: Tensor


def _tree_of(nodes: list[_Layer]) -> Tree:
    tokens, parents, log_p = (torch.cat(parts).cpu().numpy() for parts in zip(*nodes, strict=True))
    depths = np.repeat(np.arange(1, len(nodes) + 1), [len(layer.tokens_X) for layer in nodes])
    return Tree(tokens, parents, depths, np.exp(log_p.astype(np.float32)))


def _grown_mask(sees_QS: Tensor, parent_Q: Tensor) -> Tensor:
    """New rows see themselves and what their parent's row (-1: the root) sees."""
    old, new = len(sees_QS), len(parent_Q)
    grown = sees_QS.new_zeros(old + new, old + new)
    grown[:old, :old] = sees_QS
    grown[old:, old:] = torch.eye(new, dtype=torch.bool, device=grown.device)
    if old:
        grown[old:, :old] = sees_QS[parent_Q.clamp(min=0)] & (parent_Q >= 0).unsqueeze(1)
    return grown


class _Grown:
    """Keys and values that grow pass by pass, with their gradients."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=2)
        return self.keys, self.values


class _AnchorRows(NamedTuple):
    """Anchors as A places of each row, so that one pass of all of them is one batch."""

    anchors: Anchors
    position_BA: Tensor
    context_BAL: Tensor  # whom the anchor's position sees

    @staticmethod
    def of(anchors: Anchors, sight: Sight, rows: int, length: int) -> "_AnchorRows":
        at, seen = sight.position_of(anchors, rows), sight.seen_by(anchors, rows, length)
        return _AnchorRows(anchors, anchors.spread(at, rows), anchors.spread(seen, rows))

    def spread(self, values_ND: Tensor) -> Tensor:
        """[B, A, D], 0 where a row has no such anchor."""
        return self.anchors.spread(values_ND, len(self.position_BA))

    def sight(self, step: int) -> Sight:
        """In its pass of that number an anchor sees its context and its own passes so far."""
        A = self.position_BA.shape[1]
        own_AS = torch.eye(A, dtype=torch.bool, device=self.position_BA.device).repeat(1, step)
        mask_BAS = torch.cat([self.context_BAL, own_AS.expand(len(self.context_BAL), -1, -1)], dim=2)
        return Sight(self.position_BA + step, mask_BAS.unsqueeze(1))
