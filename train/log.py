"""metrics.jsonl, and the same rows under the same names in one more place: W&B or TensorBoard. Rank 0 alone writes
them."""

import json
import netrc
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from ctcdraft.data.secrets import masked
from ctcdraft.model.folders import write_atomically, writing

INIT_SECONDS = 30
OFFLINE = ("offline", "dryrun")  # W&B's own words for it


@dataclass(frozen=True)
class LoggerConfig:
    # wandb: online with a key, else offline | offline | tensorboard | none: metrics.jsonl alone
    mode: Literal["wandb", "offline", "tensorboard", "none"] = "wandb"
    project: str = "ctcdraft"  # of W&B
    entity: str | None = None  # of W&B; null: the key's own


class Media(NamedTuple):
    """What an evaluation has to show: figures, pictures and tables, each under its name."""

    figures: Mapping[str, Any]
    plots: Mapping[str, Path]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]


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
        with writing(self.path):
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

    def _tell(self, what: "Callable[[Wandb | TensorBoard], None]") -> None:
        """W&B works in a process of its own, which may die, and a disk may be full: the training matters more."""
        if (sink := self.sink) is None:
            return
        try:
            what(sink)
        except Exception as error:
            print(f"{sink.name}: gone ({first_line(error)}), {self.path} goes on without it", flush=True)
            self.sink = None


def log_evaluation(folder: Path, name: str, config: LoggerConfig, settings: Mapping[str, Any], media: Media) -> None:
    """A run of its own, inside the evaluation's folder. Where that fails, a line says so: the evaluation is there."""
    try:
        if sink := _sink(folder, name, config, settings, 0):
            sink.summary(media)
            sink.finish()
    except Exception as error:
        print(f"the evaluation is not logged ({first_line(error)}); {folder} holds it", flush=True)


def _sink(
    folder: Path, name: str, config: LoggerConfig, settings: Mapping[str, Any], step: int
) -> "Wandb | TensorBoard | None":
    """Where figures go beside metrics.jsonl."""
    if config.mode == "tensorboard":
        return TensorBoard(folder, step)
    return None if config.mode == "none" else wandb_run(folder, name, config, settings)


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


class Wandb:
    """One W&B run. Warnings are its alerts."""

    name = "W&B"

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, row: Mapping[str, Any], step: int) -> None:
        self.run.log(dict(row), step=step)

    def summary(self, media: Media) -> None:
        import wandb

        self.run.summary.update(dict(media.figures))
        logged: dict[str, Any] = {f"plots/{name}": wandb.Image(str(path)) for name, path in media.plots.items()}
        for name, rows in media.tables.items():
            columns: list[Any] = list(rows[0])
            logged[name] = wandb.Table(columns, [[row[column] for column in columns] for row in rows])
        self.run.log(logged)

    def alert(self, sentence: str) -> None:
        self.run.alert(title="ctcdraft", text=sentence, level="WARN")

    def finish(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in runs/<name>/tensorboard. Raises ValueError where the package tensorboard is missing."""

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("logger=tensorboard needs the package tensorboard: pip install tensorboard") from error
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self.step = step

    def log(self, row: Mapping[str, Any], step: int) -> None:
        self.step = step
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)

    def summary(self, media: Media) -> None:
        from matplotlib.image import imread

        for name, value in media.figures.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, self.step)
        for name, path in media.plots.items():
            self.writer.add_image(f"plots/{name}", imread(path), self.step, dataformats="HWC")

    def alert(self, sentence: str) -> None:
        self.writer.add_text("warnings", sentence, self.step)

    def finish(self) -> None:
        self.writer.close()


def wandb_run(folder: Path, name: str, config: LoggerConfig, settings: Mapping[str, Any]) -> Wandb | None:
    """A run, online or offline; None where W&B cannot even log offline."""
    import wandb

    id_file = folder / "wandb_id"
    try:
        known = wandb_settings()
        if known.mode == "disabled":
            return None
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12])
        run = {
            "project": config.project,
            "entity": config.entity,
            "name": name,
            "id": id_file.read_text().strip(),
            "dir": str(folder.resolve()),  # W&B's own process may have been started elsewhere
            "config": masked(dict(settings)),
            "settings": wandb.Settings(init_timeout=INIT_SECONDS, silent=True, console="off"),
        }
        if config.mode == "wandb" and known.mode not in OFFLINE and has_key(known):
            try:
                return Wandb(wandb.init(**run, mode="online", resume="allow"))
            except Exception as error:  # no network, or a wrong key
                print(f"W&B: cannot go online ({first_line(error)}), logging offline", flush=True)
                wandb.teardown()  # its process goes on trying, and would call the run's id one in use
        elif config.mode == "wandb":
            why = "it was told to stay offline" if known.mode in OFFLINE else "no key found"
            print(f"W&B: {why}, logging offline; `wandb sync` uploads it later", flush=True)
        return Wandb(wandb.init(**run, mode="offline"))
    except Exception as error:  # a wrong setting, a full disk: the training matters more
        print(f"W&B: not used ({first_line(error)}), {folder / 'metrics.jsonl'} has the figures", flush=True)
        return None


def first_line(error: Exception) -> str:
    return masked(str(error)).partition("\n")[0]


def wandb_settings() -> Any:
    """What this machine says of W&B: its environment, and what `wandb login --host`, `wandb offline` and
    `wandb disabled` have written down. Raises ValueError where that cannot be."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    file = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb"), "settings").expanduser()
    found = wandb.Settings(settings_system=str(file))
    found.update_from_system_settings()
    found.update_from_env_vars(dict(os.environ))
    return found


def has_key(known: Any) -> bool:
    """Is there a key for the server of these settings, in them or in ~/.netrc?"""
    if known.api_key:
        return True
    try:
        server = urlsplit(known.base_url).netloc
        return netrc.netrc(os.environ.get("NETRC")).authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False
