"""Processes that prepare data or store states, to be killed. They come from a server that has no threads: a copy of the
tests' own process could wait for ever for a lock that one of its threads had."""

import ctypes
import json
import multiprocessing
import os
import time
from pathlib import Path

import torch

from ctcdraft.data import server as http
from ctcdraft.data.features import FeatureStore
from ctcdraft.data.store import join_corpora
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode import generate
from ctcdraft.model.folders import new_folder
from ctcdraft.train.prepare import prepare

NO_DISK = 77
NAMESPACES = 0x10020000  # of users and of mounts, in unshare(2)
SHARD = 5  # sequences in a file of stored states: a dozen files
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "ctcdraft.data.features", "ctcdraft.train.prepare"])


def preparing(base, config, cache, log=None):
    """A process that prepares data; `log` gets a line per answer of the base."""
    return CONTEXT.Process(target=_prepare, args=(base, config, cache, log), daemon=True)


def storing(base, data, cache, log=None):
    """A process that stores states, slowly; `log` gets a character per batch."""
    return CONTEXT.Process(target=_store, args=(base, data, cache, log), daemon=True)


def joining(parts, disk, kilobytes):
    """A process that joins corpora into a folder that is a disk of so few kilobytes, and writes what went wrong into
    `said` beside it. Its exit code is NO_DISK where none can be mounted."""
    return CONTEXT.Process(target=_join, args=(parts, disk, kilobytes), daemon=True)


def store_of(base, data, cache, layers=0):
    return FeatureStore(base, data, cache, base.attended(layers) if layers else None, SHARD)


def wait_for(log, seconds=60):
    """Until a process has begun its work. Raises AssertionError where none has."""
    end = time.monotonic() + seconds
    while not log.exists():
        assert time.monotonic() < end
        time.sleep(0.005)


def logged_answers(log, answer=generate.continue_all):
    """`continue_all`, slower and with a log."""

    def logged(*options):
        for done in answer(*options):
            time.sleep(0.005)
            with log.open("a") as stream:
                stream.write(json.dumps(done.prompt) + "\n")
            yield done

    return logged


def logged_batches(log, hidden=Base.hidden):
    """`Base.hidden`, slower and, where wanted, with a log."""

    def logged(self, ids_BL, **options):
        time.sleep(0.01)
        if log is not None:
            with log.open("a") as stream:
                stream.write("x")
        return hidden(self, ids_BL, **options)

    return logged


def _prepare(base, config, cache, log):
    torch.set_num_threads(1)
    http.LONGEST_WAIT = 0.2
    if log is not None:
        generate.continue_all = logged_answers(log)
    prepare(base, config, 0, cache)


def _store(base, data, cache, log):
    torch.set_num_threads(1)
    Base.hidden = logged_batches(log)
    store_of(base, data, cache).fill()


def _join(parts, disk, kilobytes):
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(NAMESPACES):
        os._exit(NO_DISK)
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, content in maps.items():
        Path(f"/proc/self/{name}").write_text(content)
    if libc.mount(b"tmpfs", bytes(disk), b"tmpfs", 0, f"size={kilobytes}k".encode()):
        os._exit(NO_DISK)
    said = ""
    try:
        with new_folder(disk / "joined") as fresh:
            join_corpora(fresh / "train.safetensors", parts)
    except OSError as error:
        said = str(error)
    disk.with_name("said").write_text(said)
