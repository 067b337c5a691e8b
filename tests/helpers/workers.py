"""Processes that prepare data or store states, to be killed. They come from a server that has no threads: a copy of the
tests' own process could wait for ever for a lock that one of its threads had."""

import json
import multiprocessing
import time

import torch

from ctcdraft.data import server as http
from ctcdraft.data.features import FeatureStore
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode import generate
from ctcdraft.train.prepare import prepare

POSITIONS = 120  # per shard of stored states: a dozen shards
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "ctcdraft.data.features", "ctcdraft.train.prepare"])


def preparing(base, config, cache, log=None):
    """A process that prepares data; `log` gets a line per answer of the base."""
    return CONTEXT.Process(target=_prepare, args=(base, config, cache, log), daemon=True)


def storing(base, data, cache, log=None):
    """A process that stores states, slowly; `log` gets a character per batch."""
    return CONTEXT.Process(target=_store, args=(base, data, cache, log), daemon=True)


def store_of(base, data, cache, kind="bf16", layers=0, positions=POSITIONS):
    return FeatureStore(base, data, kind, cache, base.attended(layers) if layers else None, positions)


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
