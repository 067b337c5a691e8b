"""Where an evaluation lies: `eval/<bench>/` is the latest one, and what other settings gave is kept beside it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctcdraft.data.store import read_object
from ctcdraft.model.export import replace_folder


def digest_of(setting: dict[str, Any]) -> str:
    """Six hex digits that change with what is measured, or with what it is measured on."""
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:6]


def take(folder: Path, setting: dict[str, Any]) -> dict[str, Any] | None:
    """Results of the very same setting, if they are there; they become the latest."""
    digest = digest_of(setting)
    for place in (folder, _beside(folder, digest)):
        found = _results(place)
        if found and found.get("setting") == digest:
            if place != folder:
                _keep(folder)
                replace_folder(place, folder)
            return found
    return None


def put(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a new folder that then becomes the latest: all of it, or nothing."""
    fresh = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    fill(fresh)
    _keep(folder)
    replace_folder(fresh, folder)


def _keep(folder: Path) -> None:
    found = _results(folder)
    if found and found.get("setting"):
        replace_folder(folder, _beside(folder, found["setting"]))


def _beside(folder: Path, digest: str) -> Path:
    return folder.with_name(f"{folder.name}-{digest}")


def _results(folder: Path) -> dict[str, Any] | None:
    try:
        return read_object(folder / "results.json") if (folder / "results.json").is_file() else None
    except ValueError:
        return None
