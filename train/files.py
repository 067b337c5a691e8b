"""Folders that are whole or not there: fsync, checksums in a manifest, one rename; and what a disk has left."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
CHUNK = 1 << 20


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content as a whole, on disk when this returns."""
    fresh = path.with_name(path.name + ".tmp")
    try:
        with fresh.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def seal(fresh: Path, folder: Path, facts: dict[str, Any]) -> None:
    """Write `fresh`'s manifest (size and SHA-256 of every file, `facts`, and a SHA-256 of these), force all of it to
    the disk, and rename it to `folder`, which must not hold anything whole: what is there is removed."""
    files = {str(path.relative_to(fresh)): _described(path) for path in _files(fresh)}
    for path in _files(fresh):
        sync(path)
    facts = {"files": files, **facts}
    write_atomically(fresh / MANIFEST, json.dumps({**facts, "sha256": _digest(facts)}, indent=2).encode())
    for path in {path.parent for path in _files(fresh)}:
        sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)
    sync(folder.parent)


def unsealed(folder: Path) -> str | None:
    """What is wrong with a folder that `seal` made, as a phrase; None where nothing is."""
    facts = read_manifest(folder)
    if facts is None:
        return f"it has no whole {MANIFEST}"
    there = {str(path.relative_to(folder)): path for path in _files(folder) if path.name != MANIFEST}
    for name, known in facts["files"].items():
        if name not in there:
            return f"{name} is missing"
        if there[name].is_symlink() or _described(there[name]) != known:
            return f"{name} is damaged (its checksum differs)"
    extra = sorted(set(there) - set(facts["files"]))
    return f"{extra[0]} is no part of it" if extra else None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The facts that a folder was sealed with, and its `files`; None where there are none, or damaged ones."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        return None
    return found if found.pop("sha256", None) == _digest(found) else None


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in _files(folder))


def free_bytes(folder: Path) -> int:
    """What the disk of a folder has left for us."""
    return shutil.disk_usage(folder).free


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _described(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
