"""Lossless speculative decoding: draft a tree, verify it in one base forward.

Committed tokens are x_1..x_{t+1}; the newest, the root, has not been through the base yet. One step feeds the base
[root, nodes...] under a tree mask, walks from the root along the base's own choices, keeps the cache entries of the
accepted path, and takes the choice at its end as the new root (the bonus token). Several sequences go through the
base together, each with a tree and a length of its own.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Unpack, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.llm import Base
from ..draft.budget import SIZES, best_size, chain_of, step_seconds
from ..draft.config import DraftConfig
from ..draft.drafter import Drafter
from ..draft.growth import Drafted, Hints
from ..draft.length import LengthsBySize
from ..draft.tree import EMPTY, Tree
from ..heads.head import Head, OnePassHead, Vocabulary
from .captured import CapturedStep
from .pearl import PearlStep, check_angles
from .request import Chunk, Generation, Prompt, Request, Settings, requests_of
from .step import EagerStep

LEAST_CAPACITY = 2048  # cache entries that fixed shapes begin with
PROBE_TOKENS = 64  # context of the steps that are timed for the budget, and psi of each node behind the one before
PROBE_PSI = 0.5


class Decoder:
    """Decodes with `base`, drafted by `head` and by prompt lookup; head None: by prompt lookup alone; neither head nor
    draft: plain decoding.

    All run through the same loop with the same cache and limits. Output tokens are the base's own choices.

    graphs: on CUDA, the steps of one sequence without a repetition penalty have fixed shapes, which are captured as
    CUDA graphs when they first occur (`CapturedStep`); all others, and all where that is False, are eager.
    """

    def __init__(self, base: Base, head: Head | None = None, draft: DraftConfig | None = None) -> None:
        if head is not None and head.hidden_size != base.hidden_size:
            raise ValueError(f"head of hidden size {head.hidden_size} on a base of {base.hidden_size}")
        self.base, self.head, self.draft = base, head, draft or DraftConfig()
        self.drafts = head is not None or (draft is not None and (draft.prompt_lookup > 0 or bool(draft.graft)))
        self.drafter, self.slots = Drafter(self.draft), 0 if head is None else head.config.slots
        self.parallel = self.head is not None and self.draft.schedule == "pearl"
        if self.parallel:
            check_angles(base)
        one_pass = self.head is None or isinstance(self.head, OnePassHead)
        self.graphs = base.device.type == "cuda" and one_pass and self.draft.proposal != "sampled"
        measured = ("auto", "measured") if base.device.type == "cpu" else ("measured",)
        serial = self.draft.schedule == "serial" and self.draft.proposal != "sampled"
        fits = self.draft.most_nodes + 1 < base.context_length  # the chains that are timed
        self.measures = self.drafts and self.draft.budget in measured and serial and fits
        self.budget: NDArray[np.float64] | None = None  # of one sequence: seconds of a step with so many nodes
        self.lengths = LengthsBySize(padded=True)  # of several
        self.cold = 2  # steps of several to come that compile
        self._captured: CapturedStep | None = None

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

        settings: temperature, top_k, top_p, repetition_penalty, seed, stop, eos, keep_trees, see Settings. One prompt
        gives a Generation, a list of prompts a list of them. What a request yields depends on its prompt, settings and
        seed alone, not on what it shares a batch with. Raises ValueError on an empty prompt, one that fills the
        context, or settings outside their range.
        """
        listed = not isinstance(prompts, str) and len(prompts) > 0
        several = listed and (isinstance(prompts[0], str) or np.ndim(prompts[0]) > 0)  # type: ignore[arg-type]
        asked = cast(Sequence[Prompt], prompts if several else [prompts])
        requests = requests_of(self.base, asked, max_new_tokens, **settings)
        for _ in self._steps(requests):
            pass
        outs = [request.finished(self.base) for request in requests]
        return outs if several else outs[0]

    def stream(self, prompt: Prompt, max_new_tokens: int, **settings: Unpack[Settings]) -> Iterator[Chunk | Generation]:
        """`generate` for one prompt, step by step: Chunks as they come, and the whole Generation at the end."""
        (request,) = requests_of(self.base, [prompt], max_new_tokens, streamed=True, **settings)
        text, done = request.text, 0
        assert text is not None
        with closing(self._steps([request])) as steps:
            for _ in steps:
                tokens, final = request.tokens[done:], bool(request.out.finish)
                done += len(tokens)
                if final:
                    text.finish()
                yield Chunk(tokens, text.take(final))
        yield request.finished(self.base)

    def prepare(self) -> None:
        """Time steps of one sequence of 0..draft.nodes nodes behind random tokens, once, where the budget is measured.
        `generate` does it for one; who times that comes here first. The steps of several are timed as they come."""
        if not self.measures or self.budget is not None:
            return
        rng, most = np.random.default_rng(0), self.draft.most_nodes
        length = min(PROBE_TOKENS, self.base.context_length - most - 1)
        prompt, nodes = (rng.integers(0, self.base.token_count, n).tolist() for n in (length, most))
        request = Request(prompt, most + 2, eos=())
        request.fit(self.base)
        with self._begun([request]) as step:
            last = [piece[-1:] for piece in request.hidden]
            self._draft(step)
            past = [cache.lengths.copy() for cache in step.caches]

            def rewind() -> None:
                for cache, lengths in zip(step.caches, past, strict=True):
                    cache.lengths[:] = lengths
                request.hidden = last

            def verify(count: int) -> None:
                step.verify([chain_of(nodes[:count], PROBE_PSI)])
                rewind()

            def draft() -> None:  # in fixed shapes a part of `verify`: then only the tree is left to time
                self._draft(step)
                rewind()

            self.budget = step_seconds(most, verify, draft)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What its head drafts with, made when first asked for, and by `renew`, which alone changes weights."""
        assert self.head is not None
        return self.head.vocabulary(self.base, self.draft.top_k)

    def renew(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with other weights of its head from now on; between calls. What was made of the old ones goes."""
        assert self.head is not None
        self.head.load_state_dict(weights)
        self._captured = None
        self.vocabulary = self.head.vocabulary(self.base, self.draft.top_k)

    # -- the loop -------------------------------------------------------------------------------------------

    def eager_step(self, rows: int, capacity: int) -> EagerStep:
        """A step with room for so many sequences of so many cache entries."""
        kind = PearlStep if self.parallel else EagerStep
        return kind(self.base, self.head, self.vocabulary if self.head else None, rows, capacity)

    @torch.inference_mode(False)  # what is made here is kept, for calls in any mode
    def _steps(self, requests: Sequence[Request]) -> Generator[None, None, None]:
        """Decode requests together: a pause behind their first tokens, and one behind each step."""
        if len(requests) == 1:
            self.prepare()
        with self._begun(requests) as step:
            yield
            while step.retire():
                self.advance(step)
                yield

    def advance(self, step: EagerStep) -> None:
        """One step of every request in flight: draft, verify, take what was accepted."""
        began, by_head = time.perf_counter(), step.seconds["draft"]
        drafts = self._draft(step)
        outcomes = step.verify(drafts)
        for request, tree, outcome in zip(step.active, drafts, outcomes, strict=True):
            path, done = outcome.path, len(request.tokens)
            if self.drafts:
                self.drafter.observe(request.frontier, tree, outcome)
            request.append(tree.tokens[path].tolist(), outcome.bonus)
            path = path[: len(request.tokens) - done]  # a stop string may end within it
            request.out.steps += 1
            request.out.nodes.append(len(tree))
            request.out.accepted.append(len(path))
            request.out.expected.append(float(tree.psi.sum()))
            request.out.accepted_from.update(tree.sources(path))
            if request.out.trees is not None:
                request.out.trees.append((tree, path))
        if not self.measures or not step.several:
            return
        if self.cold:  # the first two steps, which compile, tell nothing
            self.cold -= 1
            return
        by_head = step.seconds["draft"] - by_head
        seconds = time.perf_counter() - began - by_head
        requests, lengths = len(drafts), self.lengths.of(len(drafts))
        psi_N = np.concatenate([tree.psi for tree in drafts])
        accepted = [np.isin(np.arange(len(tree)), out.path) for tree, out in zip(drafts, outcomes, strict=True)]
        rows = requests * (1 + max(map(len, drafts)))
        lengths.observe(requests, rows, seconds, psi_N, np.concatenate(accepted))
        if by_head:
            lengths.drafts.observe(requests, by_head)

    @contextmanager
    def _begun(self, requests: Sequence[Request]) -> Iterator[EagerStep]:
        """A step with all requests and their first tokens."""
        capacity = max(len(r.prompt) + r.max_new_tokens for r in requests) + self.draft.most_nodes + 1
        step = self._captured_step(requests, capacity) or self.eager_step(len(requests), capacity)
        try:
            for request in requests:
                step.admit(request)
            yield step
        finally:
            step.end()

    def _captured_step(self, requests: Sequence[Request], capacity: int) -> CapturedStep | None:
        """The fixed-shape step, which is kept; None where it does not apply, or serves another call."""
        kept = self._captured
        alone = len(requests) == 1 and requests[0].sampling.repetition_penalty == 1.0
        if not self.graphs or self.parallel or not alone or (kept and not kept.in_use.acquire(blocking=False)):
            return None
        if kept is None or kept.cache.capacity < capacity:
            room = max(LEAST_CAPACITY, 1 << capacity.bit_length())  # each growth throws all captured steps away
            room = max(capacity, min(room, self.base.context_length + self.draft.most_nodes + 1))
            most = self.draft.most_nodes if self.drafts else 0
            self._captured = kept = CapturedStep(
                self.base,
                self.head,
                self.vocabulary if self.head else None,
                room,
                sizes=[*(n for n in SIZES if n < most and self.measures), most],
                longest=1 + (self.drafter.deepest(self.slots) if self.drafts else 0),
                ahead=self.slots if self.draft.proposal == "shared" else 0,
            )
        return kept

    def _draft(self, step: EagerStep) -> list[Tree]:
        drafts = [EMPTY] * len(step.active)
        if not self.drafts:
            return drafts

        def hints() -> Hints:
            frontiers = [request.frontier for request in step.active]
            return self.drafter.hints(frontiers, self.slots, self.base.vocab_size, self.base.device)

        several = self.measures and step.several
        lengths = self.lengths.of(len(drafts)) if several and not self.cold else None
        if lengths is not None and lengths.sleeps(len(drafts)):
            return drafts
        by_head = self.head is not None and not (lengths and lengths.rests(len(drafts)))  # copies go on
        drafted: Sequence[Drafted] = step.draft(hints) if by_head else drafts
        with step.timed("tree"):
            began = time.perf_counter()
            drafts = [self._propose(r, one) for r, one in zip(step.active, drafted, strict=True)]
            if lengths is not None:
                look = time.perf_counter() - began
                drafts = lengths.cut(drafts, by_head, look, lambda i: self._propose(step.active[i], EMPTY))
            elif several:  # with a node and without, whatever pays
                drafts = [draft.first(self.cold - 1) for draft in drafts]
            elif self.budget is not None and not step.several:
                drafts = [drafts[0].first(best_size(drafts[0], self.budget))]
        return drafts

    def _propose(self, request: Request, drafted: Drafted) -> Tree:
        return self.drafter.tree(drafted, request.frontier)
