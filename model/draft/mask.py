"""Who may attend to whom while trees are verified, and where nodes stand.

Shape suffixes: B sequences, Q rows (root, nodes, padding), K cached and new entries.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.context import Sight
from .tree import Tree


def tree_mask(drafts: Sequence[Tree], lengths: NDArray[np.int64], device: torch.device) -> Sight:
    """Of trees behind `lengths` [B] committed entries: a node stands at root + depth, and sees the committed past and
    its own ancestors."""
    B, Q = len(drafts), 1 + max(map(len, drafts))
    past_B1, row_Q = lengths[:, None], np.arange(Q)
    depths_BQ = np.zeros((B, Q), np.int64)
    if B == Q == 1:
        return Sight(torch.from_numpy(past_B1.copy()).to(device))
    sees_BQK = np.zeros((B, Q, int(lengths.max()) + Q), bool)
    sees_BQK |= (np.arange(sees_BQK.shape[2]) < past_B1)[:, None]
    sees_BQK[np.arange(B)[:, None], row_Q, past_B1 + row_Q] = True  # a padding row must see something: itself
    for b, tree in enumerate(drafts):
        if len(tree):
            rows, past = len(tree) + 1, int(lengths[b])
            depths_BQ[b, 1:rows] = tree.depths
            sees_BQK[b, :rows, past : past + rows] = tree.ancestors()
    positions_BQ = torch.from_numpy(past_B1 + depths_BQ)
    return Sight(positions_BQ.to(device), torch.from_numpy(sees_BQK).to(device).unsqueeze(1))
