"""One decoding step of several sequences: verify trees in one base forward, then draft the next ones.

Shape suffixes: B sequences, Q rows of the longest draft (root, nodes, padding), R rows that choose, D hidden size, V
vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..base.cache import TreeCache
from ..base.llm import Base
from ..base.sampling import gumbel
from ..draft.drafter import Outcome
from ..draft.growth import Drafted, Hints
from ..draft.tree import EMPTY, Tree, tree_mask
from ..heads.head import Head, Vocabulary
from ..lattice.candidates import Lattice
from .accept import accept_drawn
from .request import Request

LIKELY = 0.1  # psi of the nodes whose logits a CPU computes together, before the walk comes by
LONG_REST = 1024  # rows behind a shared beginning: beyond, their mask costs more than to read a shorter one again
LEAST_ROWS = 4  # of logits that it computes together: in float32, MKL takes longer for two or three

Place = tuple[Request, Tree, int]  # where the base says something: behind the root (row 0) or node row - 1 of a draft


class EagerStep:
    """The requests in flight, sequence b of the caches for `active[b]`, and what a step does with them: `verify` their
    drafts, then `draft` anew. Every shape is as it comes.

    The caches have room for `rows` sequences of `capacity` entries.
    """

    def __init__(self, base: Base, head: Head | None, vocabulary: Vocabulary | None, rows: int, capacity: int) -> None:
        self.base, self.head, self.vocabulary = base, head, vocabulary
        self.attended = None if head is None else head.attended
        self.cache = TreeCache(base.depth, rows, capacity)
        self.own_cache = own = None if head is None else head.new_cache(rows, capacity)
        self.caches = [self.cache] if own is None else [self.cache, own]
        self.unread = slice(-1, None) if own is None else slice(None)  # of new states, those that the head has to see
        self.begin()

    @property
    def several(self) -> bool:
        """Is there room for more than one?"""
        return len(self.cache.lengths) > 1

    def begin(self) -> None:
        """Forget every sequence, keep the memory."""
        self.active: list[Request] = []
        self.seconds: dict[str, float] = defaultdict(float)
        for cache in self.caches:
            cache.clear()

    def end(self) -> None:
        """A call is done with it."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds to seconds of that part. `verify` and `draft` end with a copy to the host, so they wait for a device."""
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    @torch.no_grad()
    def admit(self, request: Request, row: int | None = None) -> None:
        """Read a prompt and choose its first token; row: of an active request, whose place it takes. `Request.fit` came
        before.

        What the prompt has in common with one of the rows is copied from there: a system prompt, earlier turns. A head
        with a cache of its own has to see every state, so for it all is read.
        """
        base, cache = self.base, self.cache
        request.out.seconds = self.seconds
        with self.timed("verify"):
            row = len(self.active) if row is None else row
            source, shared = self._longest_shared(request) if self.own_cache is None else (row, 0)
            for each in self.caches:
                each.begin(row, source, shared)
            self.active[row : row + 1] = [request]
            ids_1L = torch.tensor([request.prompt[shared:]], device=base.device)
            with cache.only(row):
                mask = cache.causal_mask(ids_1L.shape[1], base.device)
                hidden_1LD = base.hidden(ids_1L, mask, cache=cache, attended=self.attended)
            cache.lengths[row] = len(request.prompt)
            if request.sampling.repetition_penalty != 1.0:
                request.seen_V = torch.zeros(base.vocab_size, dtype=torch.bool, device=base.device)
                request.seen_V[request.prompt] = True
            (root,) = self._choose(base.logits(hidden_1LD[:, -1]), [(request, EMPTY, 0)])
        request.append([], root)
        if self.head is not None:
            request.hidden = [hidden_1LD[0, self.unread]]

    def _longest_shared(self, request: Request) -> tuple[int, int]:
        """The row that begins with most of a prompt, and how many tokens these are; the last is always read. 0 where
        they are not worth the mask of what is behind them."""
        source, most = 0, 0
        for row, other in enumerate(self.active):
            pairs = zip(request.prompt[:-1], other.prompt + other.tokens[:-1], strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if shared > most:
                source, most = row, shared
        rest = len(request.prompt) - most
        return source, most if rest <= max(most, LONG_REST) else 0

    def retire(self) -> bool:
        """Forget the requests that have ended; are there others?"""
        for row in reversed(range(len(self.active))):
            if self.active[row].out.finish:
                self.drop(row)
        return bool(self.active)

    def drop(self, row: int) -> None:
        """Forget a request: the last one takes its row."""
        for cache in self.caches:
            cache.drop(row)
        self.active[row] = self.active[-1]
        self.active.pop()

    def verify(self, drafts: Sequence[Tree]) -> list[Outcome]:
        """What becomes of each request's draft. The caches then hold what is accepted."""
        with self.timed("verify"):
            found, hidden_BQD = self._verified(drafts)
        with self.timed("other"):
            self._commit(found, hidden_BQD)
        return found

    @torch.no_grad()
    def _verified(self, drafts: Sequence[Tree]) -> tuple[list[Outcome], Tensor]:
        """What becomes of the drafts, and the base's states; nothing is committed."""
        active = self.active
        tokens_BQ = np.zeros((len(active), 1 + max(map(len, drafts))), np.int64)
        for b, (request, tree) in enumerate(zip(active, drafts, strict=True)):
            tokens_BQ[b, 0], tokens_BQ[b, 1 : len(tree) + 1] = request.root, tree.tokens
        ids_BQ = torch.from_numpy(tokens_BQ).to(self.base.device)
        mask = tree_mask(drafts, self.cache.lengths[: len(active)], self.base.device)
        hidden_BQD = self.base.hidden(ids_BQ, mask, cache=self.cache, attended=self.attended)
        return self._walks(drafts, hidden_BQD), hidden_BQD

    def _commit(self, found: Sequence[Outcome], hidden_BQD: Tensor) -> None:
        kept = [[0, *(node + 1 for node in one.path)] for one in found]
        self.cache.commit(kept)
        if self.head is not None:
            for b, request in enumerate(self.active):
                request.hidden = [*request.hidden, hidden_BQD[b, kept[b][self.unread]]][self.unread]

    def draft(self, hints: Callable[[], Hints]) -> Sequence[Drafted]:
        """What the head expects behind each root."""
        with self.timed("draft"):
            return self._drafted(hints())

    @torch.no_grad()
    def _drafted(self, hints: Hints) -> list[Lattice | Tree]:
        """The head over every position that it has not seen yet; sequences of unequal numbers of them are padded."""
        assert self.head is not None
        assert self.vocabulary is not None
        hidden = [torch.cat(request.hidden) for request in self.active]
        counts = list(map(len, hidden))
        following = [torch.tensor(r.read[-count:]) for r, count in zip(self.active, counts, strict=True)]
        hidden_BLD = pad_sequence(hidden, True).to(next(self.head.parameters()).dtype)
        following_BL = pad_sequence(following, True).to(self.base.device)
        anchors = self.cache.newest(counts, max(counts), self.base.device)
        if self.own_cache is not None:
            self.own_cache.reserve(self.own_cache.get_seq_length() + max(counts))
        for request in self.active:
            request.hidden = []
        return self.head.drafts(
            hidden_BLD, following_BL, anchors, self.vocabulary, self.cache, hints=hints, own=self.own_cache
        )

    def _walks(self, drafts: Sequence[Tree], hidden_BQD: Tensor) -> list[Outcome]:
        """Along each tree from its root, to the child that holds what the base chooses where we stand; where children
        were drawn, to the first that multi-candidate sampling accepts."""
        active, hidden_RD = self.active, hidden_BQD.flatten(0, 1)
        rows = [[] if tree.proposals else list(range(len(tree) + 1)) for tree in drafts]  # computed before the walk
        for b, tree in enumerate(drafts):
            if self._lazy and len(rows[b]) > 1:  # likely ones, since each alone would be a pass over the LM head
                likely = [0, *(np.flatnonzero(tree.psi >= LIKELY) + 1).tolist()]
                rows[b] = likely if len(likely) >= LEAST_ROWS else rows[b][:LEAST_ROWS]
        first_R = [b * hidden_BQD.shape[1] + row for b, own in enumerate(rows) for row in own]
        if len(first_R) < len(hidden_RD):
            hidden_RD = hidden_RD[first_R]
        places = [(active[b], drafts[b], row) for b, own in enumerate(rows) for row in own]
        chosen = iter(self._choose(self.base.logits(hidden_RD), places))
        known = [dict(zip(own, chosen, strict=False)) for own in rows]

        def said(b: int, row: int) -> int:
            if row not in known[b]:
                logits_1V = self.base.logits(hidden_BQD[b, [row]])
                (known[b][row],) = self._choose(logits_1V, [(active[b], drafts[b], row)])
            return known[b][row]

        def walk(b: int, tree: Tree) -> Outcome:
            if tree.proposals is not None:
                return Outcome(*accept_drawn(tree, active[b], lambda row: self.base.logits(hidden_BQD[b, [row]])), {})
            path, bonus = tree.walk(lambda row: said(b, row))
            return Outcome(path, bonus, known[b])

        return [walk(b, tree) for b, tree in enumerate(drafts)]

    @property
    def _lazy(self) -> bool:
        """Are logits of unlikely nodes computed when a walk comes by? On a CPU a row costs its share of a GEMM, and a
        sample a sort; an accelerator would be waited for each time."""
        return self.base.device.type == "cpu"

    def _choose(self, logits_RV: Tensor, places: Sequence[Place]) -> list[int]:
        """What the base says at each place, places of one kind of sampling together."""
        chosen, V = [0] * len(places), logits_RV.shape[1]
        for sampling in {request.sampling for request, _, _ in places}:
            rows = [i for i, (request, _, _) in enumerate(places) if request.sampling == sampling]
            noise_RV = seen_RV = None
            own = [places[i] for i in rows]
            if sampling.temperature:
                noise = []
                for request, tree, row in own:
                    depth = int(tree.depths[row - 1]) if row else 0
                    noise.append(gumbel(request.seed, request.length + depth, V, logits_RV.device))  # kept for siblings
                noise_RV = torch.stack(noise)
            if sampling.repetition_penalty != 1.0:
                seen_RV = torch.stack([request.seen_behind(tree, row) for request, tree, row in own])
            found = sampling.choose(logits_RV if len(rows) == len(places) else logits_RV[rows], seen_RV, noise_RV)
            for i, token in zip(rows, found.tolist(), strict=True):
                chosen[i] = token
        return chosen
