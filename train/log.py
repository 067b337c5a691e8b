"""metrics.jsonl and W&B: the same rows under the same names, written by rank 0 alone."""

import json
import netrc
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ctcdraft.data.secrets import masked
from ctcdraft.model.folders import write_atomically

INIT_SECONDS = 30


@dataclass(frozen=True)
class LoggerConfig:
    # wandb: online with a key, else offline | offline | none: metrics.jsonl alone
    mode: Literal["wandb", "offline", "none"] = "wandb"
    project: str = "ctcdraft"  # of W&B
    entity: str | None = None  # of W&B; null: the key's own


class Media(NamedTuple):
    """What an evaluation has to show: figures, pictures and tables, each under its name."""

    figures: Mapping[str, Any]
    plots: Mapping[str, Path]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]


class RunLog:
    """The log of one run folder. A resumed run continues both the file and the W&B run."""

    def __init__(self, folder: Path, config: LoggerConfig, settings: Mapping[str, Any], step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        _cut_after(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")
        self.wandb = _wandb_run(folder, folder.name, config, settings)

    def write(self, row: Mapping[str, Any]) -> None:
        """One step's figures; the row has `step`."""
        self._file.write(json.dumps(dict(row)) + "\n")
        self._file.flush()
        self._tell(lambda run: run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"]))

    def summary(self, media: Media) -> None:
        """The end of a run."""
        self._tell(lambda run: _summarise(run, media))

    def close(self) -> None:
        self._file.close()
        self._tell(lambda run: run.finish())

    def _tell(self, what: Callable[[Any], None]) -> None:
        """W&B works in a process of its own, which may die: the training matters more."""
        if self.wandb is None:
            return
        try:
            what(self.wandb)
        except Exception as error:
            self.wandb = None
            print(f"W&B: gone ({_first_line(error)}), {self.path} goes on without it", flush=True)


def log_evaluation(folder: Path, name: str, config: LoggerConfig, settings: Mapping[str, Any], media: Media) -> None:
    """A W&B run of its own, inside the evaluation's folder."""
    run = _wandb_run(folder, name, config, settings)
    if run is not None:
        _summarise(run, media)
        run.finish()


def _summarise(run: Any, media: Media) -> None:
    import wandb

    run.summary.update(dict(media.figures))
    logged: dict[str, Any] = {f"plots/{name}": wandb.Image(str(path)) for name, path in media.plots.items()}
    for name, rows in media.tables.items():
        columns: list[Any] = list(rows[0])
        logged[name] = wandb.Table(columns, [[row[column] for column in columns] for row in rows])
    run.log(logged)


def _cut_after(path: Path, step: int) -> None:
    """Drop rows of steps that the resumed run will do again, and what is no row, so that each step stands once."""
    if not path.is_file():
        return
    kept, last = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # what a kill left of one
            found = json.loads(line)["step"]
            if isinstance(found, int) and line.endswith(b"\n") and last < found <= step:
                kept.append(line)
                last = found
    write_atomically(path, b"".join(kept))


def _wandb_run(folder: Path, name: str, config: LoggerConfig, settings: Mapping[str, Any]) -> Any:
    """A run, online or offline; None where none is wanted, or W&B cannot even log offline."""
    if config.mode == "none":
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    id_file = folder / "wandb_id"
    if not id_file.is_file():
        id_file.write_text(uuid.uuid4().hex[:12])
    online = config.mode == "wandb" and os.environ.get("WANDB_MODE") != "offline" and has_key()
    if config.mode == "wandb" and not online:
        print("W&B: no key found, logging offline; `wandb sync` uploads it later", flush=True)

    modes: list[Literal["online", "offline"]] = ["online", "offline"] if online else ["offline"]
    for mode in modes:
        try:
            return wandb.init(
                project=config.project,
                entity=config.entity,
                name=name,
                id=id_file.read_text().strip(),
                resume="allow" if mode == "online" else None,
                dir=str(folder.resolve()),  # W&B's own process may have been started elsewhere
                config=masked(dict(settings)),
                mode=mode,
                settings=wandb.Settings(init_timeout=INIT_SECONDS, silent=True, console="off"),
            )
        except Exception as error:  # no network, a wrong key, a full disk: the training matters more
            if mode == "online":
                print(f"W&B: cannot go online ({_first_line(error)}), logging offline", flush=True)
                wandb.teardown()  # its process goes on trying, and would call the run's id one in use
            else:
                print(f"W&B: not used ({_first_line(error)}), {folder / 'metrics.jsonl'} has the figures", flush=True)
    return None


def _first_line(error: Exception) -> str:
    return masked(str(error)).partition("\n")[0]


def has_key() -> bool:
    """Is there a W&B key, in the environment or in ~/.netrc?"""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
