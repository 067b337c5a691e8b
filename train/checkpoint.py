"""Everything that a run resumes from: DeepSpeed's weights and optimizer, and one TrainState.

A checkpoint is written under a temporary name, sealed (checksums of every file, all of it forced to the disk) and
renamed; `latest` is written after that. One that is half-written, damaged or not ours is never read: DeepSpeed's files
are pickles, so they are opened only after their checksums were compared.
"""

import hashlib
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ctcdraft.train.engine import agreed, any_rank, barrier, rank, world_size, zero_stage
from ctcdraft.train.files import free_bytes, read_manifest, seal, size_of, sync, unsealed, write_atomically

BYTES_PER_PARAMETER = 20  # fp32 weights, two moments and a master copy; a little over
SPARE_BYTES = 32 << 20


@dataclass(frozen=True)
class TrainState:
    """step: optimizer steps done (also the data position); tokens: sequence tokens seen; seconds: spent
    training, all sittings together; best, best_step: highest simulated tokens per step so far; skipped: steps without
    an update because a number was not finite, in_a_row of them the last ones."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    skipped: int = 0
    in_a_row: int = 0


def save_checkpoint(engine: Any, folder: Path, state: TrainState, keep: int = 2) -> None:
    """Write `folder`/step_NNNNNN, point `latest` to it, then drop all but the newest `keep`. Collective.

    Raises ValueError, before any older checkpoint is touched, when the disk has no room for it.
    """
    tag = f"step_{state.step:06d}"
    fresh = folder / f"tmp_{tag}"
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for dead in folder.glob("tmp_step_*"):  # a save that was killed
            shutil.rmtree(dead, ignore_errors=True)
    barrier()
    _check_room(engine, folder, tag)
    try:
        engine.save_checkpoint(str(folder), tag=fresh.name, client_state={"train": asdict(state)}, save_latest=False)
        barrier()
        if rank() == 0:
            facts = {"state": asdict(state), "ranks": world_size(), "zero": zero_stage(engine)}
            seal(fresh, folder / tag, facts)
            write_atomically(folder / "latest", tag.encode())
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its own
        shutil.rmtree(fresh, ignore_errors=True)
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(
            f"{folder / tag} could not be written ({reason}): make room or check the disk and give the same command "
            f"again; {_before(folder)}"
        ) from error
    if rank() == 0:
        for old in _newest_first(folder)[keep:]:
            shutil.rmtree(old)
    barrier()


def load_checkpoint(engine: Any, folder: Path) -> TrainState:
    """Restore the newest whole checkpoint into the engine; a fresh TrainState where there is none. Collective.

    Those that are not whole are passed over with a sentence. Raises ValueError when there are checkpoints but none
    can be used, or when the one to use was saved by another number of ranks.
    """
    candidates = agreed(_newest_first(folder) if rank() == 0 else None)
    for path in candidates:
        wrong = agreed(unsealed(path) if rank() == 0 else None)
        if wrong is None:
            return _load(engine, path)
        if rank() == 0:
            print(f"warning: checkpoint {path} is passed over: {wrong}", file=sys.stderr, flush=True)
    if candidates:
        raise ValueError(f"{folder} holds no checkpoint that is whole: delete the run's folder to start it again")
    return TrainState()


def _load(engine: Any, path: Path) -> TrainState:
    facts = read_manifest(path)
    assert facts is not None
    ranks, stage = facts.get("ranks"), facts.get("zero")
    if ranks != world_size() and stage:
        raise ValueError(
            f"{path} was saved by {ranks} ranks with zero={stage}, and this is a run of {world_size()}: start it with "
            f"{ranks} ranks"
        )
    if ranks != world_size() and rank() == 0:  # without ZeRO every rank holds everything
        print(f"{path} was saved by {ranks} ranks, {world_size()} go on; train.batch stays what it is", flush=True)
    try:
        _, client = engine.load_checkpoint(str(path.parent), tag=path.name)
        state = TrainState(**client["train"])
    except Exception as error:  # whatever another version's files make torch or DeepSpeed raise
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"{path} does not load ({reason}): delete it to use the one before") from error
    if rank() == 0 and latest(path.parent) != path.name:
        write_atomically(path.parent / "latest", path.name.encode())
    return state


def _check_room(engine: Any, folder: Path, tag: str) -> None:
    """Every rank looks at its own disk; all of them stop where one is full."""
    last = latest(folder)
    if last is not None and (folder / last).is_dir():
        needed = size_of(folder / last)
    else:
        needed = BYTES_PER_PARAMETER * sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    needed, free = needed + SPARE_BYTES, free_bytes(folder)
    if any_rank(free < needed):
        raise ValueError(
            f"{folder / tag} needs {needed / 2**30:.2f} GB and the disk has {free / 2**30:.2f} GB left: "
            f"make room and give the same command again; {_before(folder)}"
        )


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
