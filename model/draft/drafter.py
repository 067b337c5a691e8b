"""From what a head believes to the tree that is verified: the one place where drafts are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..lattice.candidates import Lattice
from .budget import Calibration
from .config import DraftConfig
from .prompt_lookup import BUILT_IN, CopyRates, with_copies
from .tree import ANY_DEPTH, Tree, chosen, search


@dataclass(frozen=True)
class Frontier:
    """Where a text ends and a draft begins. read: the tokens so far, the root last; eos: tokens behind which nothing is
    drafted; a draft is at most max_depth deep."""

    read: NDArray[np.int64]
    eos: Sequence[int]
    max_depth: int = ANY_DEPTH


@dataclass
class Drafter:
    """Makes drafts as `config` says. calibration, copy_rates: what psi of the head and copied tokens are worth, where
    that was measured."""

    config: DraftConfig
    calibration: Calibration | None = None
    copy_rates: CopyRates = BUILT_IN

    def tree(self, drafted: Lattice | Tree, frontier: Frontier) -> Tree:
        """The draft tree of a lattice, or of the nodes that a head has scored.

        psi is calibrated where the head's was measured, and that of the head's nodes and of copied ones together where
        there is prompt lookup.
        """
        config, ends = self.config, np.array([*frontier.eos], np.int64)
        limits: dict[str, Any] = {"max_depth": frontier.max_depth, "leaves": ends, "chain": config.kind == "chain"}
        if isinstance(drafted, Tree):
            tree = chosen(drafted, config.nodes, **limits)
        else:
            tree = search(drafted, config.nodes, prune=config.prune, **limits)
        if self.calibration is not None:
            tree = self.calibration.applied(tree)
        if config.prompt_lookup:
            both = with_copies(tree, frontier.read, self.copy_rates, config.prompt_lookup)
            tree = chosen(both, config.nodes, **limits)
        return tree

    def deepest(self, slots: int) -> int:
        """No node lies deeper; slots: of the head, 0 without one."""
        return max(self.config.prompt_lookup, slots)
