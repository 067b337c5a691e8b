"""The base's hidden states on disk, so that a training step needs no forward of the base's layers.

A folder holds shards `NNNNN.safetensors` of whole sequences and manifest.json, which is written last and says what
they belong to. A shard has `hidden` [P, X] of its P positions in bfloat16, or in float8-e4m3 with a power of two
`scale` [P] per position, and a `checksum` per sequence that every reading is held against. X: a hidden state, and
behind it the keys and values of the layers that the head attends to (`Base.hidden(layers=...)`).
"""

import bisect
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .store import read_object

FORMATS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SHARD_POSITIONS = 32768


class Hidden(NamedTuple):
    """Hidden states [..., X] as they are stored; fp8 ones with the scale [...] that their positions are divided by."""

    values: Tensor
    scale: Tensor | None = None

    def cpu(self) -> "Hidden":
        return Hidden(self.values.cpu(), None if self.scale is None else self.scale.cpu())


def encoded(hidden: Tensor, kind: str) -> Hidden:
    """Hidden states rounded to `bf16`, or to `fp8` with a scale per position.

    The relative error per number is at most 2^-8 and 2^-4; the scale is a power of two, so that what fp8 can say comes
    back exactly, and as bfloat16. A position that holds a number that is not finite is NaN in fp8.
    """
    if kind == "bf16":
        return Hidden(hidden.to(torch.bfloat16))
    wide = hidden.float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest / LARGEST).exponent)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return Hidden((wide / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale)


def decoded(stored: Hidden) -> Tensor:
    """Hidden states in bfloat16, which holds whatever `encoded` kept."""
    values = stored.values.to(torch.bfloat16)
    return values if stored.scale is None else values * stored.scale.to(torch.bfloat16).unsqueeze(-1)


def shards_of(lengths: NDArray[np.int64], positions: int = SHARD_POSITIONS) -> list[range]:
    """Consecutive sequences per shard, as many as reach so many positions."""
    shards, first, held = [], 0, 0
    for number, length in enumerate(lengths.tolist()):
        held += length
        if held >= positions or number == len(lengths) - 1:
            shards.append(range(first, number + 1))
            first, held = number + 1, 0
    return shards


def shard_name(number: int) -> str:
    return f"{number:05}.safetensors"


def shard_tensors(sequences: Sequence[Hidden]) -> dict[str, Tensor]:
    """What the file of a shard holds."""
    tensors = {"hidden": torch.cat([s.values for s in sequences])}
    if sequences[0].scale is not None:
        tensors["scale"] = torch.cat([s.scale for s in sequences if s.scale is not None])
    return tensors | {"checksum": torch.tensor([_checksum(s) for s in sequences], dtype=torch.int64)}


def bytes_of(lengths: NDArray[np.int64], size: int, kind: str) -> int:
    """What sequences of these lengths take on a disk, `size` numbers per position."""
    per_position = size * FORMATS[kind].itemsize + (4 if kind == "fp8" else 0)
    return int(lengths.sum()) * per_position + 8 * len(lengths)


class Features:
    """Stored hidden states of a corpus' sequences, memory-mapped.

    lengths: of the sequences; facts: what the hidden states must belong to, as they were stored with. Raises ValueError
    where the folder is damaged, incomplete, or belongs to something else.
    """

    def __init__(self, folder: Path, lengths: NDArray[np.int64], facts: dict[str, Any]) -> None:
        self.folder = folder
        manifest = read_object(folder / "manifest.json", "shards")
        for key, wanted in facts.items():
            if manifest.get(key) != wanted:
                raise ValueError(f"{folder} holds hidden states of another {key}: delete it and run the command again")
        self.kind, self.size = facts["kind"], facts["size"]
        self._firsts = [shard.get("first", -1) for shard in manifest["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._open: dict[int, Any] = {}
        self.bytes = 0  # what the shards take on the disk
        ends = [*self._firsts[1:], len(lengths)]
        for number, (shard, first, end) in enumerate(zip(manifest["shards"], self._firsts, ends, strict=True)):
            path = folder / shard_name(number)
            if not path.is_file():
                raise self._damage(number, "is missing")
            self.bytes += path.stat().st_size
            if path.stat().st_size != shard.get("bytes"):
                raise self._damage(number, "has another size than its manifest says")
            if not 0 <= first < end:
                raise self._damage(number, "is listed wrongly in manifest.json")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, sequence: int) -> Hidden:
        """All positions of one sequence. Raises ValueError when they are not what was stored."""
        number = bisect.bisect_right(self._firsts, sequence) - 1
        first = self._firsts[number]
        start, end = (int(self._starts[i] - self._starts[first]) for i in (sequence, sequence + 1))
        try:
            shard = self._shard(number)
            scale = shard.get_slice("scale")[start:end] if self.kind == "fp8" else None
            found = Hidden(shard.get_slice("hidden")[start:end], scale)
            known = int(shard.get_slice("checksum")[sequence - first])
        except (SafetensorError, OSError, IndexError) as error:
            raise self._damage(number, f"cannot be read ({error})") from error
        if found.values.shape != (end - start, self.size) or found.values.dtype != FORMATS[self.kind]:
            raise self._damage(number, "has another shape than its sequences")
        if _checksum(found) != known:
            raise self._damage(number, f"is damaged in sequence {sequence} (its checksum differs)")
        return found

    def rows(self, rows: Sequence[Sequence[int]], longest: int) -> Hidden:
        """Sequences end to end in their rows, each cut after `longest` positions: [B, L, X], 0 on padding."""
        pieces = [[self[number] for number in row] for row in rows]
        values = [torch.cat([piece.values[:longest] for piece in row]) for row in pieces]
        padded = pad_sequence(values, batch_first=True)
        if self.kind == "bf16":
            return Hidden(padded)
        scales = [torch.cat([piece.scale[:longest] for piece in row if piece.scale is not None]) for row in pieces]
        return Hidden(padded, pad_sequence(scales, batch_first=True))

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            self._open[number] = safe_open(self.folder / shard_name(number), "pt")
        return self._open[number]

    def _damage(self, number: int, what: str) -> ValueError:
        path = self.folder / shard_name(number)
        return ValueError(f"{path} {what}: delete {self.folder} and run the command again")


def _checksum(stored: Hidden) -> int:
    found = 0
    for part in stored:
        if part is not None:
            found = zlib.crc32(part.contiguous().view(torch.uint8).numpy().data, found)
    return found
