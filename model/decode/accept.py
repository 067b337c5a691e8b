"""Acceptance of candidates that were drawn: recursive rejection sampling over several of them.

Multi-candidate speculative decoding (Yang et al. 2024, arXiv 2401.06706): a candidate x, in the order in which they
were drawn from q without replacement, is accepted with probability min(1, r(x) / q(x)), r being the base's p at first;
where it is not, r becomes what is left of it, max(r - q, 0), and q what is left without x. Where none is, the token is
drawn from r. Output has the base's distribution; it is not what the same seed draws in plain decoding.

Shape suffix: V vocabulary.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..base.sampling import ACCEPTANCE, RESIDUAL, gumbel_of
from ..draft.tree import Tree
from .request import Request

Probabilities = NDArray[np.float64]


def refused(r_V: Probabilities, q_V: Probabilities, token: int) -> tuple[Probabilities, Probabilities]:
    """r and q behind a refused token."""
    left_V, others_V = np.maximum(r_V - q_V, 0.0), q_V.copy()
    others_V[token] = 0.0
    r_V = left_V / left_V.sum() if left_V.any() else r_V  # none: they were the same but for rounding
    return r_V, others_V / max(others_V.sum(), np.finfo(np.float64).tiny)


def accept_drawn(tree: Tree, request: Request, logits_of: Callable[[int], Tensor]) -> tuple[list[int], int]:
    """The accepted nodes, and the token behind the last. logits_of(row): of the base [1, V], behind the root (row 0) or
    node row - 1."""
    path, at = list[int](), -1
    while True:
        row, position = at + 1, request.length + len(path)
        logits_1V = logits_of(row).double()
        if request.seen_V is not None:
            logits_1V = request.sampling.penalised(logits_1V, request.seen_behind(tree, row))
        r_V = request.sampling.probabilities(logits_1V)[0].cpu().numpy()
        children = np.flatnonzero(tree.parents == at)
        uniform = np.exp(-np.exp(-gumbel_of(np.arange(len(children)), request.seed, position, ACCEPTANCE)))
        if len(children):
            assert tree.proposals is not None
            tokens, q = tree.proposals[row]
            q_V = np.zeros_like(r_V)
            q_V[tokens] = q
        for child, u in zip(children.tolist(), uniform.tolist(), strict=True):
            token = int(tree.tokens[child])
            if u * q_V[token] < r_V[token]:
                path.append(child)
                at = child
                break
            r_V, q_V = refused(r_V, q_V, token)
        else:
            noise_V = gumbel_of(np.arange(len(r_V)), request.seed, position, RESIDUAL)
            with np.errstate(divide="ignore"):
                return path, int((np.log(r_V) + noise_V).argmax())
