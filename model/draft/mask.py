"""Who may attend to whom while trees are verified: an additive float mask, and positions.

Boolean masks are silently wrong under eager attention. Shape suffixes: B sequences, Q rows (root, nodes, padding),
K cached and new entries.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.llm import Base
from .tree import Tree


def tree_mask(base: Base, drafts: Sequence[Tree], lengths: NDArray[np.int64]) -> tuple[Tensor | None, Tensor]:
    """Committed past and own ancestors: the mask [B, 1, Q, K] (None where there is nothing to hide) and positions
    [B, Q], root + depth, of trees behind `lengths` [B] committed entries."""
    B, Q = len(drafts), 1 + max(map(len, drafts))
    past_B1, row_Q = lengths[:, None], np.arange(Q)
    depths_BQ = np.zeros((B, Q), np.int64)
    if B == Q == 1:
        return None, torch.from_numpy(past_B1.copy()).to(base.device)
    sees_BQK = np.zeros((B, Q, int(lengths.max()) + Q), bool)
    sees_BQK |= (np.arange(sees_BQK.shape[2]) < past_B1)[:, None]
    sees_BQK[np.arange(B)[:, None], row_Q, past_B1 + row_Q] = True  # a padding row must see something: itself
    for b, tree in enumerate(drafts):
        if len(tree):
            rows, past = len(tree) + 1, int(lengths[b])
            depths_BQ[b, 1:rows] = tree.depths
            sees_BQK[b, :rows, past : past + rows] = tree.ancestors()
    positions_BQ = torch.from_numpy(past_B1 + depths_BQ).to(base.device)
    hidden_BQK = torch.from_numpy(~sees_BQK).to(base.device)
    mask_BQK = torch.zeros(hidden_BQK.shape, dtype=base.dtype, device=base.device)
    return mask_BQK.masked_fill_(hidden_BQK, torch.finfo(base.dtype).min).unsqueeze(1), positions_BQ
