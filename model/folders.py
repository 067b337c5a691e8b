"""Folders and files that are whole or not there, made by any number of processes: claims by locks, fsync,
checksums in a manifest, one rename."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

MANIFEST = "manifest.json"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # of a model or data set: owner/name
TRIES = 100  # to make a lock in a folder that others may take away
Piece = TypeVar("Piece")


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """What the disk does not take is an OSError with a sentence, of safetensors too."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{place} could not be written ({error}): make room there or take another place, and run it again"
        ) from error


@contextmanager
def new_folder(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes `folder` in one rename when the block ends well, and is gone if not.

    A process that is killed leaves nothing of that name; of two at once, the first to end stays. replaces: the last
    one does, and what was there before stays whole until then. Raises OSError where the disk does not take it.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"unfinished-{folder.name}-", dir=folder.parent))
        before = unfinished.with_name(f"{unfinished.name}.old")
        try:
            yield unfinished
            unfinished.chmod(0o755)  # a temporary folder is made for its owner alone
            if replaces and folder.exists():
                folder.rename(before)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
        finally:
            if before.exists() and not folder.exists():
                before.rename(folder)
            for left in (unfinished, before):
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def claimed(lock: Path, *, wait: bool) -> Iterator[bool]:
    """Is this piece of work ours? Another process that holds it is waited for, or `wait=False` answers no.

    A process that dies, however it does, gives back what it had claimed. Raises ValueError where no file can be made.
    """
    for _ in range(TRIES):
        with writing(lock), suppress(FileNotFoundError):  # another process has ended and taken the folder with it
            lock.parent.mkdir(parents=True, exist_ok=True)
            stream = lock.open("w")
            break
    else:
        raise ValueError(f"{lock.parent} takes no files: choose another folder")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:  # Lustre's, unless it is mounted with -o flock
            raise OSError(
                f"{lock.parent} lies on a disk that takes no locks ({error}): mount it with them, or take another place"
            ) from error
        yield True


def work_folder(folder: Path) -> Path:
    """Where what goes into a folder lies until it is done."""
    return folder.with_name(f"{folder.name}.work")


def share_out(
    folder: Path, pieces: Callable[[], Iterable[Piece]], make: Callable[[int, Piece], None], finish: Callable[[], None]
) -> None:
    """Make every piece of a folder, then finish it with its manifest. Any number of processes may do so at once, and
    may die: a piece is claimed by one of them, which makes it unless it is there. Each returns when all is done."""
    work, done = work_folder(folder), (folder / MANIFEST).is_file
    left: set[int] | None = None
    if not done():
        for wait in (False, True):  # first what is free, then what another process may have left
            others = set()
            for number, piece in enumerate(() if left == set() else pieces()):
                if left is None or number in left:
                    with claimed(work / f"{number:05}.lock", wait=wait) as ours:
                        if not ours:
                            others.add(number)
                        elif not done():
                            make(number, piece)
            left = others
        with claimed(folder.with_name(f"{folder.name}.lock"), wait=True):
            if not done():
                finish()
    shutil.rmtree(work, ignore_errors=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content as a whole, on disk when this returns. Makes its folder where that is not there."""
    fresh = path.with_name(path.name + ".tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_bytes(data)
            sync(fresh)
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


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write a folder's manifest (size and SHA-256 of every file, `facts`, and a SHA-256 of these), and force all of it
    to the disk."""
    facts = {"files": _contents(folder), **facts}
    (folder / MANIFEST).write_text(json.dumps({**facts, "sha256": digest_of(facts)}, indent=2))
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sealed_facts(folder: Path) -> dict[str, Any]:
    """The facts that a folder was sealed with, and its `files`. Raises ValueError, a phrase, where it is not whole."""
    try:
        facts = json.loads((folder / MANIFEST).read_bytes())
        whole = facts.pop("sha256") == digest_of(facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"it has no whole {MANIFEST}")
    known, there = facts["files"], _contents(folder)
    wrong = sorted(name for name in known.keys() | there.keys() if known.get(name) != there.get(name))
    if wrong:
        raise ValueError(f"{wrong[0]} is missing, damaged or no part of it (its checksum differs)")
    return facts


def digest_of(facts: Any) -> str:
    """Changes with any of the facts, and not with their order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _contents(folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of every file below a folder but its manifest, by name; a link has none."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = "a link"
        elif path.is_file() and name != MANIFEST:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            found[name] = {"bytes": path.stat().st_size, "sha256": digest}
    return found
