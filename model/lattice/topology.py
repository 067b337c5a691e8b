"""Which alignments of slots to tokens count (docs/method.md, "The lattice")."""

from typing import NamedTuple

import torch
from torch import Tensor


class Topology(NamedTuple):
    """merge: equal neighbours are one token, as in CTC; False: every token that is written is a new one, so that only
    blanks write nothing ("selfless" CTC; Laptev et al. 2021, arXiv 2110.03098).

    band: at most so many blanks before a token, and behind as many the next slot writes one; None: any number. A prefix
    of u tokens is then finished by slot u to u + band, and no later slot follows it. Only without merging: a repeat at
    the band's edge would be lost otherwise.
    """

    merge: bool
    band: int | None

    def width(self, slots: int) -> int:
        """The band as a number, with that many slots."""
        return slots if self.band is None else min(self.band, slots)

    def window(self, slots: int, labels: int) -> Tensor:
        """[T, W]: the prefixes of 0..labels tokens that each slot is looked at behind, in rising order. All that it can
        follow are among them; those of more tokens than there are slots before it are not reached."""
        width = self.width(slots)
        W = min(width, labels) + 1
        return (torch.arange(slots) - width).clamp(0, labels + 1 - W).unsqueeze(1) + torch.arange(W)


CTC = Topology(merge=True, band=None)
ONE_TO_ONE = Topology(merge=False, band=0)  # slot k writes token k: there is no blank
