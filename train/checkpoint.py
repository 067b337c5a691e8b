"""Everything that a run resumes from: weights and moments, whole, and one TrainState; safetensors and JSON alone.

A checkpoint is written under a temporary name, sealed (checksums of every file, all of it forced to the disk) and
renamed; `latest` is written after that. One that is half-written or damaged is never read. DeepSpeed's own files are
not used: they fit one number of ranks, and they are pickles.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctcdraft.train.engine import from_rank_zero, rank, world_size, zero_stage
from ctcdraft.train.files import free_bytes, read_manifest, seal, sync, unsealed, write_atomically
from ctcdraft.train.zero import restore_state, shapes_of, whole_state

FORMAT = 3
STATE = "state.safetensors"
SPARE_BYTES = 32 << 20


@dataclass(frozen=True)
class TrainState:
    """step: optimizer steps done (also the data position); tokens: sequence tokens seen; seconds: spent
    training, all sittings together; best, best_step: highest simulated tokens per step so far; skipped: steps without
    an update because a number was not finite, in_a_row of them the last ones; recent: simulated tokens per step, a
    running mean over logged steps; psi_U: see `DraftTask`."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    skipped: int = 0
    in_a_row: int = 0
    recent: float = 0.0
    psi_U: Sequence[float] = ()


def save_checkpoint(engine: Any, folder: Path, state: TrainState, keep: int = 2) -> None:
    """Write `folder`/step_NNNNNN, point `latest` to it, then drop all but the newest `keep`. Collective; rank 0 alone
    writes.

    Raises ValueError, before any older checkpoint is touched, when the disk has no room for it.
    """
    tensors = whole_state(engine)
    facts = {"format": FORMAT, "state": asdict(state), "ranks": world_size(), "zero": zero_stage(engine)}
    from_rank_zero(lambda: _write(tensors, folder, facts, keep))


def load_checkpoint(engine: Any, folder: Path) -> TrainState:
    """Restore the newest whole checkpoint into a fresh engine, whatever ranks and ZeRO stage it was saved by; a fresh
    TrainState where there is none. Collective; rank 0 alone reads.

    Those that are not whole are passed over with a sentence. Raises ValueError when there are checkpoints but none
    can be used.
    """
    wanted = shapes_of(engine)
    tensors: dict[str, Tensor] = {}
    facts = from_rank_zero(lambda: _read(folder, wanted, tensors))
    if facts is None:
        return TrainState()
    state = TrainState(**facts["state"])
    restore_state(engine, tensors, state.step)
    if rank() == 0 and facts["ranks"] != world_size():
        print(
            f"{latest(folder)} was saved by {facts['ranks']} ranks, {world_size()} go on with the same batches",
            flush=True,
        )
    return state


def _write(tensors: dict[str, Tensor], folder: Path, facts: dict[str, Any], keep: int) -> None:
    tag = f"step_{facts['state']['step']:06d}"
    fresh = folder / f"tmp_{tag}"
    folder.mkdir(parents=True, exist_ok=True)
    for dead in folder.glob("tmp_step_*"):  # a save that was killed
        shutil.rmtree(dead, ignore_errors=True)
    needed, free = sum(value.nbytes for value in tensors.values()) + SPARE_BYTES, free_bytes(folder)
    if free < needed:
        raise ValueError(
            f"{folder / tag} needs {needed / 2**30:.2f} GB and the disk has {free / 2**30:.2f} GB left: "
            f"make room and give the same command again; {_before(folder)}"
        )
    try:
        fresh.mkdir()
        save_file(tensors, fresh / STATE)
        seal(fresh, folder / tag, facts)
        write_atomically(folder / "latest", tag.encode())
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise ValueError(
            f"{folder / tag} could not be written ({_reason(error)}): make room or check the disk and give the same "
            f"command again; {_before(folder)}"
        ) from error
    for old in _newest_first(folder)[keep:]:
        shutil.rmtree(old)


def _read(folder: Path, wanted: dict[str, torch.Size], tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """The manifest of the newest whole checkpoint, its tensors put into `tensors`; None where there is none."""
    candidates = _newest_first(folder)
    for path in candidates:
        wrong = unsealed(path)
        if wrong is None:
            return _opened(path, wanted, tensors)
        print(f"warning: checkpoint {path} is passed over: {wrong}", file=sys.stderr, flush=True)
    if candidates:
        raise ValueError(f"{folder} holds no checkpoint that is whole: delete the run's folder to start it again")
    return None


def _opened(path: Path, wanted: dict[str, torch.Size], tensors: dict[str, Tensor]) -> dict[str, Any]:
    facts = read_manifest(path)
    assert facts is not None
    try:
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']}, not {FORMAT}")
        TrainState(**facts["state"])
        tensors |= load_file(path / STATE)
        if {name: value.shape for name, value in tensors.items()} != wanted:
            raise ValueError("it is the state of another head")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be used, though it is whole ({_reason(error)}): delete it to use the one before"
        ) from error
    if latest(path.parent) != path.name:
        write_atomically(path.parent / "latest", path.name.encode())
    return facts


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


def _before(folder: Path) -> str:
    last = latest(folder)
    return "there is no checkpoint before it" if last is None else f"the checkpoint before, {last}, is untouched"


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def latest(folder: Path) -> str | None:
    """The name of the newest whole checkpoint."""
    pointer = folder / "latest"
    return pointer.read_text().strip() if pointer.is_file() else None


def save_best(folder: Path, weights: dict[str, Tensor]) -> None:
    """Keep the weights of the best head so far, on rank 0, with a checksum in the file's header."""
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / "best.safetensors.tmp"
        held = {name: w.cpu().contiguous() for name, w in weights.items()}
        save_file(held, fresh, metadata={"sha256": _digest(held)})
        sync(fresh)
        os.replace(fresh, folder / "best.safetensors")
        sync(folder)


def load_best(folder: Path) -> dict[str, Tensor]:
    """The weights of the best head. Raises ValueError when none was kept, or the file is damaged."""
    path = folder / "best.safetensors"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; train the run first")
    try:
        with safe_open(path, framework="pt") as stream:
            held = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (it is no mapping)
            good = (stream.metadata() or {}).get("sha256") == _digest(held)
    except SafetensorError:
        good = False
    if not good:
        raise ValueError(f"{path} is damaged: delete the run's folder and train again")
    return held


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
