"""Who may attend to whom while a tree is verified: an additive float mask, and positions.

Boolean masks are silently wrong under eager attention. Shape suffixes: B sequences, Q rows (root, nodes, padding),
K cached and new entries.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.base import Base
from ctcdraft.model.tree import Tree


class TreeMask:
    """Committed past and own ancestors. One sequence at a time uses a mask that was allocated once, and of which only
    the tree's own [Q, Q] corner is written."""

    def __init__(self, base: Base, rows: int) -> None:
        self.base, self._blocked = base, torch.finfo(base.dtype).min
        width = base.context_length + rows
        self._mask = torch.zeros(1, 1, rows, width, dtype=base.dtype, device=base.device)
        self._written: tuple[int, int] | None = None

    def of(self, drafts: Sequence[Tree], lengths: NDArray[np.int64]) -> tuple[Tensor | None, Tensor]:
        """The mask [B, 1, Q, K] (None where there is nothing to hide) and positions [B, Q], root + depth, of trees
        behind `lengths` [B] committed entries."""
        B, Q = len(drafts), 1 + max(map(len, drafts))
        depths_BQ = np.zeros((B, Q), np.int64)
        for b, tree in enumerate(drafts):
            depths_BQ[b, 1 : len(tree) + 1] = tree.depths
        positions_BQ = torch.from_numpy(lengths[:, None] + depths_BQ).to(self.base.device)
        if B == 1:
            return (None if Q == 1 else self._single(drafts[0], int(lengths[0]))), positions_BQ
        return self._several(drafts, Q, lengths), positions_BQ

    def _single(self, tree: Tree, past: int) -> Tensor:
        if self._written is not None:  # what the last tree left, an interrupted call's too
            rows, at = self._written
            self._mask[:, :, :rows, at : at + rows] = 0.0
        rows = len(tree) + 1
        blocked = torch.from_numpy(~tree.ancestors()).to(self.base.device)
        self._mask[0, 0, :rows, past : past + rows].masked_fill_(blocked, self._blocked)
        self._written = rows, past
        return self._mask[:, :, :rows, : past + rows]

    def _several(self, drafts: Sequence[Tree], Q: int, lengths: NDArray[np.int64]) -> Tensor:
        B, K, device = len(drafts), int(lengths.max()) + Q, self.base.device
        blocked_BQQ = np.ones((B, Q, Q), bool)
        blocked_BQQ[:, np.arange(Q), np.arange(Q)] = False  # a padding row must see something: itself
        for b, tree in enumerate(drafts):
            rows = len(tree) + 1
            blocked_BQQ[b, :rows, :rows] = ~tree.ancestors()
        past_B1 = torch.from_numpy(lengths).to(device)[:, None]
        mask_BQK = torch.zeros(B, Q, K, dtype=self.base.dtype, device=device)
        mask_BQK.masked_fill_((torch.arange(K, device=device) >= past_B1)[:, None], self._blocked)
        own_BQQ = (past_B1 + torch.arange(Q, device=device))[:, None].expand(B, Q, Q)
        values_BQQ = torch.from_numpy(blocked_BQQ).to(device, self.base.dtype) * self._blocked
        return mask_BQK.scatter_(2, own_BQQ, values_BQQ).unsqueeze(1)
