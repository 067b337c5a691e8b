"""Acceptance of candidates that were drawn: recursive rejection sampling over several of them.

Multi-candidate speculative decoding (Yang et al. 2024, arXiv 2401.06706): a candidate x, in the order in which they
were drawn from q without replacement, is accepted with probability min(1, r(x) / q(x)), r being the base's p at first;
where it is not, r becomes what is left of it, max(r - q, 0), and q what is left without x. Where none is, the token is
drawn from r. Output has the base's distribution; it is not what the same seed draws in plain decoding.

Shape suffix: V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..base.sampling import ACCEPTANCE, RESIDUAL, gumbel, gumbel_of
from ..draft.tree import Tree
from .request import Request


def refused(r_V: Tensor, q_V: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """r and q behind a refused token."""
    left_V, others_V = (r_V - q_V).clamp(min=0.0), q_V.clone()
    others_V[token] = 0.0
    least = torch.finfo(r_V.dtype).tiny
    r_V = left_V / left_V.sum() if left_V.sum() > 0.0 else r_V  # 0: they were the same but for rounding
    return r_V, others_V / others_V.sum().clamp(min=least)


def accept_drawn(tree: Tree, request: Request, logits_of: Callable[[int], Tensor]) -> tuple[list[int], int]:
    """The accepted nodes, and the token behind the last. logits_of(row): of the base [1, V], behind the root (row 0) or
    node row - 1."""
    path, at = list[int](), -1
    while True:
        row, position = at + 1, request.length + len(path)
        logits_1V = logits_of(row).double()
        if request.seen_V is not None:
            logits_1V = request.sampling.penalised(logits_1V, request.seen_behind(tree, row))
        r_V = request.sampling.probabilities(logits_1V)[0].cpu()
        children = np.flatnonzero(tree.parents == at)
        uniform = np.exp(-np.exp(-gumbel_of(np.arange(len(children)), request.seed, position, ACCEPTANCE)))
        accepted = -1
        if len(children):
            assert tree.proposals is not None
            tokens, q = tree.proposals[row]
            q_V = torch.zeros_like(r_V).index_add_(0, torch.from_numpy(tokens), torch.from_numpy(q))
        for child, u in zip(children.tolist(), uniform.tolist(), strict=True):
            token = int(tree.tokens[child])
            if u * q_V[token] < r_V[token]:
                accepted = child
                break
            r_V, q_V = refused(r_V, q_V, token)
        if accepted < 0:
            noise_V = gumbel(request.seed, position, len(r_V), r_V.device, RESIDUAL)
            return path, int((r_V.log() + noise_V).argmax())
        path.append(accepted)
        at = accepted
