"""From what a head believes to the tree that is verified: the one place where drafts are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.sampling import Sampling, gumbel
from ..lattice.candidates import Lattice
from .config import DraftConfig
from .grafts import LENGTH, Phrases, grafted, siblings, tails
from .growth import Drafted, Hints, Rule, grow, prefix_of
from .prompt_lookup import with_copies
from .tree import ANY_DEPTH, PHRASES, SIBLINGS, Tree, chosen, search

NEGLIGIBLE = 0.03  # of a prefix's alignments, which the search leaves out: a sixth of its time for 0.04% of psi


@dataclass(frozen=True)
class Frontier:
    """Where a text ends and a draft begins. read: the tokens so far, the root last; eos: tokens behind which nothing is
    drafted; a draft is at most max_depth deep. sampling, seed: how the base will choose, and with which noise.
    phrases: of the request, which its drafts add to; None: there are none."""

    read: NDArray[np.int64]
    eos: Sequence[int]
    max_depth: int = ANY_DEPTH
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    phrases: Phrases | None = None


@dataclass(frozen=True)
class Outcome:
    """What verification found: the accepted nodes of a tree, the token behind the last, and what the base said behind
    those rows of which it is known (0: the root, n + 1: node n)."""

    path: list[int]
    bonus: int
    said: Mapping[int, int]


@dataclass
class Stop:
    """AdaEDL's threshold, which follows the share of the drafted depth that was accepted (the rule of Draft & Verify,
    Zhang et al. 2024, arXiv 2309.08168). Their ALPHA is 0.9, of a drafter that is nearly always right: with our heads
    it ends in drafting nothing (docs/results/drafts.md)."""

    least: float = 0.23
    accepted: float = 0.0
    ALPHA, EPSILON = 0.035, 0.002

    def observe(self, tree: Tree, path: Sequence[int], longest: int) -> None:
        deepest = int(tree.depths.max(initial=0))
        if not deepest:
            return
        self.accepted = 0.5 * self.accepted + 0.5 * len(path) / deepest
        step = self.EPSILON if self.accepted < self.ALPHA else 0.0 if deepest >= longest else -self.EPSILON
        self.least = min(max(self.least + 0.1 * step, 0.0), 1.0)  # beyond these nothing changes, but the way back


@dataclass
class Drafter:
    """Makes drafts as `config` says."""

    config: DraftConfig
    stop: Stop = field(default_factory=Stop)

    def tree(self, drafted: Drafted, frontier: Frontier) -> Tree:
        """The draft tree of a lattice, of the nodes that a head has scored, or of what either says behind some tokens.

        psi is that of the head's nodes, of copied ones and of grafts together, where there are any.
        """
        config = self.config
        ends = np.array([*frontier.eos], np.int64)
        root = int(frontier.read[-1])
        limits: dict[str, Any] = {"max_depth": frontier.max_depth, "leaves": ends, "chain": config.kind == "chain"}

        def best(scored: Tree) -> Tree:
            return chosen(scored, config.most_nodes, **limits)

        drawn = config.proposal != "best" and frontier.sampling.temperature > 0
        plain = config.kind in ("tree", "chain") and config.stop == "none" and not drawn
        if plain and isinstance(drafted, Tree):
            tree = best(drafted)
        elif plain and isinstance(drafted, Lattice):
            tree = search(drafted, config.nodes, prune=NEGLIGIBLE, **limits)
        else:
            rule = Rule(config, frontier.sampling, frontier.seed, len(frontier.read), self._least)
            tree = grow(prefix_of(drafted), rule, config.most_nodes, max_depth=frontier.max_depth, leaves=ends)
        if config.prompt_lookup:
            tree = best(with_copies(tree, frontier.read, config.prompt_lookup, frontier.sampling.temperature))
        if (pool := self._phrases(frontier)) is not None:
            pool.learn(frontier.read)
            tree = best(grafted(tree, pool.paths(tree, root), PHRASES, frontier.max_depth))
        if "siblings" in config.graft:
            tree = best(grafted(tree, siblings(tree, root), SIBLINGS, frontier.max_depth))
        return tree

    def hints(self, frontiers: Sequence[Frontier], slots: int, vocab: int, device: torch.device) -> Hints:
        """What a head is told before it drafts behind these frontiers. Slot t behind one is taken for token t."""
        config = self.config
        shared = config.proposal == "shared" and any(one.sampling.temperature for one in frontiers)
        chain = config.kind in ("chain", "cape") and config.schedule == "serial" and not shared
        return Hints(self._noise(frontiers, slots, vocab, device) if shared else None, self._least, chain)

    def _noise(self, frontiers: Sequence[Frontier], slots: int, vocab: int, device: torch.device) -> Tensor:
        """What the noise that the base will choose with makes of log-probabilities, [N, T, V]."""
        noise_NTV = torch.zeros(len(frontiers), slots, vocab, device=device)
        for rows, one in zip(noise_NTV, frontiers, strict=True):
            for slot in range(slots if one.sampling.temperature else 0):
                noise_V = gumbel(one.seed, len(one.read) + slot, vocab, device)
                torch.mul(noise_V, one.sampling.temperature, out=rows[slot])
        return noise_NTV

    def observe(self, frontier: Frontier, tree: Tree, outcome: Outcome) -> None:
        """Learn from what became of a draft."""
        if self.config.stop == "adaedl":
            self.stop.observe(tree, outcome.path, frontier.max_depth)
        if (pool := self._phrases(frontier)) is not None:
            pool.observe(tree, outcome.path)
            for token, phrase in tails(tree, outcome.path, outcome.said):
                pool.add(token, phrase)

    def deepest(self, slots: int) -> int:
        """No node lies deeper; slots: of the head, 0 without one."""
        if "siblings" in self.config.graft:  # what follows one node may be hung below another
            return self.config.most_nodes
        phrases = LENGTH if self.config.graft else 0
        return max(self.config.prompt_lookup, slots) + phrases

    @property
    def _least(self) -> float | None:
        return self.stop.least if self.config.stop == "adaedl" else None

    def _phrases(self, frontier: Frontier) -> Phrases | None:
        return frontier.phrases if "phrases" in self.config.graft else None
