"""Prepared sequences -> the base's hidden states at all of their positions, and the keys and values of the layers that
a head attends to; stored once per (base, layers, sequences, format).

Shards are shared out among processes like those of preparing. Every shard is a function of base and sequences alone, so
whoever dies leaves nothing but its claim.
"""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ctcdraft.data.features import (
    SHARD_POSITIONS,
    Features,
    Hidden,
    bytes_of,
    encoded,
    shard_name,
    shard_tensors,
    shards_of,
)
from ctcdraft.data.store import load_corpus
from ctcdraft.model.base.context import Attended
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.generate import batches_by_length
from ctcdraft.model.folders import MANIFEST, free_bytes, share_out, write_atomically

FORMAT = 3
SPLIT = "train"  # development sequences are few, and read by the base itself at every evaluation
BATCH = 8  # sequences per forward: part of what decides the bits


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
        self.corpus = load_corpus(data_folder, SPLIT)
        self.facts = self._facts(data_folder / f"{SPLIT}.safetensors")
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:12]
        self.folder = cache / f"features-{kind}-{digest}"
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
        rows = [torch.from_numpy(np.asarray(self.corpus[sequence].ids, np.int64)) for sequence in shard]
        if path.is_file():
            bar.update(sum(map(len, rows)))
            return
        found: dict[int, Hidden] = {}
        for batch in batches_by_length(rows, BATCH):
            ids_BL = pad_sequence([rows[i] for i in batch], batch_first=True)  # padded behind: no effect
            hidden_BLX = self.base.hidden(ids_BL.to(self.base.device), attended=self.attended)
            for b, i in enumerate(batch):
                found[i] = encoded(hidden_BLX[b, : len(rows[i])], self.kind).cpu()
                bar.update(len(rows[i]))
        write_atomically(path, save(shard_tensors([found[i] for i in range(len(rows))])))

    def _write_manifest(self) -> None:
        shards = [
            {"first": shard[0], "bytes": (self.folder / shard_name(number)).stat().st_size}
            for number, shard in enumerate(self._shards)
        ]
        write_atomically(self.folder / MANIFEST, json.dumps({**self.facts, "shards": shards}, indent=1).encode())

    def _facts(self, corpus: Path) -> dict[str, Any]:
        """What stored hidden states belong to: any other base, layers, tokenizer or sequences have others."""
        base = self.base
        shape = (base.identity["config"], base.identity["lm_head"], base.weights, str(base.dtype))
        with corpus.open("rb") as stream:
            sequences = hashlib.file_digest(stream, "sha256").hexdigest()
        return {
            "format": FORMAT,
            "kind": self.kind,
            "size": self.size,
            "base": " ".join(shape),
            "layers": "" if self.attended is None else " ".join(map(str, self.attended.layers)),
            "tokenizer": base.identity["tokenizer"],
            "data": sequences,
        }


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:.2f} GB"
