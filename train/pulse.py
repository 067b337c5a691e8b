"""What the ranks know of each other: who died, who hangs, who failed first; and no process outlives its launcher.

A thread in each process puts a line about it into a store on rank 0 once a second. Collectives alone would not end a
run that lost a rank: NCCL waits, and what gloo reports on the others is a consequence, never the cause. torchrun ends
the ranks of its own host, and a timeout of the process group does not say which rank the others wait for.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from torch.distributed import Store

from ctcdraft.data.secrets import masked

TICK = 1.0
DEAD_SECONDS = 60.0  # a process that has said nothing for so long is dead, or its machine cannot be reached
LOST_SECONDS = 8.0  # the same, once a rank has lost a connection
GRACE_SECONDS = 5.0  # for a process to end by itself, after another has failed
SAVE_SECONDS = 120.0  # for a process to save and end, after its launcher has gone
LAUNCHERS = ("torchrun", "torch.distributed", "deepspeed", "launch/ranks.py")
WITHOUT_STORE = "rank 0, which the others report to, ended without a word or cannot be reached"
LOST = ("connection", "gloo", "nccl", "socket", "broken pipe")  # words of an error that another rank's end causes


class Word(NamedTuple):
    """A rank's line in the store: its host, ticks of its thread, how often it moved on, and what it is doing."""

    host: str
    tick: int = 0
    moves: int = 0
    doing: str = "setting up"


class Pulse:
    """One rank's part of the watch; `store` is shared by all of them."""

    def __init__(self, rank: int, world: int, host: str, store: Store) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.limit: float | None = None  # seconds without a move that are a hang; None: as long as it takes
        self._word, self._tick, self._moved_at = Word(host), 0, time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # each rank's last tick, and when it was new
        self._launchers, self._orphan_since = launchers(), 0.0
        self._over, self._ending = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self._watch, name="pulse", daemon=True)

    def stop(self) -> None:
        """All went well. Call it between two barriers, while the store is there."""
        self._over.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()

    def moved(self, doing: str) -> None:
        """The main thread has got on, to this."""
        self._moved_at = time.monotonic()
        self._word = self._word._replace(moves=self._word.moves + 1, doing=doing)

    def failed(self, error: BaseException) -> None:
        """End this process, and with it the run: say what failed first, on whichever rank it was."""
        self._over.set()
        own, expected = " ".join(str(error).split()), isinstance(error, (ValueError, OSError))
        if not expected:
            own = f"rank {self.rank} on {self._word.host}: {type(error).__name__}: {own[:500]}"
        cause = own if isinstance(error, ValueError) else self._behind(own)
        if cause == own and (not expected or os.environ.get("CTCDRAFT_TRACEBACK")):
            traceback.print_exception(error)
        self._end(cause)

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            if self.world > 1:  # C code that holds the interpreter stops this thread too
                faulthandler.dump_traceback_later(2 * DEAD_SECONDS, exit=True)
            cause = self._checked()
            if cause and not self._over.wait(GRACE_SECONDS):
                self._end(cause)

    def _checked(self, silence: float = DEAD_SECONDS) -> str | None:
        """What ends the run, if anything does. silence: seconds after which a rank that says nothing is dead."""
        self._follow_launcher()
        try:
            self.publish()
            if self.store.check(["failure"]):
                return self._first("")
            looks = self.rank == 0 or silence < DEAD_SECONDS
            return self._hanging() or (self._dead(silence) if looks else None)
        except RuntimeError:
            return WITHOUT_STORE

    def publish(self) -> None:
        self._tick += 1  # beside the word, which is the main thread's to change
        self.store.set(str(self.rank), json.dumps(self._word._replace(tick=self._tick)))

    def _words(self) -> list[Word]:
        return [Word(*json.loads(line)) for line in self.store.multi_get([str(r) for r in range(self.world)])]

    def _hanging(self) -> str | None:
        """The rank that has got on least while the others wait for it."""
        if self.limit is None or time.monotonic() - self._moved_at < self.limit:
            return None
        last, word = min(enumerate(self._words()), key=lambda ranked: ranked[1].moves)
        return (
            f"rank {last} on {word.host} hangs: it has not got beyond {word.doing} for {self.limit / 60:g} minutes "
            "(train.hang_minutes)"
        )

    def _dead(self, seconds: float) -> str | None:
        """The rank that has said nothing new for so long."""
        now = time.monotonic()
        for number, word in enumerate(self._words()):
            tick, since = self._seen.get(number, (-1, now))
            if tick != word.tick:
                self._seen[number] = word.tick, now
            elif now - since > seconds:
                place = f"rank {number} on {word.host}"
                return f"{place} ended without a word (killed, or its machine is gone), in {word.doing}"
        return None

    def _behind(self, own: str) -> str:
        """This rank's sentence; or, where it is about a broken connection, one about the rank that broke it."""
        if not any(word in own.lower() for word in LOST):
            return own
        self._seen.clear()
        deadline = time.monotonic() + LOST_SECONDS + 2 * TICK
        while time.monotonic() < deadline:
            if cause := self._checked(LOST_SECONDS):
                return cause
            time.sleep(TICK)
        return own

    def _first(self, sentence: str) -> str:
        """What failed first, on any rank: this, unless there was something before."""
        with suppress(RuntimeError):
            return self.store.compare_set("failure", "", sentence).decode()
        return sentence

    def _end(self, cause: str) -> None:
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the other thread is at it
        first, told = masked(self._first(cause)), 1
        with suppress(RuntimeError):
            told = self.store.add(f"told/{self._word.host}/{os.getppid()}", 1)
        if told == 1:
            behind_bar = "" if threading.current_thread() is threading.main_thread() else "\n"
            print(f"{behind_bar}error: {first}", file=sys.stderr, flush=True)
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun ends with what it finds there
            Path(report).write_text(json.dumps({"message": first, "timestamp": str(int(time.time()))}))
        if self.rank == 0 and self.world > 1:
            time.sleep(3 * TICK)  # the store ends with this process; the others are to read it first
        os._exit(1)

    def _follow_launcher(self) -> None:
        """A process whose launcher was killed saves and ends; it would otherwise train on, and nobody knew."""
        if self._orphan_since and time.monotonic() - self._orphan_since > SAVE_SECONDS:
            os._exit(1)
        if not self._orphan_since and not all(map(_alive, self._launchers)):
            self._orphan_since = time.monotonic()
            print("\nerror: the launcher has gone: saving and ending", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)


def launchers() -> list[psutil.Process]:
    """The launchers that this process was started by: its parent, and the parent's, as far as they are some."""
    found = []
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            words = process.cmdline()[:5] or [""]
            is_python = Path(words[0]).name.startswith("python")
            if not is_python or not any(name in word for name in LAUNCHERS for word in words):
                break
            found.append(process)
    return found


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


_current: Pulse | None = None


def begin(rank: int, world: int, host: str, store: Store) -> Pulse:
    """Start this process's pulse. Every rank calls it, and a barrier follows."""
    global _current
    _current = Pulse(rank, world, host, store)
    _current.publish()
    _current.thread.start()
    return _current


def moved(doing: str) -> None:
    """Tell the others what this rank does now, where there are any."""
    if _current is not None:
        _current.moved(doing)


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Within, a rank that does not call `moved` for so long ends the run."""
    moved("its start")
    if _current is not None:
        _current.limit = seconds
    try:
        yield
    finally:
        if _current is not None:
            _current.limit = None
