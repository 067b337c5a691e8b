"""The base's hidden states on disk, so that a training step needs no forward of the base's layers: stored
once per (base, layers, sequences, format), at all positions of the training sequences.

A folder holds shards `NNNNN.safetensors` of whole sequences and manifest.json, which is written last and says what
they belong to. A shard has `hidden` of its P positions, bfloat16 [P, X], or bytes [P, X + 4]: float8-e4m3 and behind it
a power of two, the position's scale, as float32; and a `checksum` per sequence that every reading is held against.
X: a hidden state, and behind it the keys and values of the layers that the head attends to
(`Base.hidden(attended=...)`).

Shards are shared out among processes like those of preparing. Each is a function of base and sequences alone, so
whoever dies leaves nothing but its claim.
"""

import bisect
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ctcdraft.model.base.context import Attended
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.generate import batches_by_length
from ctcdraft.model.folders import MANIFEST, digest_of, free_bytes, share_out, write_atomically

from .store import Column, load_corpus, read_object

VERSION = 4
FORMATS = {"bf16": torch.bfloat16, "fp8": torch.uint8}  # what the numbers are kept as
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SCALE = 4  # bytes
SHARD_POSITIONS = 32768
BATCH = 8  # sequences per forward: part of what decides the bits


def encoded(hidden: Tensor, kind: str) -> Tensor:
    """Hidden states [..., X] rounded to `bf16`, or as bytes [..., X + 4] to `fp8` with a scale per position.

    The relative error per number is at most 2^-8 and 2^-4; the scale is a power of two, so that what fp8 can say comes
    back exactly, and as bfloat16. A position that holds a number that is not finite is NaN in fp8.
    """
    if kind == "bf16":
        return hidden.to(torch.bfloat16)
    wide = hidden.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest / LARGEST).exponent)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return torch.cat([(wide / scale).to(FP8).view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def decoded(stored: Tensor) -> Tensor:
    """Hidden states in bfloat16, which holds whatever `encoded` kept."""
    if stored.dtype == torch.bfloat16:
        return stored
    scale = stored[..., -SCALE:].contiguous().view(torch.float32)
    return stored[..., :-SCALE].view(FP8).to(torch.bfloat16) * scale.to(torch.bfloat16)


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


def shard_tensors(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """What the file of a shard holds."""
    checksums = torch.tensor([_checksum(sequence) for sequence in sequences], dtype=torch.int64)
    return {"hidden": torch.cat([*sequences]), "checksum": checksums}


def bytes_of(lengths: NDArray[np.int64], size: int, kind: str) -> int:
    """What sequences of these lengths take on a disk, `size` numbers per position."""
    return int(lengths.sum()) * (2 * size if kind == "bf16" else size + SCALE) + 8 * len(lengths)


def hidden_states(
    base: Base, sequences: Sequence[Column], batch_size: int, attended: Attended | None = None
) -> Iterator[tuple[int, Tensor]]:
    """(number, what `Base.hidden` gives [L, X]) of every sequence, those of like length together."""
    for batch in batches_by_length(sequences, batch_size):
        rows = [torch.from_numpy(np.asarray(sequences[i], np.int64)) for i in batch]
        ids_BL = pad_sequence(rows, batch_first=True)  # padding lies behind: causal attention never sees it
        hidden_BLX = base.hidden(ids_BL.to(base.device), attended=attended)
        yield from ((i, hidden_BLX[b, : len(sequences[i])]) for b, i in enumerate(batch))


class Features:
    """Stored hidden states of a corpus' sequences, memory-mapped.

    lengths: of the sequences; facts: what the hidden states must belong to, as they were stored with. Raises ValueError
    where the folder is damaged, incomplete, or belongs to something else.
    """

    def __init__(self, folder: Path, lengths: NDArray[np.int64], facts: dict[str, Any]) -> None:
        self.folder, self.kind = folder, facts["kind"]
        manifest = read_object(folder / "manifest.json", "shards")
        for key, wanted in facts.items():
            if manifest.get(key) != wanted:
                raise ValueError(f"{folder} holds hidden states of another {key}: delete it and run the command again")
        self._firsts = [shard.get("first", -1) for shard in manifest["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._open: dict[int, Any] = {}
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
        ends = [*self._firsts[1:], len(lengths)]
        for number, (shard, first, end) in enumerate(zip(manifest["shards"], self._firsts, ends, strict=True)):
            if sizes.get(shard_name(number)) != shard.get("bytes"):
                raise self._damage(number, "is missing, or has another size than its manifest says")
            if not 0 <= first < end:
                raise self._damage(number, "is listed wrongly in manifest.json")
        self.bytes = sum(sizes.values())  # what they take on the disk

    def __getitem__(self, sequence: int) -> Tensor:
        """All positions of one sequence, as they were encoded. Raises ValueError when they are not what was stored."""
        number = bisect.bisect_right(self._firsts, sequence) - 1
        first = self._firsts[number]
        start, end = (int(self._starts[i] - self._starts[first]) for i in (sequence, sequence + 1))
        try:
            if number not in self._open:
                self._open[number] = safe_open(self.folder / shard_name(number), "pt")
            found = self._open[number].get_slice("hidden")[start:end]
            known = int(self._open[number].get_slice("checksum")[sequence - first])
        except (SafetensorError, OSError, IndexError) as error:
            raise self._damage(number, f"cannot be read ({error})") from error
        if found.dtype != FORMATS[self.kind] or _checksum(found) != known:
            raise self._damage(number, f"is damaged in sequence {sequence} (its checksum differs)")
        return found

    def rows(self, rows: Sequence[Sequence[int]], longest: int) -> Tensor:
        """Sequences end to end in their rows, each cut after `longest` positions, as encoded; 0 on padding."""
        pieces = [torch.cat([self[number][:longest] for number in row]) for row in rows]
        return pad_sequence(pieces, batch_first=True)

    def _damage(self, number: int, what: str) -> ValueError:
        return ValueError(f"{self.folder / shard_name(number)} {what}: delete {self.folder} and run the command again")


class FeatureStore:
    """Where the hidden states of a prepared folder's training sequences lie, and how they come there.

    attended: the layers whose keys and values are kept with them, if any (`attended_on`).
    """

    def __init__(
        self,
        base: Base,
        data_folder: Path,
        kind: str,
        cache: Path,
        attended: Attended | None = None,
        positions: int = SHARD_POSITIONS,
    ) -> None:
        self.base, self.kind, self.attended = base, kind, attended
        self.size = base.hidden_size + (0 if attended is None else attended.size)
        self.corpus = load_corpus(data_folder, "train")  # of development the base itself reads the few there are
        identity = base.identity
        with (data_folder / "train.safetensors").open("rb") as stream:
            sequences = hashlib.file_digest(stream, "sha256").hexdigest()
        self.facts = {  # any other base, layers, tokenizer or sequences have other hidden states
            "format": VERSION,
            "kind": kind,
            "size": self.size,
            "base": " ".join((identity["config"], identity["lm_head"], base.weights, str(base.dtype))),
            "layers": "" if attended is None else " ".join(map(str, attended.layers)),
            "tokenizer": identity["tokenizer"],
            "data": sequences,
        }
        self.folder = cache / f"features-{kind}-{digest_of(self.facts)[:12]}"
        self._shards = shards_of(self.corpus.lengths, positions)

    @property
    def done(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    @property
    def bytes_left(self) -> int:
        """An estimate of what is still to be written."""
        there = sum(path.stat().st_size for path in self.folder.glob("*"))
        return max(0, bytes_of(self.corpus.lengths, self.size, self.kind) - there)

    def check_room(self) -> str:
        """What storing will take, in a phrase. Raises ValueError when the disk has not so much left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        left, free = self.bytes_left, free_bytes(self.folder)
        what = f"hidden states of {self.base.hidden_size} numbers"
        if self.attended is not None:
            what += f" and {self.attended.size} of the layers that the head copies"
        needed = f"{_gigabytes(left)} for {what} at {len(self.corpus.ids):,} positions in {self.kind}"
        if left > free:
            smaller = ", take data.features=fp8 (half of it)" if self.kind == "bf16" else ""
            raise ValueError(
                f"data.features={self.kind} needs {needed}, and {self.folder.parent} has {_gigabytes(free)} free: make "
                f"room, name another disk as cache_dir{smaller}, or leave data.features out"
            )
        return f"{needed}; {_gigabytes(free)} are free"

    def fill(self) -> None:
        """Store what is missing (long: the base reads every sequence). Any number of processes may do so at once;
        each returns when all is there. Raises ValueError where the disk will not hold it."""
        if not self.done:
            self.check_room()
        total = len(self.corpus.ids)
        with tqdm(total=total, desc="base states", unit="token", unit_scale=True, disable=self.done) as bar:
            share_out(self.folder, lambda: self._shards, partial(self._store, bar), self._write_manifest)

    def open(self) -> Features:
        """The stored hidden states. Raises ValueError where they are damaged, or not this base's on this data."""
        return Features(self.folder, self.corpus.lengths, self.facts)

    def _store(self, bar: tqdm, number: int, shard: range) -> None:
        """Write a shard, unless it is there: its hidden states, made in batches of like length."""
        path = self.folder / shard_name(number)
        if path.is_file():
            bar.update(int(self.corpus.lengths[shard].sum()))
            return
        found: dict[int, Tensor] = {}
        for i, hidden_LX in hidden_states(self.base, [self.corpus[n].ids for n in shard], BATCH, self.attended):
            found[i] = encoded(hidden_LX, self.kind).cpu()
            bar.update(len(hidden_LX))
        write_atomically(path, save(shard_tensors([found[i] for i in range(len(shard))])))

    def _write_manifest(self) -> None:
        shards = [
            {"first": shard[0], "bytes": (self.folder / shard_name(number)).stat().st_size}
            for number, shard in enumerate(self._shards)
        ]
        write_atomically(self.folder / MANIFEST, json.dumps({**self.facts, "shards": shards}, indent=1).encode())


def _checksum(stored: Tensor) -> int:
    return zlib.crc32(stored.contiguous().view(torch.uint8).numpy().data)


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:.2f} GB"
