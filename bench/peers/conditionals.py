"""A peer's drafter behind the interface of our heads: its tree is grown here, counting stays `model/replay.py`'s.

What a peer gives is its distribution behind a path of drafted tokens. Best-first over their products finds the
nodes of highest probability, which is the tree that our own search makes of a lattice; the chain of likeliest tokens
is added to its full depth, so that one growth serves trees and chains. Trees of many anchors grow in step: each asks
for the children of one node at a time, and a model answers them together.

Shape suffixes: B batch, L positions, F hidden states of several layers side by side, M paths, K children.
"""

import heapq
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ctcdraft.model.base.context import Anchors
from ctcdraft.model.base.llm import Base
from ctcdraft.model.draft.tree import Tree

Path = tuple[int, ...]  # tokens behind the root
Children = tuple[list[float], list[int]]  # log-probabilities and tokens, the likeliest first


class Conditionals(Protocol):
    """A drafter at anchors of one sequence."""

    def behind(self, paths: Sequence[tuple[int, Path]]) -> Tensor:
        """log P(token | path) [M, V] behind each (anchor's number, path); a path's parent was asked for before it."""


class Drafter(Protocol):
    """layers: of the base, whose hidden states it reads; 0 is the embedding. depth: the most tokens of a draft."""

    layers: tuple[int, ...]
    depth: int
    hidden_size: int

    def begin(self, hidden_LF: Tensor, tokens_L: Tensor, position_M: Tensor) -> Conditionals:
        """At the roots that follow these rising positions: of hidden states, those up to the position may count."""


@dataclass(frozen=True)
class LayersBase(Base):
    """A base whose `hidden` gives the states behind chosen layers, side by side."""

    @staticmethod
    def of(base: Base) -> "LayersBase":
        return LayersBase(**{field.name: getattr(base, field.name) for field in fields(base)})

    @torch.no_grad()
    def hidden(self, ids_BL: Tensor, *, attended: tuple[int, ...] = (), **_: None) -> Tensor:
        """[B, L, F] of the attended layers; the last one is before the final norm, as vLLM and speculators have it."""
        last = {}
        norm = self.model.base_model.norm
        hook = norm.register_forward_pre_hook(lambda _, inputs: last.update(state=inputs[0]))
        try:
            out = self.model.base_model(input_ids=ids_BL, use_cache=False, output_hidden_states=True)
        finally:
            hook.remove()
        states = [*out.hidden_states[:-1], last["state"]]
        return torch.cat([states[layer] for layer in attended], dim=-1)


class PeerHead:
    """What `replay` and `Drafter.tree` ask of a head. nodes: of the largest tree that will be asked for."""

    def __init__(self, drafter: Drafter, base: Base, nodes: int) -> None:
        self.drafter, self.nodes, self.ends = drafter, nodes, frozenset(base.eos_ids)
        self.attended, self.hidden_size = drafter.layers, drafter.hidden_size
        self.config = SimpleNamespace(slots=drafter.depth)

    def parameters(self) -> Iterator[Tensor]:
        """One, in the precision in which it is given hidden states."""
        yield torch.zeros(0)

    def vocabulary(self, base: Base, top_k: int) -> None:
        """It has its own."""

    @torch.no_grad()
    def drafts(self, hidden_BLF: Tensor, root_BL: Tensor, anchors: Anchors, *_: None) -> list[Tree]:
        """Of each anchor all nodes that the largest tree and chain need."""
        drafted = []
        for row in anchors.batch_N.unique_consecutive():
            position_M = anchors.position_N[anchors.batch_N == row]
            tokens_L = root_BL[row].roll(1)
            model = self.drafter.begin(hidden_BLF[row], tokens_L, position_M)
            drafted += grown(model, len(position_M), self.nodes, self.drafter.depth, self.ends)
        return drafted


def grown(model: Conditionals, anchors: int, nodes: int, depth: int, ends: frozenset[int]) -> list[Tree]:
    """The trees of all anchors: the best `nodes` paths, at most `depth` long and ended by `ends`, and the chain."""
    growing = [_growth(nodes, depth, ends) for _ in range(anchors)]
    trees: dict[int, Tree] = {}
    asked = {number: next(growth) for number, growth in enumerate(growing)}
    while asked:
        log_p_MV = model.behind([*asked.items()])
        top = log_p_MV.topk(min(nodes, log_p_MV.shape[1]), dim=1)
        answers = zip([*asked], top.values.tolist(), top.indices.tolist(), strict=True)
        asked = {}
        for number, log_p, tokens in answers:
            try:
                asked[number] = growing[number].send((log_p, tokens))
            except StopIteration as done:
                trees[number] = done.value
    return [trees[number] for number in range(anchors)]


def _growth(nodes: int, depth: int, ends: frozenset[int]) -> Generator[Path, Children, Tree]:
    """One anchor's tree: yields paths, is sent their children, and returns the nodes, parents first."""
    found: dict[Path, float] = {}
    open_: dict[Path, Children] = {(): (yield ())}
    heap = [(-log_p, (token,)) for log_p, token in zip(*open_[()], strict=True)]
    heapq.heapify(heap)
    while heap and len(found) < nodes:
        cost, path = heapq.heappop(heap)
        found[path] = -cost
        if len(path) < depth and path[-1] not in ends and len(found) < nodes:
            open_[path] = yield path
            for log_p, token in zip(*open_[path], strict=True):
                heapq.heappush(heap, (cost - log_p, (*path, token)))
    path, total = (), 0.0
    while len(path) < depth and not (path and path[-1] in ends):
        if path not in open_:
            open_[path] = yield path
        log_p, token = open_[path][0][0], open_[path][1][0]
        path, total = (*path, token), total + log_p
        found.setdefault(path, total)
    return _tree(found)


def _tree(found: dict[Path, float]) -> Tree:
    number = {path: i for i, path in enumerate(found)}
    number[()] = -1
    return Tree(
        np.array([path[-1] for path in found], np.int64),
        np.array([number[path[:-1]] for path in found], np.int64),
        np.array([len(path) for path in found], np.int64),
        np.exp(np.array([*found.values()], np.float32)),
    )
