"""Lossless speculative decoding: draft a tree, verify it in one base forward.

Committed tokens are x_1..x_{t+1}; the newest, the root, has not been through the base yet. One step feeds the base
[root, nodes...] under a tree mask, walks from the root along the base's own choices, keeps the cache entries of the
accepted path, and takes the choice at its end as the new root (the bonus token). Several sequences go through the
base together, each with a tree and a length of its own.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Unpack

from ctcdraft.model import tree as trees
from ctcdraft.model.base import Base
from ctcdraft.model.budget import Budget, chain_of, step_seconds
from ctcdraft.model.cache import TreeCache
from ctcdraft.model.head import Head, lattices_of
from ctcdraft.model.lattice import Lattice
from ctcdraft.model.mask import TreeMask
from ctcdraft.model.request import Asked, Generation, Prompt, Request, Settings, Span, asked_of, requests_of
from ctcdraft.model.sampling import Sampling, gumbel
from ctcdraft.model.tree import Tree

PROBE_TOKENS = 64  # context of the steps that budget=auto is measured on


@dataclass(frozen=True)
class DraftConfig:
    """kind: `tree` or `chain`; nodes: the budget N; top_k: candidates that each slot may put forward.

    budget: `fixed`, or `auto`: at most `nodes`, as many per step as pay by calibrated psi and the time of a step, which
    is measured once (for one sequence at a time; a batch keeps to `nodes`).
    """

    kind: str = "tree"
    nodes: int = 32
    top_k: int = 16
    budget: str = "fixed"

    def __post_init__(self) -> None:
        if self.kind not in ("tree", "chain"):
            raise ValueError(f"draft.kind={self.kind!r} is unknown: choose tree or chain")
        if self.budget not in ("fixed", "auto"):
            raise ValueError(f"draft.budget={self.budget!r} is unknown: choose fixed or auto")
        if self.nodes < 1 or self.top_k < 1:
            raise ValueError(f"draft.nodes={self.nodes} and draft.top_k={self.top_k} must be at least 1")


class Decoder:
    """Decodes with `base`, drafted by `head`; head None (or draft None) is plain decoding.

    Both run through the same loop with the same cache and limits, so that timing one against the other is fair.
    Output tokens are the base's own choices, whatever the head proposes.
    """

    def __init__(self, base: Base, head: Head | None = None, draft: DraftConfig | None = None) -> None:
        if head is not None and head.hidden_size != base.hidden_size:
            raise ValueError(f"head of hidden size {head.hidden_size} on a base of {base.hidden_size}")
        self.base, self.head, self.draft = base, head if draft else None, draft or DraftConfig()
        self.mask = TreeMask(base, self.draft.nodes + 1)
        self.lazy = base.device.type == "cpu"
        self.budget: Budget | None = None

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str: the first that fits counts
        self, prompts: Prompt, max_new_tokens: int, **settings: Unpack[Settings]
    ) -> Generation: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int, **settings: Unpack[Settings]
    ) -> list[Generation]: ...
    def generate(
        self, prompts: Prompt | Sequence[Prompt], max_new_tokens: int, **settings: Unpack[Settings]
    ) -> Generation | list[Generation]:
        """Continue one prompt (text or tokens), or several together, each until an end-of-sequence token, a stop
        string, max_new_tokens or the end of the context.

        settings: temperature, top_k, top_p, repetition_penalty, seed, stop and eos, see Settings. One prompt gives a
        Generation, a list of prompts a list of them. What a request yields depends on its prompt, settings and seed
        alone, not on what it shares a batch with. Raises ValueError on an empty prompt, one that fills the context,
        or settings outside their range.
        """
        several = not isinstance(prompts, str) and bool(prompts) and not isinstance(prompts[0], int)
        batch = cast(Sequence[Prompt], prompts if several else [prompts])
        asked = asked_of(**settings)
        requests = requests_of(self.base, batch, max_new_tokens, asked, streamed=False)
        for _ in self._run(requests, asked, _Clock()):
            pass
        outs = [request.finished(self.base) for request in requests]
        return outs if several else outs[0]

    def stream(self, prompt: Prompt, max_new_tokens: int, **settings: Unpack[Settings]) -> Iterator[Span | Generation]:
        """`generate` for one prompt, step by step: Spans as they come, and the whole Generation at the end."""
        asked = asked_of(**settings)
        (request,) = requests_of(self.base, [prompt], max_new_tokens, asked, streamed=True)
        text, done = request.text, 0
        assert text is not None
        for _ in self._run([request], asked, _Clock()):
            tokens, final = request.out.tokens[done:], bool(request.out.finish)
            done += len(tokens)
            if final:
                text.finish()
            yield Span(tokens, text.take(final))
        yield request.finished(self.base)

    def tree_of(self, lattice: Lattice, max_depth: int | None = None, eos: NDArray[np.int64] | None = None) -> Tree:
        """The draft tree of a lattice under this decoder's draft settings."""
        leaves = np.array(self.base.eos_ids, np.int64) if eos is None else eos
        chain = self.draft.kind == "chain"
        return trees.search(lattice, self.draft.nodes, max_depth=max_depth, leaves=leaves, chain=chain)

    # -- one batch ------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request], asked: Asked, clock: "_Clock") -> Iterator[None]:
        """Decode all requests to their end; yields after the prompts and after every step."""
        if self.budget is None and self.head is not None and self.draft.budget == "auto":
            self.budget = self.measure_budget()
        sampling = asked.sampling
        ends = np.array(sorted(self.base.eos_ids if asked.eos is None else asked.eos), np.int64)
        capacity = max(len(r.prompt) + r.limit for r in requests) + self.draft.nodes + 1
        cache = TreeCache(self._layers, len(requests), capacity)
        active = list(requests)
        for request in requests:
            request.out.seconds = clock.seconds
        with clock("verify"):
            for number, request in enumerate(active):
                self._prefill(request, number, cache, sampling, ends)
        while True:
            self._retire(active, cache)
            yield
            if not active:
                return
            drafts = self._draft(active, ends, clock)
            paths = self._verify(active, drafts, cache, sampling, clock)
            for request, tree, (path, bonus) in zip(active, drafts, paths, strict=True):
                request.out.steps += 1
                request.out.accepted.append(len(path))
                request.out.expected.append(float(tree.psi.sum()))
                request.append([int(tree.tokens[i]) for i in path], bonus, ends)

    @property
    def _layers(self) -> int:
        return self.base.model.config.get_text_config().num_hidden_layers

    def _retire(self, active: list[Request], cache: TreeCache) -> None:
        for number in range(len(active) - 1, -1, -1):
            if active[number].out.finish:
                cache.drop(number)
                active[number] = active[-1]
                active.pop()

    @torch.no_grad()
    def _prefill(
        self, request: Request, number: int, cache: TreeCache, sampling: Sampling, ends: NDArray[np.int64]
    ) -> None:
        ids = torch.tensor([request.prompt], device=self.base.device)
        positions = torch.arange(len(request.prompt), device=self.base.device).unsqueeze(0)
        cache.alone(number)
        request.hidden = self.base.hidden(ids, position_ids=positions, cache=cache)
        cache.alone(None)
        cache.lengths[number] = len(request.prompt)
        if self.head is not None:
            request.head_cache = self.head.new_cache(len(request.prompt) + request.limit)
        if sampling.repetition_penalty != 1.0:
            request.seen_V = torch.zeros(self.base.vocab_size, dtype=torch.bool, device=self.base.device)
            request.seen_V[ids[0]] = True
        logits_1V = self.base.logits(request.hidden[:, -1])
        root = self._choose(request, trees.EMPTY, logits_1V, [0], sampling)[0]
        request.append([], root, ends)
        request.following = [*request.prompt[1:], root]

    @torch.no_grad()
    def measure_budget(self) -> Budget:
        """Times steps of this decoder, for budget=auto. Done by itself before the first generation."""
        base, head, rng = self.base, self.head, np.random.default_rng(0)
        assert head is not None
        length = min(PROBE_TOKENS, base.context_length - self.draft.nodes - 1)
        prompt = rng.integers(0, base.vocab_size, max(1, length)).tolist()
        cache = TreeCache(self._layers, 1, len(prompt) + self.draft.nodes + 1)
        request = Request(prompt, 2, "length", 0, None)
        none = np.zeros(0, np.int64)
        self._prefill(request, 0, cache, Sampling(), none)
        tokens = rng.integers(0, base.vocab_size, self.draft.nodes).tolist()
        past, hidden, following = cache.lengths.copy(), request.hidden, request.following
        assert hidden is not None

        def verify(nodes: int) -> None:
            self._verify([request], [chain_of(tokens[:nodes])], cache, Sampling(), _Clock())
            cache.lengths[:] = past

        def draft() -> None:
            request.hidden, request.following = hidden[:, -1:], following[-1:]
            self._draft([request], none, _Clock())
            request.head_cache = head.new_cache(len(prompt))

        request.out.tokens = request.out.tokens[:1]
        request.limit = self.draft.nodes + 2
        return Budget(step_seconds(self.draft.nodes, verify, draft), head.calibration)

    # -- drafting -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _draft(self, active: list[Request], ends: NDArray[np.int64], clock: "_Clock") -> list[Tree]:
        if self.head is None:
            return [trees.EMPTY] * len(active)
        with clock("draft"):
            dtype = next(self.head.parameters()).dtype
            contexts = []
            for request in active:
                assert request.hidden is not None
                root_1LD = self.base.embed(torch.tensor([request.following], device=self.base.device))
                context = self.head.encode(request.hidden.to(dtype), root_1LD.to(dtype), request.head_cache)
                contexts.append(context[:, -1])
            lattices = lattices_of(self.head.fill(torch.cat(contexts)), self.base, self.draft.top_k)
        with clock("tree"):
            drafts = [self._propose(r, lattice, ends) for r, lattice in zip(active, lattices, strict=True)]
            if self.budget is not None and len(drafts) == 1:
                drafts = [drafts[0].first(self.budget.choose(drafts[0]))]
            return drafts

    def _propose(self, request: Request, lattice: Lattice, ends: NDArray[np.int64]) -> Tree:
        return self.tree_of(lattice, request.room, ends)

    # -- verification ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _verify(
        self, active: list[Request], drafts: list[Tree], cache: TreeCache, sampling: Sampling, clock: "_Clock"
    ) -> list[tuple[list[int], int]]:
        """One base forward over all roots and trees: per request the accepted nodes and the bonus token."""
        Q = 1 + max(map(len, drafts))
        with clock("verify"):
            ids_BQ = np.zeros((len(active), Q), np.int64)
            for b, (request, tree) in enumerate(zip(active, drafts, strict=True)):
                ids_BQ[b, : len(tree) + 1] = [request.root, *tree.tokens]
            mask, positions_BQ = self.mask.of(drafts, cache.lengths[: len(active)])
            hidden_BQD = self.base.hidden(
                torch.from_numpy(ids_BQ).to(self.base.device),
                attention_mask=mask,
                position_ids=positions_BQ,
                cache=cache,
            )
            rows = [hidden_BQD[b, : len(tree) + 1] for b, tree in enumerate(drafts)]
            logits_XV = self.base.logits(rows[0] if len(rows) == 1 else torch.cat(rows))
            found = self._walks(active, drafts, logits_XV, sampling)
        with clock("other"):
            kept = [[0, *(i + 1 for i in path)] for path, _ in found]
            cache.keep(kept)
            for b, request in enumerate(active):
                request.hidden = hidden_BQD[b : b + 1, kept[b]]
        return found

    def _walks(
        self, active: list[Request], drafts: list[Tree], logits_XV: Tensor, sampling: Sampling
    ) -> list[tuple[list[int], int]]:
        """Along each tree from its root, to the child that holds what the base chooses where we stand."""
        counts = [len(tree) + 1 for tree in drafts]
        found = []
        if sampling.is_plain_argmax:
            targets_X = logits_XV.argmax(dim=-1).cpu().numpy()
            for tree, targets in zip(drafts, np.split(targets_X, np.cumsum(counts)[:-1]), strict=True):
                path = tree.walk(targets)
                found.append((path, int(targets[path[-1] + 1 if path else 0])))
            return found
        for request, tree, logits_RV in zip(active, drafts, logits_XV.split(counts), strict=True):
            if self.lazy:  # choosing costs a sort each: only where the walk comes by
                found.append(self._lazy_walk(request, tree, logits_RV, sampling))
            else:  # asking row by row would wait for the device each time
                targets = np.array(self._choose(request, tree, logits_RV, range(len(tree) + 1), sampling))
                path = tree.walk(targets)
                found.append((path, int(targets[path[-1] + 1 if path else 0])))
        return found

    def _lazy_walk(self, request: Request, tree: Tree, logits_RV: Tensor, sampling: Sampling) -> tuple[list[int], int]:
        path: list[int] = []
        while True:
            at = path[-1] if path else -1
            target = self._choose(request, tree, logits_RV[at + 1 : at + 2], [at + 1], sampling)[0]
            children = np.flatnonzero((tree.parents == at) & (tree.tokens == target))
            if not len(children):
                return path, target
            path.append(int(children[0]))

    def _choose(
        self, request: Request, tree: Tree, logits_RV: Tensor, rows: Sequence[int], sampling: Sampling
    ) -> list[int]:
        """What the base chooses after the root (row 0) and after nodes (row i + 1), at their positions."""
        length, V = request.length, logits_RV.shape[1]
        depths = [0 if row == 0 else int(tree.depths[row - 1]) for row in rows]
        noise_RV = seen_RV = None
        if sampling.temperature:
            noise = {d: gumbel(request.seed, length + d, V, logits_RV.device) for d in sorted(set(depths))}
            noise_RV = torch.stack([noise[d] for d in depths])
        if request.seen_V is not None:
            seen_RV = request.seen_V.repeat(len(rows), 1)
            for i, row in enumerate(rows):
                node = row - 1
                while node >= 0:
                    seen_RV[i, int(tree.tokens[node])] = True
                    node = int(tree.parents[node])
        return sampling.choose(logits_RV, seen_RV, noise_RV).tolist()


class _Clock:
    """Seconds per part. `verify` and `draft` end with a copy to the host, so they wait for an accelerator."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start
