"""One decoding step of one sequence in fixed shapes, which a GPU replays as CUDA graphs.

Everything that a step needs to know of the last one (how much is committed, the root) stays on the device: the step
takes a tree, and gives back, in one copy, the accepted path, the bonus token and the candidates of the next draft. It
computes what `Decoder`'s eager step computes, which is its oracle (tests/model/test_static.py).

Shape suffixes: Q rows (root and nodes, padded to a bucket), P rows of the longest path (root included), K cache entries
looked at, V vocabulary, T slots, X candidates, D hidden.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model.base import Base
from ctcdraft.model.cache import TreeCache
from ctcdraft.model.head import Head, Vocabulary, candidates
from ctcdraft.model.lattice import Candidates, Lattice
from ctcdraft.model.layers import Anchors, Sight
from ctcdraft.model.sampling import Sampling, gumbel
from ctcdraft.model.tree import Tree

WARM_UPS = 2  # forwards before a capture: libraries allocate their workspaces in them
LEAST_WIDTH = 256
MOST_SHAPES = 64  # captured steps that are kept: each holds its buffers on the device


class Stepped(NamedTuple):
    """Accepted nodes, the bonus token, the lattice of the next draft (None without a head), seconds of its drafting."""

    path: list[int]
    bonus: int
    lattice: Lattice | None
    draft_seconds: float


def width_of(entries: int) -> int:
    """The bucket of cache entries: in steps of 256, later of an eighth to a quarter of what is needed."""
    step = max(LEAST_WIDTH, 1 << max(0, entries.bit_length() - 3))
    return -(-entries // step) * step


@dataclass
class _Fed:
    """What a tree of at most Q - 1 nodes is on the device: one copy to it. A padding row has token -1."""

    rows: int
    host: Tensor
    device: Tensor

    @classmethod
    def of(cls, rows: int, device: torch.device) -> "_Fed":
        host = torch.zeros(3 * rows + rows * rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(rows, host, host.to(device, copy=True))

    def fill(self, tree: Tree) -> None:
        Q, n = self.rows, len(tree)
        flat = self.host.numpy()
        token, parent, depth = flat[: 3 * Q].reshape(3, Q)
        token[:], parent[:], depth[:] = -1, 0, 0
        token[1 : n + 1], parent[1 : n + 1], depth[1 : n + 1] = tree.tokens, tree.parents + 1, tree.depths
        sees = flat[3 * Q :].reshape(Q, Q)
        sees[:] = np.eye(Q, dtype=np.int32)
        sees[: n + 1, : n + 1] = tree.ancestors()
        self.device.copy_(self.host, non_blocking=True)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """token, parent row, depth [Q] and whom each row sees [Q, Q]."""
        Q = self.rows
        token, parent, depth = self.device[: 3 * Q].view(3, Q).long()
        return token, parent, depth, self.device[3 * Q :].view(Q, Q).bool()


class StaticDecoder:
    """The device's side of decoding one sequence after another with one base, head and cache.

    longest: rows of the longest path that a draft may hold, the root included. capture: record each shape of step once
    and replay it (CUDA); otherwise the same functions run as they are.
    """

    def __init__(
        self,
        base: Base,
        head: Head | None,
        vocabulary: Vocabulary | None,
        capacity: int,
        layers: int,
        longest: int,
        capture: bool,
    ) -> None:
        self.base, self.head, self.vocabulary, self.capture = base, head, vocabulary, capture
        self.capacity = width_of(capacity)
        self.cache = TreeCache(layers, 1, self.capacity)
        self.head_cache = None if head is None else head.new_cache(1, self.capacity, self.cache)
        device = base.device
        self.past = torch.zeros(1, dtype=torch.long, device=device)  # committed entries, the root not among them
        self.root = torch.zeros(1, dtype=torch.long, device=device)
        self.longest = longest
        self.count = torch.ones(1, dtype=torch.long, device=device)  # rows that the last step kept
        self.noise_PV = torch.zeros(0, dtype=torch.float64, device=device)  # [longest, V] where sampling needs it
        self.in_use = False  # by a batch; another one meanwhile is decoded eagerly
        self._shapes: dict[tuple[int, int, Sampling], _Shape] = {}

    def clear(self) -> None:
        """Forget the sequence."""
        self.cache.clear()
        if self.head_cache is not None:
            self.head_cache.clear()

    def begin(self, root: int) -> None:
        """The caches hold what is committed, `root` follows it."""
        self.past.fill_(int(self.cache.lengths[0]))
        self.root.fill_(root)

    def step(self, tree: Tree, rows: int, sampling: Sampling, seed: int, length: int) -> Stepped:
        """Verify a tree in `rows` rows, keep the accepted path, draft anew. length: the root's position plus one."""
        committed = int(self.cache.lengths[0])
        key = (rows, width_of(committed + rows), sampling)
        if sampling.temperature:
            self._draw(int(tree.depths.max(initial=0)), sampling, seed, length)
        if key not in self._shapes:
            if len(self._shapes) == MOST_SHAPES:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[key] = _Shape(self, *key)
        found = self._shapes[key].run(tree)
        kept = len(found.path) + 1
        self.cache.lengths[0] += kept
        if self.head_cache is not None:
            self.head_cache.lengths[0] += kept
        return found

    def _draw(self, deepest: int, sampling: Sampling, seed: int, length: int) -> None:
        V, device = self.base.vocab_size, self.base.device
        if not len(self.noise_PV):
            self.noise_PV = torch.zeros(self.longest, V, dtype=torch.float64, device=device)
        for depth in range(deepest + 1):
            self.noise_PV[depth] = gumbel(seed, length + depth, V, device)


class _Shape:
    """The two halves of a step for one number of rows and one width of the cache: verify, then draft."""

    def __init__(self, owner: StaticDecoder, rows: int, width: int, sampling: Sampling) -> None:
        self.owner, self.rows, self.width, self.sampling = owner, rows, width, sampling
        self.fed = _Fed.of(rows, owner.base.device)
        self.longest = min(rows, owner.longest)
        self.found: Candidates | None = None
        self.replay: list[Callable[[], None]] | None = None
        none = torch.zeros(0, device=owner.base.device)
        self.hidden_PD = self.following_P = self.verified = self.answer = self.host = none

    @torch.no_grad()
    def run(self, tree: Tree) -> Stepped:
        self.fed.fill(tree)
        if self.replay is None:
            self.replay = self._captured() if self.owner.capture else [self._verify, self._draft]
        marks = _Marks(self.owner.base.device)
        for half in self.replay:
            half()
            marks.set()
        if self.host.shape != self.answer.shape:
            self.host = torch.empty_like(self.answer, device="cpu", pin_memory=self.answer.is_cuda)
        self.host.copy_(self.answer, non_blocking=True)
        return self._read(self.host.numpy(), marks.seconds()[1])

    def _captured(self) -> list[Callable[[], None]]:
        """Both halves as CUDA graphs. They move `past` and `root` on and write entries beyond what is committed, so
        what they changed in being tried out is put back. A base that cannot be captured runs them as they are."""
        owner = self.owner
        past, root = owner.past.clone(), owner.root.clone()
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    owner.past.copy_(past)
                    self._verify()
                    self._draft()
            torch.cuda.current_stream().wait_stream(stream)
            return [_graph_of(self._verify), _graph_of(self._draft)]
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            warnings.warn(f"{owner.base.name} is decoded without CUDA graphs: {reason}", stacklevel=2)
            owner.capture = False
            return [self._verify, self._draft]
        finally:
            owner.cache.at(None)
            owner.past.copy_(past)
            owner.root.copy_(root)

    def _verify(self) -> None:
        """Forward under the tree mask, choose, accept, compact; the accepted rows stay in the owner's buffers."""
        owner, Q, K = self.owner, self.rows, self.width
        device = owner.base.device
        token_Q, parent_Q, depth_Q, sees_QQ = self.fed.parts()
        row_Q = torch.arange(Q, device=device)
        ids_Q = torch.cat([owner.root, token_Q[1:].clamp(min=0)])
        slots_Q = owner.past + row_Q
        own_K = torch.arange(K, device=device) - owner.past  # the row that an entry belongs to
        inside_K = (own_K >= 0) & (own_K < Q)
        allowed_QK = (own_K < 0) | (inside_K & sees_QQ[:, own_K.clamp(0, Q - 1)])
        blocked = torch.finfo(owner.base.dtype).min
        mask_QK = torch.zeros(Q, K, dtype=owner.base.dtype, device=device).masked_fill_(~allowed_QK, blocked)
        owner.cache.at(slots_Q, K)
        hidden_1QD = owner.base.hidden(
            ids_Q.unsqueeze(0),
            attention_mask=mask_QK[None, None],
            position_ids=(owner.past + depth_Q).unsqueeze(0),
            cache=owner.cache,
        )
        owner.cache.at(None)
        noise_QV = None if not self.sampling.temperature else owner.noise_PV.index_select(0, depth_Q)
        targets_Q = self.sampling.choose(owner.base.logits(hidden_1QD[0]), None, noise_QV)
        said_Q = (token_Q == targets_Q[parent_Q]) | (row_Q == 0)
        accepted_Q = ~(sees_QQ & ~said_Q).any(dim=1)  # a node is, where it and all its ancestors are what was chosen
        owner.count.copy_(accepted_Q.sum())
        order_P = torch.where(accepted_Q, row_Q, row_Q + Q).sort().values[: self.longest] % Q  # then rejected rows
        owner.cache.move(owner.past + order_P, owner.past + row_Q[: self.longest])
        following_P = targets_Q[order_P]
        owner.root.copy_(following_P.index_select(0, owner.count - 1))
        owner.past.add_(owner.count)
        self.hidden_PD, self.following_P = hidden_1QD[0, order_P], following_P
        self.answer = self.verified = torch.cat([owner.count, order_P, following_P]).int()

    def _draft(self) -> None:
        """The head over the accepted rows, and the candidates of its slots; all into `answer`."""
        owner = self.owner
        if owner.head is None or owner.head_cache is None or owner.vocabulary is None:
            return
        dtype, device = next(owner.head.parameters()).dtype, owner.base.device
        slots_P = owner.past - owner.count + torch.arange(self.longest, device=device)
        seen_PK = torch.arange(self.width, device=device) <= slots_P.unsqueeze(1)
        for cache in (owner.cache, owner.head_cache):
            cache.at(slots_P, self.width)
        root_1PD = owner.vocabulary.embed(self.following_P.unsqueeze(0), dtype)
        sight = Sight(slots_P.unsqueeze(0), seen_PK[None, None])
        context = owner.head.encode(self.hidden_PD.to(dtype).unsqueeze(0), root_1PD, sight, owner.head_cache)
        for cache in (owner.cache, owner.head_cache):
            cache.at(None)
        slots = owner.head.fill(context, Anchors.one_per_row(owner.count - 1), sight)
        self.found = candidates(slots, owner.root, owner.head, owner.vocabulary)
        self.answer = torch.cat([self.verified, self.found.packed()[0]])

    def _read(self, answer: NDArray[np.int32], draft_seconds: float) -> Stepped:
        P, count = self.longest, int(answer[0])
        path = [int(row) - 1 for row in answer[2 : 1 + count]]
        bonus = int(answer[P + count])
        if self.found is None:
            return Stepped(path, bonus, None, 0.0)
        (lattice,) = self.found.unpacked(answer[None, 1 + 2 * P :])
        return Stepped(path, bonus, lattice, draft_seconds)


def _graph_of(half: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        half()
    return graph.replay


class _Marks:
    """Points on the device's own time line (a CPU's is the host's). `seconds` waits until the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.marks: list[Any] = []
        self.set()

    def set(self) -> None:
        if self.on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next."""
        if not self.on_device:
            return [b - a for a, b in pairwise(self.marks)]
        torch.cuda.current_stream().synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.marks)]
