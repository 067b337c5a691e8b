"""Folders that several processes make."""

import errno
import fcntl
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from ctcdraft.model.folders import claimed, new_folder, write_atomically


def test_what_a_folder_replaces_stays_whole_until_then_and_where_it_fails(tmp_path, monkeypatch):
    folder = tmp_path / "head.v1"
    for content in ("first", "second"):
        with new_folder(folder, replaces=True) as fresh:
            (fresh / "a").write_text(content)
            assert not folder.exists() or (folder / "a").read_text() == "first"
        assert (folder / "a").read_text() == content
    really = Path.rename

    def fails_once_made(path, target):
        if path.name.startswith("unfinished") and not path.name.endswith(".old"):
            raise OSError("no room")
        return really(path, target)

    monkeypatch.setattr(Path, "rename", fails_once_made)
    with pytest.raises(OSError, match="no room"), new_folder(folder, replaces=True) as fresh:
        (fresh / "a").write_text("third")
    assert (folder / "a").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["head.v1"]


def test_a_claim_outlives_the_folder_of_its_lock(tmp_path, monkeypatch):
    """A process that is done removes the folder of locks, at worst between another's look and its claim."""
    lock, opened = tmp_path / "a.work" / "0.lock", []
    really = Path.open

    def open_late(path, *given):
        if not opened:
            shutil.rmtree(lock.parent)
        opened.append(path)
        return really(path, *given)

    monkeypatch.setattr(Path, "open", open_late)
    with claimed(lock, wait=False) as ours:
        assert ours
        with claimed(lock, wait=False) as twice:
            assert not twice
    assert len(opened) == 3


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc: a folder that is there and takes no files")
def test_a_folder_that_takes_no_files_is_refused():
    with pytest.raises(ValueError, match="/proc takes no files"), claimed(Path("/proc/a.lock"), wait=True):
        pass


def test_a_disk_without_locks_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    said = r"lies on a disk that takes no locks \(.*not implemented\): mount it with them, or take another place"
    with pytest.raises(OSError, match=said), claimed(tmp_path / "a.lock", wait=True):
        pass


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_what_cannot_be_a_folder_is_one_sentence(tmp_path, folder):
    (tmp_path / "file").touch()
    place = tmp_path / folder / "a"
    said = r"a could not be written \(.*\): make room there or take another place"
    for made in (new_folder(place), claimed(place, wait=True)):
        with pytest.raises(OSError, match=said), made:
            pass
    with pytest.raises(OSError, match=said):
        write_atomically(place, b"")
