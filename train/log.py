"""metrics.jsonl, and the same rows under the same names in one more place (sinks.py), written by rank 0 alone."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ctcdraft.model.folders import write_atomically

from .sinks import Csv, LoggerConfig, Media, Sink, TensorBoard, Wandb, first_line, set_up_dashboard, wandb_run


class RunLog:
    """The log of one run folder. A resumed run continues the file, and the run in W&B or TensorBoard. Raises ValueError
    where a package that was asked for is missing."""

    def __init__(self, folder: Path, config: LoggerConfig, settings: Mapping[str, Any], step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.sink = _sink(folder, folder.name, config, settings, step)
        _cut_after(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """One step's figures; the row has `step`."""
        self._file.write(json.dumps(dict(row)) + "\n")
        self._file.flush()
        self._tell(lambda sink: sink.log({k: v for k, v in row.items() if k != "step"}, row["step"]))

    def alert(self, sentence: str) -> None:
        """What a person should look at now."""
        self._tell(lambda sink: sink.alert(sentence))

    def summary(self, media: Media) -> None:
        """The end of a run."""
        self._tell(lambda sink: sink.summary(media))

    def close(self) -> None:
        self._file.close()
        self._tell(lambda sink: sink.finish())

    def _tell(self, what: Callable[[Sink], None]) -> None:
        """W&B works in a process of its own, which may die, and a disk may be full: the training matters more."""
        if self.sink is None:
            return
        try:
            what(self.sink)
        except Exception as error:
            print(f"{self.sink.name}: gone ({first_line(error)}), {self.path} goes on without it", flush=True)
            self.sink = None


def log_evaluation(folder: Path, name: str, config: LoggerConfig, settings: Mapping[str, Any], media: Media) -> None:
    """A run of its own, inside the evaluation's folder."""
    sink = _sink(folder, name, config, settings, 0)
    if sink is not None:
        sink.summary(media)
        sink.finish()


def _sink(folder: Path, name: str, config: LoggerConfig, settings: Mapping[str, Any], step: int) -> Sink | None:
    """None where none is wanted, or W&B cannot even log offline."""
    if config.mode == "tensorboard":
        return TensorBoard(folder, step)
    if config.mode == "csv":
        return Csv(folder)
    run = None if config.mode == "none" else wandb_run(folder, name, config, settings)
    if run is None:
        return None
    if config.dashboard and not run.offline:
        print(f"W&B: dashboard at {set_up_dashboard(config.entity or run.entity, config.project)}", flush=True)
    return Wandb(run)


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
