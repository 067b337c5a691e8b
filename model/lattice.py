"""What a head believes about the next tokens, cut down to the candidates that a draft can use.

Shape suffixes: T slots, V vocabulary, C candidate tokens, R contexts (the last token collapsed so far).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Lattice:
    """Per-slot probabilities over candidate tokens and the blank.

    tokens [C]       candidate token ids, ascending
    emission [T, R, C]  p_t(c | u); R = 1 where the last token u does not matter, else R = C + 1:
                        row 0 before the first token, row 1 + i after tokens[i]
    blank [T, R]     p_t(blank | u)
    merge            True: CTC, equal neighbours collapse. False: slot k writes token k, no blank.
    """

    tokens: NDArray[np.int64]
    emission: NDArray[np.float32]
    blank: NDArray[np.float32]
    merge: bool

    @property
    def slots(self) -> int:
        return self.emission.shape[0]


def lattice_from_logits(logits_TV: Tensor, blank_T: Tensor | None, top_k: int) -> Lattice:
    """The lattice over the union of each slot's top-k tokens, with exact full-vocabulary normalisation.

    blank None gives the lattice of a head whose slot k predicts token k.
    """
    logits_TV = logits_TV.float()
    lse_T = logits_TV.logsumexp(dim=1)
    if blank_T is not None:
        lse_T = torch.logaddexp(lse_T, blank_T.float())
    tokens_C = logits_TV.topk(min(top_k, logits_TV.shape[1]), dim=1).indices.unique()
    emission_TC = (logits_TV[:, tokens_C] - lse_T.unsqueeze(1)).exp()
    blank = torch.zeros_like(lse_T) if blank_T is None else (blank_T.float() - lse_T).exp()
    return Lattice(
        tokens=tokens_C.cpu().numpy(),
        emission=emission_TC.unsqueeze(1).cpu().numpy(),
        blank=blank.unsqueeze(1).cpu().numpy(),
        merge=blank_T is not None,
    )
