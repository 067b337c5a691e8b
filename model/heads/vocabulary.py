"""Which tokens a head drafts: the base's whole vocabulary, or the most frequent ones of its training answers.

EAGLE-3's reduced draft vocabulary (Li et al. 2025, arXiv 2503.01840), FR-Spec (Zhao et al. 2025, arXiv 2502.14856):
nothing is lost but drafts of rare tokens.

Inside a head tokens are numbered by their place among the draft tokens. One number more, X, stands for every other
token: it can be read, and is embedded as zeros, but never drafted.

Shape suffixes: X draft tokens, V vocabulary of the base, D hidden size, E what a row of a table holds.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..base.llm import Base
from ..base.packed import packed_product


class DraftVocabulary:
    """What a head sees of a base's vocabulary. ids_X: the base's ids of the draft tokens, ascending; None: all of them.

    lm_weight [X, D]: their rows of the base's LM head, times its scale of logits, if it has one; behind each stands its
    bias, if there is one (`beside`). output [X, E]: what states are multiplied with: a table of the head's own, or else
    these. host_ids [X]: ids on the host.
    Raises ValueError on ids that do not rise, or are not the base's.
    """

    def __init__(self, base: Base, ids_X: Tensor | None = None, output_XE: Tensor | None = None) -> None:
        V, device = base.vocab_size, base.device
        self.base = base
        self.ids = torch.arange(V, device=device) if ids_X is None else ids_X.to(device, torch.long)
        self.host_ids: NDArray[np.int64] = self.ids.cpu().numpy()
        if not (np.diff(self.host_ids) > 0).all() or not 0 <= self.host_ids[0] <= self.host_ids[-1] < V:
            raise ValueError(f"draft tokens must be rising ids below {V}")
        weight, bias = base.lm_weight, base.lm_bias
        weight = weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], dim=1)
        lm_weight = weight if ids_X is None else weight[self.ids]
        self.lm_weight = lm_weight if base.logit_scale == 1.0 else (lm_weight * base.logit_scale).detach()
        self.output = self.lm_weight if output_XE is None else output_XE
        self._number_V = torch.full((V,), len(self.ids), device=device)
        self._number_V[self.ids] = torch.arange(len(self.ids), device=device)

    def __len__(self) -> int:
        """Draft tokens, X."""
        return len(self.lm_weight)

    @cached_property
    def _lm_head(self) -> nn.Linear:
        return packed_product(self.output.detach().to(self.lm_weight.dtype))

    def logits(self, states: Tensor) -> Tensor:
        """[..., X] of states [..., E], in the base's precision and without a gradient."""
        return self._lm_head(beside(states, self.output).to(self.lm_weight.dtype))

    def numbered(self, ids: Tensor) -> Tensor:
        """Numbers [...] of the base's ids [...]: X for those that cannot be drafted."""
        return F.embedding(ids, self._number_V.unsqueeze(1)).squeeze(-1)

    def embed(self, numbers: Tensor) -> Tensor:
        """As the base's first layer gets them, [..., D]; zeros for X."""
        known = numbers < len(self)
        embedded = self.base.embed(self.ids[numbers.where(known, 0)])
        return embedded.masked_fill(~known.unsqueeze(-1), 0.0)

    def cut(self, labels_NU: Tensor, lengths_N: Tensor) -> tuple[Tensor, Tensor]:
        """Labels as numbers, and lengths up to the first that cannot be drafted: no draft goes beyond it."""
        numbers_NU = self.numbered(labels_NU)
        columns_U = torch.arange(labels_NU.shape[1], device=labels_NU.device)
        first_N = columns_U.where(numbers_NU == len(self), len(columns_U)).amin(dim=1)
        return numbers_NU.clamp(max=len(self) - 1), torch.minimum(lengths_N, first_N)


def beside(states: Tensor, weight_XE: Tensor) -> Tensor:
    """States [..., E] to be multiplied with such rows: those that end in a bias meet a 1."""
    return states if states.shape[-1] == weight_XE.shape[1] else F.pad(states, (0, 1), value=1.0)


def most_frequent(
    ids: NDArray[np.integer], answered: NDArray[np.bool_], vocab: int, count: int, always: Sequence[int]
) -> NDArray[np.int64]:
    """The `count` tokens, ascending, that occur most often where `answered`, then elsewhere; `always` among them."""
    seen = np.bincount(ids[answered], minlength=vocab).astype(np.float64)
    seen += np.bincount(ids, minlength=vocab) / (len(ids) + 1)  # less than one occurrence in an answer
    seen[list(always)] = np.inf
    return np.sort(np.argsort(-seen, kind="stable")[:count])
