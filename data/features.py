"""The base's hidden states on disk, so that a training step needs no forward of the base's layers: stored
once per (base, layers, sequences, format), at all positions of the training sequences.

A folder holds shards `NNNNN.safetensors` of whole sequences and manifest.json, which is written last and says what
they belong to. A shard has `hidden` of its P positions, bfloat16 [P, X], and a `checksum` per sequence that every
reading is held against. X: a hidden state, and behind it the keys and values of the layers that the head attends to
(`Base.hidden(attended=...)`).

Shards are shared out among processes like those of preparing. Each is a function of base and sequences alone, so
whoever dies leaves nothing but its claim.
"""

import hashlib
import json
import shutil
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
from ctcdraft.model.folders import MANIFEST, digest_of, share_out, write_atomically

from .store import Column, load_corpus, read_object

VERSION = 5
SHARD = 64  # sequences
BATCH = 8  # sequences per forward: part of what decides the bits


def shard_name(number: int) -> str:
    return f"{number:05}.safetensors"


def shard_tensors(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """What the file of a shard holds."""
    checksums = torch.tensor([_checksum(sequence) for sequence in sequences], dtype=torch.int64)
    return {"hidden": torch.cat([*sequences]), "checksum": checksums}


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
        self.folder = folder
        manifest = read_object(folder / MANIFEST)
        for key, wanted in facts.items():
            if manifest.get(key) != wanted:
                raise ValueError(f"{folder} holds hidden states of another {key}: delete it and run the command again")
        self._size, self._starts = facts["shard"], np.concatenate([[0], np.cumsum(lengths)])
        self._shards: list[dict[str, Tensor]] = []
        for number in range(-(-len(lengths) // self._size)):
            try:
                with safe_open(folder / shard_name(number), "pt") as file:
                    self._shards.append({name: file.get_tensor(name) for name in ("hidden", "checksum")})
            except (SafetensorError, OSError) as error:
                raise self._damage(number, str(error)) from error
        # what they take on the disk
        self.bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def __getitem__(self, sequence: int) -> Tensor:
        """All positions of one sequence. Raises ValueError when they are not what was stored."""
        number, place = divmod(sequence, self._size)
        before = self._starts[sequence - place]
        start, end = self._starts[sequence : sequence + 2] - before
        found = self._shards[number]["hidden"][start:end]
        if _checksum(found) != int(self._shards[number]["checksum"][place]):
            raise self._damage(number, f"the checksum of sequence {sequence} differs")
        return found

    def rows(self, rows: Sequence[Sequence[int]], longest: int) -> Tensor:
        """Sequences end to end in their rows, each cut after `longest` positions; 0 on padding."""
        pieces = [torch.cat([self[number][:longest] for number in row]) for row in rows]
        return pad_sequence(pieces, batch_first=True)

    def _damage(self, number: int, what: str) -> ValueError:
        path = self.folder / shard_name(number)
        return ValueError(f"{path} is missing or damaged ({what}): delete {self.folder} and run the command again")


class FeatureStore:
    """Where the hidden states of a prepared folder's training sequences lie, and how they come there.

    attended: the layers whose keys and values are kept with them, if any (`attended_on`). shard: sequences in a file.
    """

    def __init__(
        self, base: Base, data_folder: Path, cache: Path, attended: Attended | None = None, shard: int = SHARD
    ) -> None:
        self.base, self.attended, self.shard = base, attended, shard
        self.size = base.hidden_size + (0 if attended is None else attended.size)
        self.corpus = load_corpus(data_folder, "train")  # of development the base itself reads the few there are
        identity = base.identity
        with (data_folder / "train.safetensors").open("rb") as stream:
            sequences = hashlib.file_digest(stream, "sha256").hexdigest()
        self.facts = {  # any other base, layers, tokenizer or sequences have other hidden states
            "format": VERSION,
            "size": self.size,
            "shard": shard,
            "base": " ".join((identity["config"], identity["lm_head"], base.weights, str(base.dtype))),
            "layers": "" if attended is None else " ".join(map(str, attended.layers)),
            "tokenizer": identity["tokenizer"],
            "data": sequences,
        }
        self.folder = cache / f"features-{digest_of(self.facts)[:12]}"

    @property
    def done(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    @property
    def bytes_left(self) -> int:
        """An estimate of what is still to be written."""
        there = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        whole = 2 * self.size * len(self.corpus.ids) + 8 * len(self.corpus)  # numbers, and checksums
        return max(0, whole - there)

    def check_room(self) -> str:
        """What storing will take, in a phrase. Raises ValueError when the disk has not so much left."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        left, free = self.bytes_left, shutil.disk_usage(self.folder.parent).free
        what = f"hidden states of {self.base.hidden_size} numbers"
        if self.attended is not None:
            what += f" and {self.attended.size} of the layers that the head copies"
        needed = f"{_gigabytes(left)} for {what} at {len(self.corpus.ids):,} positions"
        if left > free:
            raise ValueError(
                f"data.features=bf16 needs {needed}, and {self.folder.parent} has {_gigabytes(free)} free: make room, "
                "name another disk as cache_dir, or leave data.features out"
            )
        return f"{needed}; {_gigabytes(free)} are free"

    def fill(self) -> None:
        """Store what is missing (long: the base reads every sequence). Any number of processes may do so at once;
        each returns when all is there. Raises ValueError where the disk will not hold it."""
        if not self.done:
            self.check_room()
        total = len(self.corpus.ids)
        with tqdm(total=total, desc="base states", unit="token", unit_scale=True, disable=self.done) as bar:
            firsts = range(0, len(self.corpus), self.shard)
            share_out(self.folder, lambda: firsts, partial(self._store, bar), self._write_manifest)

    def open(self) -> Features:
        """The stored hidden states. Raises ValueError where they are damaged, or not this base's on this data."""
        return Features(self.folder, self.corpus.lengths, self.facts)

    def _store(self, bar: tqdm, number: int, first: int) -> None:
        """Write a shard, unless it is there: its hidden states, made in batches of like length."""
        path = self.folder / shard_name(number)
        shard = range(first, min(first + self.shard, len(self.corpus)))
        if path.is_file():
            bar.update(int(self.corpus.lengths[shard].sum()))
            return
        found: dict[int, Tensor] = {}
        for i, hidden_LX in hidden_states(self.base, [self.corpus[n].ids for n in shard], BATCH, self.attended):
            found[i] = hidden_LX.to(torch.bfloat16).cpu()
            bar.update(len(hidden_LX))
        write_atomically(path, save(shard_tensors([found[i] for i in range(len(shard))])))

    def _write_manifest(self) -> None:
        write_atomically(self.folder / MANIFEST, json.dumps(self.facts, indent=1).encode())


def _checksum(stored: Tensor) -> int:
    return zlib.crc32(stored.contiguous().view(torch.uint8).numpy().data)


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:.2f} GB"
