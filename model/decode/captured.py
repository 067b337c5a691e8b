"""A decoding step of one sequence in fixed shapes, which a GPU replays as CUDA graphs.

A step takes a tree, and gives back, in one copy, the accepted path, the token behind it and the candidates of the next
draft. It computes what `EagerStep` computes, which is its oracle (tests/model/decode/test_captured.py).

Shape suffixes: Q rows (root and nodes, padded to a bucket), P rows of the longest path (root included), K cache entries
looked at, V vocabulary, T slots, X candidates, D hidden.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
import torch

from ..base.context import Anchors, AttentionMask
from ..base.llm import Base
from ..base.sampling import Sampling, gumbel
from ..draft.drafter import Outcome
from ..draft.growth import Drafted, Hints
from ..draft.tree import Tree
from ..heads.head import Head, OnePassHead, Vocabulary
from ..lattice.candidates import Candidates, Lattice
from .step import EagerStep

LEAST_WIDTH = 256
MOST_SHAPES = 64  # captured steps that are kept: each holds its buffers on the device


def width_of(entries: int) -> int:
    """The bucket of cache entries: in steps of 256, later of an eighth to a quarter of what is needed."""
    step = max(LEAST_WIDTH, 1 << max(0, entries.bit_length() - 3))
    return -(-entries // step) * step


class CapturedStep(EagerStep):
    """Of one sequence after the other; the first draft behind a prompt, whose length is any, is the eager one.

    sizes: the numbers of nodes that drafts are padded to, rising. longest: rows of the longest path that a draft may
    hold, the root included. ahead: positions of the next draft, where that looks at the noise that the base will choose
    with. capture: record each shape of step once and replay it (CUDA); otherwise the same functions run as they are.
    """

    def __init__(
        self,
        base: Base,
        head: Head | None,
        vocabulary: Vocabulary | None,
        capacity: int,
        *,
        sizes: Sequence[int],
        longest: int,
        ahead: int,
    ) -> None:
        super().__init__(base, head, vocabulary, 1, width_of(capacity))
        self.sizes, self.longest, self.ahead = sizes, longest, ahead
        self.capture = base.device.type == "cuda"
        self.noise_PV = torch.zeros(0, dtype=torch.float64, device=base.device)  # [longest + ahead, V] where needed
        self._shapes: dict[tuple[int, int, Sampling], _Shape] = {}
        self.drafted: Lattice | None = None  # behind the last step
        self.in_use = Lock()  # by one call at a time, the first of which makes it
        self.in_use.acquire()

    def end(self) -> None:
        self.begin()
        self.drafted = None
        self.in_use.release()

    def verify(self, drafts: Sequence[Tree]) -> list[Outcome]:
        """As the eager step does, and the next draft with it."""
        (request,), (tree,) = self.active, drafts
        past, rows = int(self.cache.lengths[0]), 1 + next(size for size in self.sizes if len(tree) <= size)
        # A new stream or event is of the current device, and that may be another one than the base's.
        with self.timed("verify"), torch.cuda.device_of(self.noise_PV):
            if request.sampling.temperature:
                V, device = self.base.vocab_size, self.base.device
                if not len(self.noise_PV):
                    self.noise_PV = torch.zeros(self.longest + self.ahead, V, dtype=torch.float64, device=device)
                for depth in range(1 + int(tree.depths.max(initial=0)) + self.ahead):
                    self.noise_PV[depth] = gumbel(request.seed, request.length + depth, V, device)
            width, sampling = width_of(past + rows), request.sampling
            if (rows, width, sampling) not in self._shapes:
                if len(self._shapes) == MOST_SHAPES:
                    del self._shapes[next(iter(self._shapes))]
                self._shapes[rows, width, sampling] = _Shape(self, rows, width, sampling)
            shape = self._shapes[rows, width, sampling]
            outcome, self.drafted = shape.run(tree, request.root, past)
        self.seconds["verify"] -= shape.draft_seconds
        self.seconds["draft"] += shape.draft_seconds
        self.cache.lengths[0] += len(outcome.path) + 1
        return [outcome]

    def draft(self, hints: Callable[[], Hints]) -> Sequence[Drafted]:
        return super().draft(hints) if self.drafted is None else [self.drafted]


class _Shape:
    """The two halves of a step for one number of rows and one width of the cache: verify, then draft."""

    def __init__(self, step: CapturedStep, rows: int, width: int, sampling: Sampling) -> None:
        self.step, self.rows, self.width, self.sampling = step, rows, width, sampling
        self.longest = min(rows, step.longest)
        # Committed entries, then each row's token (-1: padding), parent and depth, and whom it sees: one copy.
        self.host_given = torch.zeros(1 + 3 * rows + rows * rows, dtype=torch.int32, pin_memory=step.capture)
        self.given = self.host_given.to(step.base.device, copy=True)
        self.halves: list[Callable[[], None]] = []
        self.ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if step.capture else []
        self.draft_seconds = 0.0  # of the last run, by the device's own clock
        self.found: Candidates | None = None

    @torch.no_grad()
    def run(self, tree: Tree, root: int, past: int) -> tuple[Outcome, Lattice | None]:
        """What becomes of the draft, and the lattice of the next one (None without a head)."""
        Q, rows, flat = self.rows, len(tree) + 1, self.host_given.numpy()
        flat[0], flat[1:] = past, 0
        token, parent, depth = flat[1 : 1 + 3 * Q].reshape(3, Q)
        token[0], token[1:rows], token[rows:] = root, tree.tokens, -1
        parent[1:rows], depth[1:rows] = tree.parents + 1, tree.depths
        sees = flat[1 + 3 * Q :].reshape(Q, Q)
        np.fill_diagonal(sees, 1)
        sees[:rows, :rows] = tree.ancestors()
        self.given.copy_(self.host_given, non_blocking=True)
        if not self.halves:
            halves = [self._verify] if self.step.head is None else [self._verify, self._draft]
            self.halves = self._captured(halves) if self.step.capture else halves
        for number, half in enumerate(self.halves):
            half()
            if self.ends:
                self.ends[number].record()
        answer = self.answer.cpu().numpy()  # which waits for the device
        if self.ends and self.found is not None:
            self.draft_seconds = self.ends[0].elapsed_time(self.ends[1]) / 1e3
        P, count = self.longest, int(answer[0])
        order, said = answer[1 : 1 + P], answer[1 + P : 1 + P + Q]
        path = [int(row) - 1 for row in order[1:count]]
        lattice = None if self.found is None else self.found.unpacked(answer[None, 1 + P + Q :])[0]
        outcome = Outcome(path, int(said[order[count - 1]]), dict(enumerate(said[:rows].tolist())))
        return outcome, lattice

    def _captured(self, halves: list[Callable[[], None]]) -> list[Callable[[], None]]:
        """Both halves as CUDA graphs. A base that cannot be captured runs them as they are."""
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for mode in ("default", "error"):  # libraries allocate their workspaces; then what waits is refused
                    with _sync_debug_mode(mode):
                        for half in halves:
                            half()
            torch.cuda.current_stream().wait_stream(stream)
            return [_graph_of(half) for half in halves]
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            warnings.warn(f"{self.step.base.name} is decoded without CUDA graphs: {reason}", stacklevel=2)
            self.step.capture = False
            return halves

    def _verify(self) -> None:
        """Forward under the tree mask, choose, accept, compact; what the head drafts from stays in buffers."""
        base, cache, Q, K = self.step.base, self.step.cache, self.rows, self.width
        past_1 = self.given[:1].long()
        token_Q, parent_Q, depth_Q = self.given[1 : 1 + 3 * Q].view(3, Q).long()
        sees_QQ = self.given[1 + 3 * Q :].view(Q, Q).bool()
        row_Q = torch.arange(Q, device=base.device)
        own_K = torch.arange(K, device=base.device) - past_1  # the row that an entry belongs to
        inside_K = (own_K >= 0) & (own_K < Q)
        allowed_QK = (own_K < 0) | (inside_K & sees_QQ[:, own_K.clamp(0, Q - 1)])
        mask = AttentionMask((past_1 + depth_Q).unsqueeze(0), allowed_QK[None, None])
        with cache.fixed(past_1 + row_Q, K):
            ids_1Q = token_Q.clamp(min=0).unsqueeze(0)
            hidden_1QD = base.hidden(ids_1Q, mask, cache=cache, attended=self.step.attended)
        noise_QV = None if not self.sampling.temperature else self.step.noise_PV.index_select(0, depth_Q)
        targets_Q = self.sampling.choose(base.logits(hidden_1QD[0]), None, noise_QV, captured=True)
        said_Q = (token_Q == targets_Q[parent_Q]) | (row_Q == 0)
        accepted_Q = ~(sees_QQ & ~said_Q).any(dim=1)  # a node is, where it and all its ancestors are what was chosen
        order_P = torch.where(accepted_Q, row_Q, row_Q + Q).sort().values[: self.longest] % Q  # then rejected rows
        cache.move(past_1 + order_P, past_1 + row_Q[: self.longest])
        count_1 = accepted_Q.sum().unsqueeze(0)
        last_1 = order_P.index_select(0, count_1 - 1)
        self.hidden_11D, self.root_1 = hidden_1QD.index_select(1, last_1), targets_Q.index_select(0, last_1)
        self.count_1, self.position_1 = count_1, past_1 + count_1 - 1
        self.answer = self.verified = torch.cat([count_1, order_P, targets_Q]).int()

    def _draft(self) -> None:
        """The head behind the last accepted row, and the candidates of its slots; all into `answer`."""
        head, vocabulary, cache = self.step.head, self.step.vocabulary, self.step.cache
        assert isinstance(head, OnePassHead)
        assert vocabulary is not None
        dtype = next(head.parameters()).dtype
        root_11D = head.embedded(vocabulary.tokens, self.root_1.unsqueeze(0), dtype)
        anchors = Anchors.one_per_row(torch.zeros_like(self.position_1), AttentionMask(self.position_1.unsqueeze(0)))
        with cache.fixed(self.position_1, self.width):
            slots = head.fill(self.hidden_11D.to(dtype), root_11D, anchors, cache, vocabulary.tokens)
        noise_1TV = None
        if self.sampling.temperature and self.step.ahead:
            slot_T = self.count_1 + torch.arange(self.step.ahead, device=self.count_1.device)
            noise_1TV = (self.step.noise_PV.index_select(0, slot_T) * self.sampling.temperature).float().unsqueeze(0)
        self.found = head.candidates(slots, self.root_1, vocabulary, noise_1TV)
        self.answer = torch.cat([self.verified, self.found.packed()[0]])


@contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    """error: RuntimeError where the host waits for the device. A capture that fails leaves torch's random generator
    unusable, so this comes before it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _graph_of(half: Callable[[], None]) -> Callable[[], None]:
    """Python's collector must not free another graph meanwhile: the capture would be void."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # torch's own is of the device that captured first
            half()
    finally:
        if collects:
            gc.enable()
    return graph.replay
