"""Where an evaluation lies: `eval/<bench>/` is the latest one, and what other settings gave is kept beside it."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.data.store import read_object
from ctcdraft.model.folders import new_folder

from .report import count_table, tables
from .results import heads_at


@dataclass(frozen=True)
class Evaluated:
    """What results.json holds, the folder that it lies in, and whether it was there already."""

    results: dict[str, Any]
    folder: Path
    reused: bool = False

    @property
    def exit_code(self) -> int:
        """1 where an output is not the base's own and rounding cannot explain it; 0 otherwise."""
        decoded = {} if "drafts" in self.results else heads_at(self.results)
        return int(any(head["identical"]["beyond_bound"] for heads in decoded.values() for head in heads.values()))

    @property
    def table(self) -> str:
        """What ends a command."""
        title = f"{self.results['bench']} on {self.results['base']['name']}"
        parts = [count_table(self.results)] if "drafts" in self.results else tables(self.results)
        end = f"lies in {self.folder}{' (reused)' if self.reused else ''}"
        return "\n" + "\n\n".join([title, *parts, end]) + "\n"


def digest_of(setting: dict[str, Any]) -> str:
    """Six hex digits that change with what is measured, or with what it is measured on."""
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:6]


def existing(folder: Path, setting: dict[str, Any]) -> Evaluated | None:
    """The evaluation of the very same setting, if it is there; it becomes the latest."""
    digest = digest_of(setting)
    beside = folder.with_name(f"{folder.name}-{digest}")
    if _results(folder).get("setting") != digest and _results(beside).get("setting") == digest:
        _set_aside(folder)
        beside.rename(folder)
    found = _results(folder)
    return Evaluated(found, folder, reused=True) if found.get("setting") == digest else None


@contextmanager
def latest(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which then becomes the latest: all of it, or nothing."""
    with new_folder(folder) as fresh:
        yield fresh
        _set_aside(folder)


def write_results(folder: Path, setting: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Write results.json; what stands in it."""
    results = {"setting": digest_of(setting), **setting, **figures}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def _set_aside(folder: Path) -> None:
    """Make room for another evaluation; what is none is removed."""
    digest = _results(folder).get("setting")
    beside = folder.with_name(f"{folder.name}-{digest}") if digest else folder
    shutil.rmtree(beside, ignore_errors=True)
    if folder.exists():
        folder.rename(beside)


def _results(folder: Path) -> dict[str, Any]:
    """Empty where there are none, or they are damaged."""
    try:
        return read_object(folder / "results.json")
    except ValueError:
        return {}
