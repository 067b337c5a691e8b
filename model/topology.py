"""Which alignments of slots to tokens count (docs/method.md, "The lattice")."""

from typing import NamedTuple


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


CTC = Topology(merge=True, band=None)
DIAGONAL = Topology(merge=False, band=0)  # slot k writes token k: there is no blank
