"""Keys and values of base or head for several sequences of unequal lengths: allocated once, compacted in place.

One tensor per shape of keys and values, usually one for all of them, so that keeping the accepted path of a tree is one
indexed copy. Shape suffixes: B sequences, Q new positions, P moved ones; a block is [rows, B, heads, capacity, width],
and each layer has a row for its keys and one for its values.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .context import Anchors, AttentionMask, KeysAndValues

CAPACITY_STEP = 256  # entries by which it grows


class PassingCache(Cache):
    """The keys and values that stand before the rows of a forward, by layer, and those that `watched` layers make,
    `made[layer]`: keys, already turned, and values, [B, heads, rows, width] each.

    keeps: all that is made stands before the rows of the next forward; else nothing is kept. places: where the entries
    stand [B, S], for layers with a window; None: each at its own number.
    """

    def __init__(
        self,
        before: KeysAndValues | None = None,
        watched: Sequence[int] = (),
        *,
        keeps: bool = False,
        places_BS: Tensor | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.before, self.watched, self.keeps, self.places_BS = dict(before or {}), watched, keeps, places_BS
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # of some layers nothing: they look at another's

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return next(iter(self.before.values()))[0].shape[2] if self.before else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        made = seen = key_states, value_states
        if layer_idx in self.watched:
            self.made[layer_idx] = made
        if before := self.before.get(layer_idx):
            keys, values = (torch.cat([old.to(new), new], dim=2) for old, new in zip(before, made, strict=True))
            seen = keys, values
        if self.keeps:
            self.before[layer_idx] = seen
        return seen

    def flat(self) -> Tensor:
        """Of each row the keys of all watched layers and heads, then their values: [B, rows, 2 * heads * width]."""
        pairs = [self.made[layer] for layer in self.watched]
        both = torch.stack([torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True)], dim=1)
        return both.permute(0, 3, 1, 2, 4).flatten(2)


class TreeCache(Cache):
    """`lengths[b]` committed entries of sequence b; what a forward appends after them is a draft until `commit`.

    batch: how many sequences have room; all of them are there until `clear`, behind which `begin` takes one.

    A forward is about all of the first `batch` sequences, about `only` one (its prompt), or, where shapes may not move,
    about rows at places that only the device knows (`fixed`).
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.lengths = np.zeros(batch, np.int64)
        self.batch, self.capacity = batch, capacity
        self._layers = layers
        self._blocks: list[Tensor] = []
        self._free: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # by heads, width: block, row
        self._place: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}  # of each layer's keys, of its values
        self._only: int | None = None
        self._index: tuple[Tensor, Tensor]  # where a forward of several sequences writes
        self._fixed: tuple[Tensor, int] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        lengths = self.lengths[self._sequences]
        return int(lengths.max()) if len(lengths) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Entries that a forward of so many rows sees, and where they begin: for the masks that transformers makes."""
        return self.get_seq_length() + query_length, 0

    @property
    def _sequences(self) -> slice:
        return slice(self.batch) if self._only is None else slice(self._only, self._only + 1)

    @property
    def is_filled(self) -> bool:
        """Has any layer written keys and values?"""
        return bool(self._place)

    @contextmanager
    def only(self, sequence: int) -> Iterator[None]:
        """Forwards hold this sequence alone."""
        self._only = sequence
        try:
            yield
        finally:
            self._only = None

    @contextmanager
    def fixed(self, slots_Q: Tensor, width: int) -> Iterator[None]:
        """Forwards write entries `slots` [Q] of the first sequence, and give back those below `width`, for a mask to
        choose from."""
        self._fixed = slots_Q, width
        try:
            with self.only(0):
                yield
        finally:
            self._fixed = None

    def causal_mask(self, rows: int, device: torch.device) -> AttentionMask:
        """What `rows` new positions of each sequence see: its own committed ones, and those before them."""
        past_B1 = torch.from_numpy(self.lengths[self._sequences, None]).to(device)
        positions_BL = past_B1 + torch.arange(rows, device=device)
        longest = self.get_seq_length()
        if longest == 0 or (rows == 1 and len(past_B1) == 1):
            return AttentionMask(positions_BL, None)
        entry_S = torch.arange(longest + rows, device=device)
        return AttentionMask(positions_BL, (entry_S <= positions_BL.unsqueeze(2)).unsqueeze(1))

    def newest(self, counts: Sequence[int], rows: int, device: torch.device) -> Anchors:
        """The last of counts[b] <= rows positions of each sequence that were committed last."""
        count_B = torch.tensor(counts, device=device)
        first_B = torch.from_numpy(self.lengths[: len(counts)]).to(device) - count_B
        mask = AttentionMask(first_B.unsqueeze(1) + torch.arange(rows, device=device))
        return Anchors.one_per_row(count_B - 1, mask)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write Q new entries per sequence behind its committed ones; all keys and values up to the longest."""
        if layer_idx not in self._place:  # in blocks of their shapes, or in new ones for all layers that are left
            left = max(1, self._layers - len(self._place))
            rows = 2 * left if key_states.shape == value_states.shape else left
            self._place[layer_idx] = self._row(key_states, rows), self._row(value_states, rows)
        Q, device = key_states.shape[2], key_states.device
        keys, values = self.committed(layer_idx, Q)
        if layer_idx == next(iter(self._place)) and len(keys) > 1:  # for all layers
            slots = torch.from_numpy(self.lengths[: self.batch, None] + np.arange(Q)[None]).to(device)
            self._index = torch.arange(self.batch, device=device)[:, None], slots
        for seen, made in ((keys, key_states), (values, value_states)):
            if self._fixed is not None:
                seen[0].index_copy_(1, self._fixed[0], made[0])
            elif len(seen) == 1:
                seen[0, :, self.get_seq_length() :] = made[0]
            else:
                sequence_B1, slot_BQ = self._index
                seen[sequence_B1, :, slot_BQ] = made.transpose(1, 2)
        return keys, values

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """Of what the last forward appended to sequence b, commit entries rows[b], in order; drop the rest."""
        past = self.lengths.tolist()
        moved = [
            (b, past[b] + row, past[b] + place)
            for b, kept in enumerate(rows)
            for place, row in enumerate(kept)
            if row != place
        ]
        if moved:
            sequence_P, source_P, target_P = torch.tensor(moved, device=self._blocks[0].device).T
            if len(self.lengths) == 1:
                self.move(source_P, target_P)  # in a third of the time
            else:
                for block in self._blocks:
                    block[:, sequence_P, :, target_P] = block[:, sequence_P, :, source_P]
        for b, kept in enumerate(rows):
            self.lengths[b] += len(kept)

    def move(self, source_P: Tensor, target_P: Tensor) -> None:
        """Copy entries of the only sequence; places are on the device."""
        for block in self._blocks:
            block.index_copy_(3, target_P, block.index_select(3, source_P))

    def drop(self, sequence: int) -> None:
        """Forget a sequence: the last one takes its place."""
        last = self.batch - 1
        self.begin(sequence, last, int(self.lengths[last]))
        self.batch = last

    def begin(self, sequence: int, source: int, length: int) -> None:
        """A sequence, one of those in use or the next, then holds the first `length` entries of another, or of its own,
        and nothing else."""
        self.batch = max(self.batch, sequence + 1)
        if sequence != source:
            for block in self._blocks:
                block[:, sequence, :, :length] = block[:, source, :, :length]
        self.lengths[sequence] = length

    def reserve(self, capacity: int) -> None:
        """Make room for so many entries per sequence; what is committed is copied where it was less."""
        if capacity <= self.capacity:
            return
        capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        end = self.get_seq_length()
        for number, block in enumerate(self._blocks):
            rows, sequences, heads, _, width = block.shape
            grown = block.new_zeros(rows, sequences, heads, capacity, width)
            grown[:, : self.batch, :, :end] = block[:, : self.batch, :, :end]
            self._blocks[number] = grown
        self.capacity = capacity

    def clear(self) -> None:
        """Forget every sequence, keep the memory."""
        self.batch = 0

    def committed(self, layer: int, new: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, S, width] of one layer, up to the longest of the sequences and so many new entries
        (where shapes may not move, up to the width of `fixed`); no copies."""
        end = self.get_seq_length() + new if self._fixed is None else self._fixed[1]
        keys, values = (self._blocks[block][row, self._sequences, :, :end] for block, row in self._place[layer])
        return keys, values

    def _row(self, like: Tensor, rows: int) -> tuple[int, int]:
        heads, width = like.shape[1], like.shape[3]
        free = self._free[heads, width]
        if not free:
            free += [(len(self._blocks), row) for row in reversed(range(rows))]
            self._blocks.append(like.new_zeros(rows, len(self.lengths), heads, self.capacity, width))
        return free.pop()
