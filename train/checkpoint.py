"""Everything that a run resumes from: weights, moments, the best head and one TrainState; safetensors and JSON alone.

A checkpoint is written under a temporary name, sealed (checksums of every file, all of it forced to the disk) and
renamed; `latest` is written after that. One that is half-written or damaged is never read.
"""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctcdraft.model.folders import new_folder, seal, sealed_facts, write_atomically

from .engine import from_rank_zero, rank, world_size
from .log import first_line
from .zero import restore_state, shapes_of, whole_state

FORMAT = 5
STATE = "state.safetensors"
BEST = "best/"  # begins the names of the best head's weights in it


@dataclass
class TrainState:
    """step: optimizer steps done (also the data position); tokens: sequence tokens seen; seconds: spent training, all
    sittings together; best, best_step: highest tokens per step on development sequences; skipped: steps without an
    update because a number was not finite, in_a_row of them the last ones."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    skipped: int = 0
    in_a_row: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """One that was read: see `TrainState` and `whole_state`; best: weights of the best head so far; ranks that wrote
    it."""

    path: Path
    state: TrainState
    tensors: dict[str, Tensor]
    best: dict[str, Tensor]
    ranks: int


def save_checkpoint(
    engine: Any, folder: Path, state: TrainState, keep: int = 2, best: Mapping[str, Tensor] | None = None
) -> None:
    """Write `folder`/step_NNNNNN, point `latest` to it, then drop all but the newest `keep`. Collective; rank 0 alone
    writes.

    Raises ValueError, before any older checkpoint is touched, when the disk has no room for it.
    """
    tensors = whole_state(engine) | {BEST + name: weight.contiguous() for name, weight in (best or {}).items()}
    stage = engine.zero_optimization_stage()
    facts = {"format": FORMAT, "state": asdict(state), "ranks": world_size(), "zero": stage}
    from_rank_zero(lambda: _write(tensors, folder, facts, keep))


def load_checkpoint(engine: Any, folder: Path) -> tuple[TrainState, dict[str, Tensor]]:
    """Restore the newest whole checkpoint into a fresh engine, whatever ranks and ZeRO stage it was saved by; a fresh
    TrainState where there is none. The best head's weights are rank 0's alone. Collective; rank 0 alone reads.

    Raises ValueError as `read_checkpoint` does, or where it is of another head.
    """
    wanted, found = shapes_of(engine), Checkpoint(folder, TrainState(), {}, {}, 0)

    def facts() -> tuple[TrainState, int]:
        nonlocal found
        found = read_checkpoint(folder) or found
        if found.ranks and {name: value.shape for name, value in found.tensors.items()} != wanted:
            raise _unusable(found.path, ValueError("it is the state of another head"))
        return found.state, found.ranks

    state, ranks = from_rank_zero(facts)
    if ranks:
        restore_state(engine, found.tensors)
    if rank() == 0 and ranks not in (0, world_size()):
        print(f"{found.path.name} was saved by {ranks} ranks, {world_size()} go on with the same batches", flush=True)
    return state, found.best


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint; None where there is none.

    Those that are not whole are passed over with a sentence. Raises ValueError when there are checkpoints but none
    can be used.
    """
    candidates = _newest_first(folder)
    for path in candidates:
        try:
            facts = sealed_facts(path)
        except ValueError as wrong:
            print(f"warning: checkpoint {path} is passed over: {wrong}", file=sys.stderr, flush=True)
            continue
        try:
            if facts["format"] != FORMAT:
                raise ValueError(f"format {facts['format']}, not {FORMAT}")
            tensors = load_file(path / STATE)
            best = {name.removeprefix(BEST): tensors.pop(name) for name in [*tensors] if name.startswith(BEST)}
            return Checkpoint(path, TrainState(**facts["state"]), tensors, best, facts["ranks"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise _unusable(path, error) from error
    if candidates:
        raise ValueError(f"{folder} holds no checkpoint that is whole: delete the run's folder to start it again")
    return None


def _write(tensors: dict[str, Tensor], folder: Path, facts: dict[str, Any], keep: int) -> None:
    target = folder / f"step_{facts['state']['step']:06d}"
    for dead in folder.glob("unfinished-*"):  # a save that was killed
        shutil.rmtree(dead, ignore_errors=True)
    try:
        with new_folder(target, replaces=True) as fresh:
            save_file(tensors, fresh / STATE)
            seal(fresh, facts)
        write_atomically(folder / "latest", target.name.encode())  # which forces the new name to the disk, too
    except OSError as error:
        before = "".join(f"; the checkpoint before, {path.name}, is untouched" for path in _newest_first(folder)[:1])
        raise ValueError(f"{error}{before}") from error
    newest = _newest_first(folder)
    for old in newest[newest.index(target) + keep :]:  # what is newer was passed over, and counts for nothing
        shutil.rmtree(old)


def _unusable(path: Path, error: Exception) -> ValueError:
    reason = first_line(error)
    return ValueError(f"{path} cannot be used, though it is whole ({reason}): delete it to use the one before")


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)
