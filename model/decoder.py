"""Lossless speculative decoding, one sequence at a time: draft a tree, verify it in one base forward.

Committed tokens are x_1..x_{t+1}; the newest, the root, has not been through the base yet. One step feeds
the base [root, nodes...] under a tree mask, walks from the root along the base's own choices, keeps the
cache entries of the accepted path, and takes the choice at its end as the new root (the bonus token).
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ctcdraft.model import tree as trees
from ctcdraft.model.base import Base
from ctcdraft.model.head import Head, HeadCache, lattice_of
from ctcdraft.model.lattice import Lattice
from ctcdraft.model.tree import Tree


@dataclass(frozen=True)
class DraftConfig:
    """kind: `tree` or `chain`; nodes: the budget N; top_k: candidates that each slot may put forward."""

    kind: str = "tree"
    nodes: int = 32
    top_k: int = 16

    def __post_init__(self) -> None:
        if self.kind not in ("tree", "chain"):
            raise ValueError(f"draft.kind={self.kind!r} is unknown: choose tree or chain")
        if self.nodes < 1 or self.top_k < 1:
            raise ValueError(f"draft.nodes={self.nodes} and draft.top_k={self.top_k} must be at least 1")


@dataclass
class Generation:
    """New tokens (end of sequence included) and how they came about.

    accepted and expected hold, per step, the accepted draft tokens and the sum of psi that foretold them;
    seconds splits the time into verify, draft, tree and other.
    """

    tokens: list[int]
    steps: int = 0
    accepted: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        """Growth per base forward after the prompt's, which gives the first token; plain decoding = 1."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 1.0


class Decoder:
    """Greedy decoding of `base`, drafted by `head`; head None (or draft None) is plain decoding.

    Both run through the same loop with the same cache and limits, so that timing one against the other is
    fair. Output tokens are the base's own argmax, whatever the head proposes.
    """

    def __init__(self, base: Base, head: Head | None = None, draft: DraftConfig | None = None) -> None:
        if head is not None and head.hidden_size != base.hidden_size:
            raise ValueError(f"head of hidden size {head.hidden_size} on a base of {base.hidden_size}")
        self.base, self.head, self.draft = base, head if draft else None, draft or DraftConfig()
        budget = self.draft.nodes + 1
        self.leaves = np.array(base.eos_ids, dtype=np.int64)
        width = base.context_length + budget
        self._mask = torch.zeros(1, 1, budget, width, dtype=base.dtype, device=base.device)
        self._blocked = torch.finfo(base.dtype).min

    @torch.no_grad()
    def generate(self, prompt: list[int], max_new_tokens: int) -> Generation:
        """Continue the prompt until end of sequence, max_new_tokens or the end of the context.

        Raises ValueError on an empty prompt, one that fills the context, or max_new_tokens < 1.
        """
        base, room = self.base, self.base.context_length - len(prompt)
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and {base.name} takes {base.context_length}: shorten it"
            )
        self._mask.zero_()  # an interrupted call may have left its tree there
        clock = _Clock()
        limit = min(max_new_tokens, room)
        cache = DynamicCache()
        with clock("verify"):
            hidden = base.hidden(self._ids(prompt), cache=cache)
            root = int(base.logits(hidden[:, -1]).argmax())
        out = Generation([root])
        head_cache = self.head.new_cache(len(prompt) + limit) if self.head else None
        tokens = [*prompt[1:], root]
        while len(out.tokens) < limit and out.tokens[-1] not in base.eos_ids:
            tree = self._draft(hidden, tokens, head_cache, limit - len(out.tokens) - 1, clock)
            path, targets, hidden = self._verify(out.tokens[-1], tree, cache, clock)
            tokens = [int(tree.tokens[i]) for i in path] + [int(targets[path[-1] + 1 if path else 0])]
            out.tokens += self._cut(tokens)
            out.steps += 1
            out.accepted.append(len(path))
            out.expected.append(float(tree.psi.sum()))
        out.seconds = clock.seconds
        return out

    def _draft(
        self, hidden_1LD: Tensor, tokens: list[int], cache: HeadCache | None, room: int, clock: "_Clock"
    ) -> Tree:
        """A tree for the positions after the root; `hidden` and the `tokens` that follow are new."""
        if self.head is None or cache is None:
            return trees.EMPTY
        with clock("draft"):
            root_1LD = self.base.embed(self._ids(tokens))
            dtype = next(self.head.parameters()).dtype
            slots = self.head.step(hidden_1LD.to(dtype), root_1LD.to(dtype), cache)
            lattice = lattice_of(slots, self.base, self.draft.top_k)
        with clock("tree"):
            return self.tree_of(lattice, room)

    def tree_of(self, lattice: Lattice, max_depth: int | None = None) -> Tree:
        """The draft tree of a lattice under this decoder's draft settings."""
        chain = self.draft.kind == "chain"
        return trees.search(lattice, self.draft.nodes, max_depth=max_depth, leaves=self.leaves, chain=chain)

    def _verify(
        self, root: int, tree: Tree, cache: DynamicCache, clock: "_Clock"
    ) -> tuple[list[int], np.ndarray, Tensor]:
        """One base forward over root and tree: accepted nodes, the base's choices, their hidden states."""
        past = cache.get_seq_length()
        with clock("verify"):
            mask, positions = self._tree_mask(tree, past)
            ids = self._ids([root, *tree.tokens.tolist()])
            hidden = self.base.hidden(ids, attention_mask=mask, position_ids=positions, cache=cache)
            targets = self.base.logits(hidden[0]).argmax(dim=-1).cpu().numpy()
        with clock("other"):
            path = tree.walk(targets)
            rows = [0, *(i + 1 for i in path)]
            if len(tree):
                keep_entries(cache, past, rows)
                self._mask[:, :, :, past : past + len(tree) + 1] = 0.0
        return path, targets, hidden[:, rows]

    def _tree_mask(self, tree: Tree, past: int) -> tuple[Tensor | None, Tensor]:
        """An additive float mask over committed past and ancestors, and positions root + depth."""
        depths = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), tree.depths]))
        positions = (past + depths).unsqueeze(0).to(self.base.device)
        if not len(tree):
            return None, positions
        rows = len(tree) + 1
        blocked = torch.from_numpy(~tree.ancestors()).to(self.base.device)
        self._mask[0, 0, :rows, past : past + rows].masked_fill_(blocked, self._blocked)
        return self._mask[:, :, :rows, : past + rows], positions

    def _cut(self, tokens: list[int]) -> list[int]:
        """Tokens up to the first end of sequence, that one included."""
        for i, token in enumerate(tokens):
            if token in self.base.eos_ids:
                return tokens[: i + 1]
        return tokens

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self.base.device)


def keep_entries(cache: DynamicCache, past: int, rows: list[int]) -> None:
    """Of what the last forward appended after `past`, keep the given rows, in order, and drop the rest."""
    end = past + len(rows)
    moved = rows != list(range(len(rows)))
    layers: list[Any] = cache.layers
    for layer in layers:
        if moved:
            index = torch.tensor(rows, device=layer.keys.device) + past
            layer.keys[:, :, past:end] = layer.keys[:, :, index]
            layer.values[:, :, past:end] = layer.values[:, :, index]
        layer.keys, layer.values = layer.keys[:, :, :end], layer.values[:, :, :end]


class _Clock:
    """Seconds per part. `verify` and `draft` end with a copy to the host, so they wait for an accelerator."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start
