"""Sampled softmax: a training step's logits are those of its labels and of a sample of all other tokens.

The normaliser is estimated from some of its terms, each divided by the probability P_v that its token is among them
(Horvitz and Thompson 1952). The step's labels are all there, so that the estimate is unbiased whatever they are. Bengio
and Senecal 2008; Jean et al. 2015 (arXiv 1412.2007).

Shape suffixes: X draft tokens, S of them in a sample, N anchors, U labels.
"""

import zlib

import torch
from torch import Tensor

FLATTENED = 0.75  # power of the counts, as in word2vec (Mikolov et al. 2013)


class Negatives:
    """Draws about `size` tokens beside the labels; counts_X: how often each token was a label of the training data.

    Raises ValueError where size is not between 1 and the number of tokens.
    """

    def __init__(self, counts_X: Tensor, size: int) -> None:
        if not 0 < size < len(counts_X):
            raise ValueError(f"{size} negatives of {len(counts_X)} draft tokens: take from 1 to {len(counts_X) - 1}")
        share_X = (counts_X.double() + 1.0).pow(FLATTENED)
        low, high = 0.0, 64.0  # at which every token is drawn, as far as float64 can tell
        for _ in range(66):
            middle = (low + high) / 2.0
            low, high = (middle, high) if _drawn(share_X, middle).sum() < size else (low, middle)
        self.probability_X = _drawn(share_X, high).float()
        self.bias_X = -self.probability_X.log()

    def draw(self, labels_NU: Tensor, lengths_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A sample for these labels: its tokens [S], ascending; what their logits get on top [S], 0 for labels and
        -log P_v for the others; and the labels' places among them [N, U], anything past an anchor's length.

        Which one it is depends on the labels alone, so that a resumed run draws what it had drawn.
        """
        present_NU = torch.arange(labels_NU.shape[1], device=labels_NU.device) < lengths_N.unsqueeze(1)
        labels_M = labels_NU[present_NU]
        generator = torch.Generator().manual_seed(zlib.crc32(labels_M.cpu().numpy().tobytes()))
        drawn_X = torch.rand(len(self.probability_X), generator=generator) < self.probability_X
        chosen_X = drawn_X.to(labels_NU.device)
        own_X = torch.zeros_like(drawn_X, device=labels_NU.device)
        own_X[labels_M] = True
        chosen_X |= own_X
        tokens_S = chosen_X.nonzero().squeeze(1)
        bias_X = self.bias_X.to(labels_NU.device).masked_fill(own_X, 0.0)
        place_X = chosen_X.long().cumsum(dim=0) - 1
        return tokens_S, bias_X[tokens_S], place_X[labels_NU.where(present_NU, tokens_S[:1])]


def _drawn(share_X: Tensor, rate: float) -> Tensor:
    """P_v of tokens that come `rate * share` times on average."""
    return -torch.expm1(-rate * share_X)
