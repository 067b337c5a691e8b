"""Lossless speculative decoding: draft a tree, verify it in one base forward.

Committed tokens are x_1..x_{t+1}; the newest, the root, has not been through the base yet. One step feeds the base
[root, nodes...] under a tree mask, walks from the root along the base's own choices, keeps the cache entries of the
accepted path, and takes the choice at its end as the new root (the bonus token). Several sequences go through the
base together, each with a tree and a length of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Unpack

from ctcdraft.model import tree as trees
from ctcdraft.model.base import Base
from ctcdraft.model.batch import Batch
from ctcdraft.model.budget import SIZES, Budget, chain_of, step_seconds
from ctcdraft.model.cache import TreeCache
from ctcdraft.model.head import Head, Vocabulary
from ctcdraft.model.lattice import Lattice
from ctcdraft.model.mask import TreeMask
from ctcdraft.model.prompt_lookup import BUILT_IN, with_copies
from ctcdraft.model.request import Asked, Generation, Prompt, Request, Settings, Span, asked_of, requests_of
from ctcdraft.model.sampling import Sampling, gumbel
from ctcdraft.model.static import StaticDecoder
from ctcdraft.model.tree import Tree

LEAST_CAPACITY = 2048  # cache entries that fixed shapes begin with
PROBE_TOKENS = 64  # context of the steps that are timed for the budget, and psi of each node behind the one before
PROBE_PSI = 0.5
LIKELY = 0.1  # psi of the nodes whose logits a CPU computes together, before the walk comes by
LEAST_ROWS = 4  # of logits that it computes together: in float32, MKL takes longer for two or three


@dataclass(frozen=True)
class DraftConfig:
    """kind: `tree` or `chain`; nodes: the budget N; top_k: tokens that a draft may hold, the likeliest in any slot.

    budget: `fixed`: always `nodes`; `measured`: at most `nodes`, as many per step as pay by calibrated psi and the time
    of a step, which is measured once (for one sequence at a time; several keep to `nodes`); `auto`: `measured` on a
    CPU, where each row costs, `fixed` elsewhere. Tokens do not depend on it; the number of steps that they take is
    another whenever times are.

    prune: the share of a prefix's alignments that the search may leave out, see `tree.search`; 0: psi is exact.

    prompt_lookup: where the last tokens were read before, at most so many of those that followed are drafted too, see
    `prompt_lookup`; 0: none.
    """

    kind: str = "tree"
    nodes: int = 32
    top_k: int = 512
    budget: str = "auto"
    prune: float = 0.03
    prompt_lookup: int = 32

    def __post_init__(self) -> None:
        if self.kind not in ("tree", "chain"):
            raise ValueError(f"draft.kind={self.kind!r} is unknown: choose tree or chain")
        if self.budget not in ("auto", "fixed", "measured"):
            raise ValueError(f"draft.budget={self.budget!r} is unknown: choose auto, fixed or measured")
        if self.nodes < 1 or self.top_k < 1:
            raise ValueError(f"draft.nodes={self.nodes} and draft.top_k={self.top_k} must be at least 1")
        if not 0.0 <= self.prune < 1.0:
            raise ValueError(f"draft.prune={self.prune} must be at least 0 and below 1")
        if self.prompt_lookup < 0:
            raise ValueError(f"draft.prompt_lookup={self.prompt_lookup} must be at least 0 (no lookup)")


class Decoder:
    """Decodes with `base`, drafted by `head` and by prompt lookup; head None: by prompt lookup alone; draft None: plain
    decoding.

    All run through the same loop with the same cache and limits, so that timing one against the other is fair.
    Output tokens are the base's own choices, whatever the head proposes.

    graphs: on CUDA, one sequence without a repetition penalty is decoded in fixed shapes that are captured as CUDA
    graphs when they first occur; everything else, and everything where that is False, is decoded eagerly.
    """

    def __init__(self, base: Base, head: Head | None = None, draft: DraftConfig | None = None) -> None:
        if head is not None and head.hidden_size != base.hidden_size:
            raise ValueError(f"head of hidden size {head.hidden_size} on a base of {base.hidden_size}")
        self.base, self.head, self.draft = base, head if draft else None, draft or DraftConfig()
        self.drafts = draft is not None and (head is not None or draft.prompt_lookup > 0)
        self.copy_rates = BUILT_IN if head is None or head.copy_rates is None else head.copy_rates
        self.mask = TreeMask(base, self.draft.nodes + 1)
        self.lazy = base.device.type == "cpu"
        self.graphs = base.device.type == "cuda" and (self.head is None or self.head.one_pass)
        measured = ("auto", "measured") if self.lazy else ("measured",)
        self.measures = self.drafts and self.draft.budget in measured
        self.budget: Budget | None = None
        self._static: StaticDecoder | None = None

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
        listed = not isinstance(prompts, str) and len(prompts) > 0
        several = listed and (isinstance(prompts[0], str) or np.ndim(prompts[0]) > 0)  # type: ignore[arg-type]
        batch = cast(Sequence[Prompt], prompts if several else [prompts])
        asked = asked_of(**settings)
        requests = requests_of(self.base, batch, max_new_tokens, asked, streamed=False)
        for _ in self._run(requests, asked):
            pass
        outs = [request.finished(self.base) for request in requests]
        return outs if several else outs[0]

    def stream(self, prompt: Prompt, max_new_tokens: int, **settings: Unpack[Settings]) -> Iterator[Span | Generation]:
        """`generate` for one prompt, step by step: Spans as they come, and the whole Generation at the end."""
        asked = asked_of(**settings)
        (request,) = requests_of(self.base, [prompt], max_new_tokens, asked, streamed=True)
        text, done = request.text, 0
        assert text is not None
        for _ in self._run([request], asked):
            tokens, final = request.out.tokens[done:], bool(request.out.finish)
            done += len(tokens)
            if final:
                text.finish()
            yield Span(tokens, text.take(final))
        yield request.finished(self.base)

    def prepare(self) -> None:
        """Time steps, once, where the budget is measured. `generate` does it for one sequence; who times that comes
        here first."""
        if self.measures and self.budget is None:
            self.budget = self.measure_budget()

    def tree_of(
        self,
        drafted: Lattice | Tree,
        read: NDArray[np.int64],
        max_depth: int | None = None,
        eos: NDArray[np.int64] | None = None,
    ) -> Tree:
        """The draft tree of a lattice, or of the nodes that a head has scored, under this decoder's draft settings.

        read: the tokens so far, the root last. psi is calibrated where the head's was measured, and that of the head's
        nodes and of copied ones together where there is prompt lookup.
        """
        nodes, prune = self.draft.nodes, self.draft.prune
        leaves, chain = np.array(self.base.eos_ids, np.int64) if eos is None else eos, self.draft.kind == "chain"
        if isinstance(drafted, Tree):
            tree = trees.chosen(drafted, nodes, max_depth=max_depth, leaves=leaves, chain=chain)
        else:
            tree = trees.search(drafted, nodes, max_depth=max_depth, leaves=leaves, chain=chain, prune=prune)
        if self.head is not None and self.head.calibration is not None:
            tree = self.head.calibration.applied(tree)
        if self.draft.prompt_lookup:
            both = with_copies(tree, read, self.copy_rates, self.draft.prompt_lookup)
            tree = trees.chosen(both, nodes, max_depth=max_depth, leaves=leaves, chain=chain)
        return tree

    # -- one batch ------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request], asked: Asked) -> Iterator[None]:
        """Decode all requests to their end; yields after the prompts and after every step."""
        if len(requests) == 1:
            self.prepare()
        ends = np.array(sorted(self.base.eos_ids if asked.eos is None else asked.eos), np.int64)
        batch = self._batch_of(requests, asked.sampling, ends)
        try:
            self._begin(batch)
            while True:
                batch.retire()
                yield
                if not batch.active:
                    return
                self._step(batch)
        finally:
            batch.release()

    def _batch_of(self, requests: list[Request], sampling: Sampling, ends: NDArray[np.int64]) -> Batch:
        """The requests with caches that have room for them; `release` it in any case."""
        capacity = max(len(r.prompt) + r.limit for r in requests) + self.draft.nodes + 1
        if (static := self._static_batch(requests, capacity, sampling, ends)) is not None:
            return static
        cache, head_cache = TreeCache(self._layers, len(requests), capacity), None
        if self.head is not None:
            head_cache = self.head.new_cache(len(requests), capacity + self.head.config.slots, cache)
        return Batch(list(requests), cache, head_cache, sampling, ends)

    def _begin(self, batch: Batch) -> None:
        """Read the prompts and choose the first tokens."""
        for request in batch.active:
            request.out.seconds = batch.clock.seconds
        with batch.clock("verify"):
            for number, request in enumerate(batch.active):
                self._prefill(batch, number, request)
        if batch.static is not None:
            batch.static.begin(batch.active[0].root)

    def _static_batch(
        self, requests: list[Request], capacity: int, sampling: Sampling, ends: NDArray[np.int64]
    ) -> Batch | None:
        """A batch of one on the kept fixed-shape steps; None where they do not apply or serve another call."""
        if not self.graphs or len(requests) > 1 or sampling.repetition_penalty != 1.0:
            return None
        if self._static is not None and self._static.in_use:
            return None
        if self._static is None or self._static.capacity < capacity:
            room = max(LEAST_CAPACITY, 1 << capacity.bit_length())  # each growth throws all captured steps away
            room = max(capacity, min(room, self.base.context_length + self.draft.nodes + 1))
            capture = self.base.device.type == "cuda"
            vocabulary = None if self.head is None else self.vocabulary
            depth = max(self.draft.prompt_lookup, 0 if self.head is None else self.head.config.slots)
            longest = 1 + (depth if self.drafts else 0)
            self._static = StaticDecoder(self.base, self.head, vocabulary, room, self._layers, longest, capture)
        self._static.in_use = True
        self._static.clear()
        return Batch(list(requests), self._static.cache, self._static.head_cache, sampling, ends, self._static)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What its head drafts with, made when first asked for: a decoder's head no longer changes."""
        assert self.head is not None
        return self.head.vocabulary(self.base, self.draft.top_k)

    @property
    def _layers(self) -> int:
        return self.base.model.config.get_text_config().num_hidden_layers

    def _step(self, batch: Batch) -> None:
        drafts = self._draft(batch)
        paths = self._verify(batch, drafts)
        for request, tree, (path, bonus) in zip(batch.active, drafts, paths, strict=True):
            request.out.steps += 1
            request.out.nodes.append(len(tree))
            request.out.accepted.append(len(path))
            request.out.expected.append(float(tree.psi.sum()))
            for source in tree.sources(path):
                request.out.accepted_from[source] += 1
            request.append([int(tree.tokens[i]) for i in path], bonus, batch.ends)

    @torch.no_grad()
    def _prefill(self, batch: Batch, number: int, request: Request) -> None:
        ids = torch.tensor([request.prompt], device=self.base.device)
        positions = torch.arange(len(request.prompt), device=self.base.device).unsqueeze(0)
        batch.cache.alone(number)
        request.hidden = self.base.hidden(ids, position_ids=positions, cache=batch.cache)
        batch.cache.alone(None)
        batch.cache.lengths[number] = len(request.prompt)
        if batch.sampling.repetition_penalty != 1.0:
            request.seen_V = torch.zeros(self.base.vocab_size, dtype=torch.bool, device=self.base.device)
            request.seen_V[ids[0]] = True
        logits_1V = self.base.logits(request.hidden[:, -1])
        root = self._choose(request, trees.EMPTY, logits_1V, [0], batch.sampling)[0]
        request.append([], root, batch.ends)
        request.following = [*request.prompt[1:], root]

    @torch.no_grad()
    def measure_budget(self) -> Budget:
        """Times steps of this decoder, behind a prompt of random tokens."""
        base, rng = self.base, np.random.default_rng(0)
        length = min(PROBE_TOKENS, base.context_length - self.draft.nodes - 1)
        prompt = rng.integers(0, base.vocab_size, max(1, length)).tolist()
        tokens = rng.integers(0, base.vocab_size, self.draft.nodes).tolist()
        request = Request(prompt, self.draft.nodes + 2, "length", 0, None)
        batch = self._batch_of([request], Sampling(), np.zeros(0, np.int64))
        try:
            self._begin(batch)
            return Budget(self._step_seconds(batch, request, tokens))
        finally:
            batch.release()

    def _step_seconds(self, batch: Batch, request: Request, tokens: list[int]) -> NDArray[np.float64]:
        """Seconds of a step with 0..draft.nodes nodes behind the prompt of a batch of one."""
        self._draft(batch)
        hidden, following = request.hidden, request.following
        caches = [cache for cache in (batch.cache, batch.head_cache) if cache is not None]
        past = [cache.lengths.copy() for cache in caches]
        assert hidden is not None

        def rewind() -> None:
            for cache, lengths in zip(caches, past, strict=True):
                cache.lengths[:] = lengths
            if batch.static is not None:
                batch.static.begin(request.root)

        def verify(nodes: int) -> None:
            self._verify(batch, [chain_of(tokens[:nodes], PROBE_PSI)])
            rewind()

        def draft() -> None:
            request.hidden, request.following = hidden[:, -1:], following[-1:]
            drafted = batch.drafted  # in fixed shapes a part of `verify`: then only the tree is left to time
            self._draft(batch)
            batch.drafted = drafted
            rewind()

        return step_seconds(self.draft.nodes, verify, draft)

    # -- drafting -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _draft(self, batch: Batch) -> list[Tree]:
        if not self.drafts:
            return [trees.EMPTY] * len(batch.active)
        drafted, batch.drafted = batch.drafted, None
        if self.head is None:
            drafted = [trees.EMPTY] * len(batch.active)
        elif drafted is None:
            with batch.clock("draft"):
                drafted = self._drafted(batch, self.head)
        with batch.clock("tree"):
            drafts = [self._propose(r, one, batch.ends) for r, one in zip(batch.active, drafted, strict=True)]
            if self.budget is not None and len(drafts) == 1:
                drafts = [drafts[0].first(self.budget.choose(drafts[0]))]
            return drafts

    def _drafted(self, batch: Batch, head: Head) -> list[Lattice | Tree]:
        """The head over every position that it has not seen yet; sequences of unequal numbers of them are padded."""
        assert batch.head_cache is not None
        counts = [len(request.following) for request in batch.active]
        following_BL = pad_sequence([torch.tensor(request.following) for request in batch.active], True)
        hidden_BLD = pad_sequence([request.hidden[0] for request in batch.active if request.hidden is not None], True)
        dtype = next(head.parameters()).dtype
        following_BL = following_BL.to(self.base.device)
        return head.drafts(hidden_BLD.to(dtype), following_BL, counts, batch.head_cache, self.vocabulary)

    def _propose(self, request: Request, drafted: Lattice | Tree, ends: NDArray[np.int64]) -> Tree:
        return self.tree_of(drafted, request.read, request.room, ends)

    # -- verification ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _verify(self, batch: Batch, drafts: list[Tree]) -> list[tuple[list[int], int]]:
        """One base forward over all roots and trees: per request the accepted nodes and the bonus token."""
        active = batch.active
        if batch.static is not None:
            return [self._static_step(batch, batch.static, active[0], drafts[0])]
        Q = 1 + max(map(len, drafts))
        with batch.clock("verify"):
            ids_BQ = np.zeros((len(active), Q), np.int64)
            for b, (request, tree) in enumerate(zip(active, drafts, strict=True)):
                ids_BQ[b, : len(tree) + 1] = [request.root, *tree.tokens]
            mask, positions_BQ = self.mask.of(drafts, batch.cache.lengths[: len(active)])
            hidden_BQD = self.base.hidden(
                torch.from_numpy(ids_BQ).to(self.base.device),
                attention_mask=mask,
                position_ids=positions_BQ,
                cache=batch.cache,
            )
            found = self._walks(active, drafts, hidden_BQD, batch.sampling)
        with batch.clock("other"):
            kept = [[0, *(i + 1 for i in path)] for path, _ in found]
            batch.cache.keep(kept)
            for b, request in enumerate(active):
                request.hidden = hidden_BQD[b : b + 1, kept[b]]
        return found

    def _static_step(self, batch: Batch, static: StaticDecoder, request: Request, tree: Tree) -> tuple[list[int], int]:
        """The same in fixed shapes, and the next draft's lattice with it."""
        most = self.draft.nodes if self.drafts else 0
        bucket = next((n for n in SIZES if len(tree) <= n < most), most) if self.measures else most
        with batch.clock("verify"):
            found = static.step(tree, 1 + bucket, batch.sampling, request.seed, request.length)
        batch.clock.seconds["verify"] -= found.draft_seconds
        batch.clock.seconds["draft"] += found.draft_seconds
        batch.drafted = None if found.lattice is None else [found.lattice]
        return found.path, found.bonus

    def _walks(
        self, active: list[Request], drafts: list[Tree], hidden_BQD: Tensor, sampling: Sampling
    ) -> list[tuple[list[int], int]]:
        """Along each tree from its root, to the child that holds what the base chooses where we stand."""
        rows = [hidden_BQD[b, : len(tree) + 1] for b, tree in enumerate(drafts)]
        if self.lazy:  # a row costs its share of a GEMM, and a sample a sort: only where the walk (likely) comes by
            walks = zip(active, drafts, rows, strict=True)
            return [self._lazy_walk(request, tree, rows_RD, sampling) for request, tree, rows_RD in walks]
        logits_XV = self.base.logits(torch.cat(rows))  # asking row by row would wait for the device each time
        if sampling.is_plain_argmax:
            chosen = logits_XV.argmax(dim=-1).tolist()
        else:
            each = zip(active, drafts, logits_XV.split([len(row) for row in rows]), strict=True)
            chosen = [t for r, tree, z in each for t in self._choose(r, tree, z, range(len(tree) + 1), sampling)]
        found, start = [], 0
        for tree in drafts:
            targets = np.array(chosen[start : start + len(tree) + 1])
            path = tree.walk(targets)
            found.append((path, int(targets[path[-1] + 1 if path else 0])))
            start += len(targets)
        return found

    def _lazy_walk(self, request: Request, tree: Tree, hidden_RD: Tensor, sampling: Sampling) -> tuple[list[int], int]:
        """Logits of the root and the likely nodes at once, since each alone would be a pass over the LM head; of others
        when the walk comes by."""
        chosen: dict[int, int] = {}
        path: list[int] = []
        rows = [0, *(np.flatnonzero(tree.psi >= LIKELY) + 1).tolist()]
        if len(rows) < LEAST_ROWS:
            rows = list(range(min(LEAST_ROWS, len(tree) + 1)))
        while True:
            at = path[-1] if path else -1
            if at + 1 not in chosen:
                logits_XV = self.base.logits(hidden_RD[rows])
                chosen.update(zip(rows, self._choose(request, tree, logits_XV, rows, sampling), strict=True))
            target = chosen[at + 1]
            children = np.flatnonzero((tree.parents == at) & (tree.tokens == target))
            if not len(children):
                return path, target
            path.append(int(children[0]))
            rows = [path[-1] + 1]

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
