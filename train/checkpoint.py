"""Everything that a run resumes from: DeepSpeed's weights and optimizer, and one TrainState.

A checkpoint is written under a temporary name and renamed when it is whole; `latest` is written after
that, the same way. So a half-written one is never picked.
"""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctcdraft.train.engine import barrier, rank

KEEP = 2


@dataclass(frozen=True)
class TrainState:
    """step: optimizer steps done (also the data position); tokens: sequence tokens seen; seconds: spent
    training, all sittings together; best, best_step: highest simulated tokens per step so far."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0


def save_checkpoint(engine: Any, folder: Path, state: TrainState) -> None:
    """Write `folder`/step_NNNNNN, point `latest` to it, drop all but the newest KEEP. Collective."""
    tag = f"step_{state.step:06d}"
    if rank() == 0:
        shutil.rmtree(folder / f"tmp_{tag}", ignore_errors=True)  # a save that was killed
    barrier()
    engine.save_checkpoint(str(folder), tag=f"tmp_{tag}", client_state={"train": asdict(state)}, save_latest=False)
    barrier()
    if rank() == 0:
        shutil.rmtree(folder / tag, ignore_errors=True)
        os.replace(folder / f"tmp_{tag}", folder / tag)
        write_atomically(folder / "latest", tag.encode())
        for old in sorted(folder.glob("step_*"))[:-KEEP]:
            shutil.rmtree(old)
    barrier()


def load_checkpoint(engine: Any, folder: Path) -> TrainState:
    """Restore the newest checkpoint into the engine; a fresh TrainState where there is none.

    Raises ValueError when `latest` names a checkpoint that is not there or does not load.
    """
    tag = latest(folder)
    if tag is None:
        return TrainState()
    try:
        path, client = engine.load_checkpoint(str(folder), tag=tag)
    except Exception as error:  # whatever a damaged file makes torch or DeepSpeed raise
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"{folder / tag} does not load ({reason}): delete it and {folder}/latest") from error
    if path is None:
        raise ValueError(f"{folder / tag} is not there though {folder}/latest names it: delete that file")
    return TrainState(**client["train"])


def latest(folder: Path) -> str | None:
    """The name of the newest whole checkpoint."""
    pointer = folder / "latest"
    return pointer.read_text().strip() if pointer.is_file() else None


def save_best(folder: Path, weights: dict[str, Tensor]) -> None:
    """Keep the weights of the best head so far, on rank 0."""
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / "best.safetensors.tmp"
        save_file({name: w.cpu().contiguous() for name, w in weights.items()}, fresh)
        os.replace(fresh, folder / "best.safetensors")


def load_best(folder: Path) -> dict[str, Tensor]:
    """The weights of the best head. Raises ValueError when none was kept."""
    path = folder / "best.safetensors"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; train the run first")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: delete the run's folder and train again") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content as a whole, on disk when this returns."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, path)
