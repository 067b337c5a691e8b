"""Folders in a cache: made whole or not at all, and by one process at a time."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that becomes `folder` in one rename when the block ends well, and is gone if not.

    A process that is killed leaves nothing of that name; of two at once, the first to end stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"unfinished-{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # a temporary folder is made for its owner alone
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def claimed(lock: Path, *, wait: bool) -> Iterator[bool]:
    """Is this piece of work ours? Another process that holds it is waited for, or `wait=False` answers no.

    A process that dies, however it does, gives back what it had claimed.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
