"""Keys and values of base or head for several sequences of unequal lengths: allocated once, compacted in place.

One tensor per shape of keys and values, usually one for all of them, so that keeping the accepted path of a tree is one
indexed copy. Shape suffixes: B sequences, Q new positions, P kept ones; a block is [rows, B, heads, capacity, width],
and each layer has a row for its keys and one for its values.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ctcdraft.model.layers import Sight

CAPACITY_STEP = 256  # entries by which it grows


class Watched(Cache):
    """What the `watched` layers of a forward make: keys, already turned, and values, [B, heads, rows, width] each. It
    keeps nothing else: a forward with it is one without a cache."""

    def __init__(self, watched: tuple[int, ...]) -> None:
        super().__init__(layers=[])
        self.watched = watched
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in self.watched:
            self._made[layer_idx] = key_states, value_states
        return key_states, value_states

    @property
    def made(self) -> list[int]:
        """The watched layers that made keys and values; others have none or look at another layer's."""
        return sorted(self._made)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a watched layer made last."""
        return self._made[layer]

    def taken(self) -> Tensor:
        """Of each row the keys of all watched layers and heads, then their values: [B, rows, 2 * heads * width]."""
        pairs = [self._made.pop(layer) for layer in self.watched]
        both = torch.stack([torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True)], dim=1)
        return both.permute(0, 3, 1, 2, 4).flatten(2)


class TreeCache(Cache):
    """`lengths[b]` committed entries of sequence b; what a forward appends after them is a draft until `keep`.

    batch: how many sequences have room; all of them are there until `clear`, behind which `add` takes one.
    of_base: behind a head's cache, that of the base with the same positions, for slots that attend to it.

    The next forward is about all of the first `batch` sequences, about one `alone` (its prompt), or, where shapes may
    not move, about rows `at` places that only the device knows.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        of_base: "TreeCache | None" = None,
    ) -> None:
        super().__init__(layers=[])
        self.of_base = of_base
        self.lengths = np.zeros(batch, np.int64)
        self.batch, self.capacity = batch, capacity
        self._layers_left = layers
        self._blocks: list[Tensor] = []
        self._used: list[int] = []  # rows of each block
        self._place: list[tuple[tuple[int, int], tuple[int, int]]] = []  # of each layer's keys, values: block and row
        self._alone: int | None = None
        self._index: tuple[Tensor, Tensor] | None = None
        self._static: tuple[Tensor, int] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        lengths = self._lengths_in_forward
        return int(lengths.max()) if len(lengths) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Entries that a forward of so many rows sees, and where they begin: for the masks that transformers makes."""
        return self.get_seq_length() + query_length, 0

    @property
    def _lengths_in_forward(self) -> np.ndarray:
        return self.lengths[: self.batch] if self._alone is None else self.lengths[self._alone : self._alone + 1]

    @property
    def is_filled(self) -> bool:
        """Has any layer written keys and values?"""
        return bool(self._place)

    def alone(self, sequence: int | None) -> None:
        """The next forward holds this sequence only (None: all of them again)."""
        self._alone, self._index = sequence, None

    def at(self, slots_Q: Tensor | None, width: int = 0) -> None:
        """The next forwards write entries `slots` [Q] of the only sequence, or of the one alone, and give back those
        below `width`, for a mask to choose from. None ends that."""
        self._static = None if slots_Q is None else (slots_Q, width)

    def sight(self, rows: int, device: torch.device) -> Sight:
        """What `rows` new positions of each sequence see, or of the one alone: its own committed ones, and those before
        them."""
        past_B1 = torch.from_numpy(self._lengths_in_forward[:, None]).to(device)
        positions_BL = past_B1 + torch.arange(rows, device=device)
        longest = self.get_seq_length()
        if longest == 0 or (rows == 1 and len(past_B1) == 1):
            return Sight(positions_BL, None)
        entry_S = torch.arange(longest + rows, device=device)
        return Sight(positions_BL, (entry_S <= positions_BL.unsqueeze(2)).unsqueeze(1))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write Q new entries per sequence behind its committed ones; all keys and values up to the longest."""
        if layer_idx >= len(self._place):
            self._allocate(key_states, value_states)
        keys, values = self._pair(layer_idx)
        Q = key_states.shape[2]
        if self._static is not None:
            (slots_Q, width), b = self._static, self._alone or 0
            keys[b].index_copy_(1, slots_Q, key_states[0])
            values[b].index_copy_(1, slots_Q, value_states[0])
            return keys[b : b + 1, :, :width], values[b : b + 1, :, :width]
        if self._alone is not None or self.batch == 1:
            b = self._alone or 0
            start, end = int(self.lengths[b]), int(self.lengths[b]) + Q
            keys[b, :, start:end] = key_states[0]
            values[b, :, start:end] = value_states[0]
            return keys[b : b + 1, :, :end], values[b : b + 1, :, :end]
        sequence_B1, slot_BQ = self._rows(Q, key_states.device)
        keys[sequence_B1, :, slot_BQ] = key_states.transpose(1, 2)
        values[sequence_B1, :, slot_BQ] = value_states.transpose(1, 2)
        end = self.get_seq_length() + Q
        return keys[: self.batch, :, :end], values[: self.batch, :, :end]

    def keep(self, rows: Sequence[Sequence[int]]) -> None:
        """Of what the last forward appended to sequence b, commit entries rows[b], in order; drop the rest."""
        moved = [b for b, kept in enumerate(rows) if list(kept) != list(range(len(kept)))]
        if moved:
            P = max(len(rows[b]) for b in moved)
            source_BP = np.zeros((len(moved), P), np.int64)
            for i, b in enumerate(moved):
                source_BP[i, : len(rows[b])] = rows[b]  # padding copies entry 0 over what is dropped anyway
            past_B1 = self.lengths[moved, None]
            device = self._blocks[0].device
            source, target = (torch.from_numpy(past_B1 + r).to(device) for r in (source_BP, np.arange(P)[None]))
            if len(self.lengths) == 1:
                self.move(source[0], target[0])  # in a third of the time
            else:
                sequence = torch.tensor(moved, device=device)[:, None]
                for block in self._blocks:
                    block[:, sequence, :, target] = block[:, sequence, :, source]
        for b, kept in enumerate(rows):
            self.lengths[b] += len(kept)
        self._index = None

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
        """A sequence then holds the first `length` entries of another, or of its own, and nothing else."""
        if sequence != source:
            for block in self._blocks:
                block[:, sequence, :, :length] = block[:, source, :, :length]
        self.lengths[sequence], self._index = length, None

    def add(self) -> int:
        """Another sequence, with nothing committed yet, behind those in use; its number."""
        self.lengths[self.batch] = 0
        self.batch, self._index = self.batch + 1, None
        return self.batch - 1

    def reserve(self, capacity: int) -> None:
        """Make room for so many entries per sequence; what is committed is copied where it was less."""
        if capacity <= self.capacity:
            return
        capacity, end = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP, self.get_seq_length()
        for number, block in enumerate(self._blocks):
            grown = block.new_zeros(*block.shape[:3], capacity, block.shape[4])
            grown[:, : self.batch, :, :end] = block[:, : self.batch, :, :end]
            self._blocks[number] = grown
        self.capacity = capacity

    def clear(self) -> None:
        """Forget every sequence, keep the memory."""
        self.batch, self._index = 0, None

    def committed(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, S, width] of one layer, up to the longest of the sequences (where shapes may not
        move, up to the width of `at`); no copies."""
        keys, values = self._pair(layer)
        if self._static is not None:
            (_, width), b = self._static, self._alone or 0
            return keys[b : b + 1, :, :width], values[b : b + 1, :, :width]
        entries = self.get_seq_length()
        return keys[: self.batch, :, :entries], values[: self.batch, :, :entries]

    def _pair(self, layer: int) -> tuple[Tensor, Tensor]:
        (key_block, key_row), (value_block, value_row) = self._place[layer]
        return self._blocks[key_block][key_row], self._blocks[value_block][value_row]

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        """Rows for the next layer: in blocks of their shapes, or in new ones for all layers that are left."""
        left = max(1, self._layers_left - len(self._place))
        per_layer = 2 if keys.shape == values.shape else 1
        self._place.append((self._row(keys, per_layer * left), self._row(values, per_layer * left)))

    def _row(self, like: Tensor, rows: int) -> tuple[int, int]:
        shape = (like.shape[1], self.capacity, like.shape[3])
        for number, block in enumerate(self._blocks):
            if block.shape[2:] == shape and self._used[number] < len(block):
                self._used[number] += 1
                return number, self._used[number] - 1
        self._blocks.append(like.new_zeros(rows, len(self.lengths), *shape))
        self._used.append(1)
        return len(self._blocks) - 1, 0

    def _rows(self, Q: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the new entries of each sequence go; made once per forward."""
        if self._index is None or self._index[1].shape[1] != Q:
            slots = torch.from_numpy(self.lengths[: self.batch, None] + np.arange(Q)[None]).to(device)
            self._index = torch.arange(self.batch, device=device)[:, None], slots
        return self._index
