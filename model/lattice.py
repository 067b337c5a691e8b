"""What a head believes about the next tokens, cut down to the candidates that a draft can use.

Shape suffixes: N anchors, T slots, V vocabulary, X = T * k put forward (the same token by several slots), C candidate
tokens (each once), R contexts (the last token collapsed so far).
"""

from dataclasses import dataclass
from typing import NamedTuple

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


class Candidates(NamedTuple):
    """Each slot's top-k tokens, one slot after the other: ids [N, X], their probability in every slot [N, T, X] and the
    blank's [N, T] (None: no blank), normalised over the whole vocabulary. Fixed shapes, and no wait for a device."""

    tokens_NX: Tensor
    emission_NTX: Tensor
    blank_NT: Tensor | None

    def lattices(self) -> list[Lattice]:
        """The lattices of all anchors, on the host."""
        tokens_NX, emission_NTX = self.tokens_NX.cpu().numpy(), self.emission_NTX.cpu().numpy()
        blanks = [None] * len(tokens_NX) if self.blank_NT is None else list(self.blank_NT.cpu().numpy())
        return [lattice_of(*anchor) for anchor in zip(tokens_NX, emission_NTX, blanks, strict=True)]


def candidates_of(logits_NTV: Tensor, blank_NT: Tensor | None, top_k: int) -> Candidates:
    """From the logits of every slot; blank None is a head whose slot k predicts token k."""
    logits_NTV = logits_NTV.float()
    lse_NT = logits_NTV.logsumexp(dim=2)
    if blank_NT is not None:
        lse_NT = torch.logaddexp(lse_NT, blank_NT.float())
    tokens_NX = logits_NTV.topk(min(top_k, logits_NTV.shape[2]), dim=2).indices.flatten(1)
    index_NTX = tokens_NX.unsqueeze(1).expand(-1, logits_NTV.shape[1], -1)
    emission_NTX = (logits_NTV.gather(2, index_NTX) - lse_NT.unsqueeze(2)).exp()
    return Candidates(tokens_NX, emission_NTX, None if blank_NT is None else (blank_NT.float() - lse_NT).exp())


def lattice_of(
    tokens_X: NDArray[np.int64], emission_TX: NDArray[np.float32], blank_T: NDArray[np.float32] | None
) -> Lattice:
    """The lattice of one anchor's candidates, each token once."""
    tokens, first = np.unique(tokens_X, return_index=True)
    merge = blank_T is not None
    blank = blank_T if blank_T is not None else np.zeros(len(emission_TX), np.float32)
    return Lattice(tokens, np.ascontiguousarray(emission_TX[:, None, first]), blank[:, None], merge)
