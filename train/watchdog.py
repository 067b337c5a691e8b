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
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store

from ctcdraft.data.secrets import masked

TICK = 1.0
DEAD_SECONDS = 60.0  # a process that has said nothing for so long is dead, or its machine cannot be reached
LOST_SECONDS = 8.0  # the same, once a rank has lost a connection
LAST_SECONDS = 120.0  # for a process to save and end, after its launcher has gone; or to run a thread again
LAUNCHERS = ("torchrun", "torch.distributed", "deepspeed", "launch/ranks.py")
LOST = ("connection", "gloo", "nccl", "socket", "broken pipe")  # words of an error that another rank's end causes


class Watchdog:
    """One rank's part of the watch; `store` is shared by all of them."""

    def __init__(self, rank: int, world: int, host: str, store: Store) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.line: dict[str, Any] = {"host": host, "tick": 0, "moves": 0, "doing": "setting up"}
        self.limit: float | None = None  # seconds without a move that are a hang; None: as long as it takes
        self._moved_at, self._silence = time.monotonic(), DEAD_SECONDS
        self._seen: dict[int, tuple[int, float]] = {}  # each rank's last tick, and when it was new
        self._over, self._ending = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Every rank calls it, and a barrier follows."""
        self.publish()
        self.thread.start()

    def stop(self) -> None:
        """All went well. Call it between two barriers, while the store is there."""
        self._over.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()

    def moved(self, doing: str, limit: float | None = None) -> None:
        """The main thread has got on, to this; where it takes more than `limit` seconds, it hangs."""
        self.line |= {"moves": self.line["moves"] + 1, "doing": doing}
        self._moved_at, self.limit = time.monotonic(), limit

    def failed(self, error: Exception) -> None:
        """End this process, and with it the run: say what failed first, on whichever rank it was."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # with which a launcher ends those that are left
        self.limit, expected = None, isinstance(error, (ValueError, OSError))
        sentence = " ".join(str(error).split())
        if not expected:
            sentence = f"rank {self.rank} on {self.line['host']}: {type(error).__name__}: {sentence[:500]}"
        if not isinstance(error, ValueError) and any(word in sentence.lower() for word in LOST):
            self._silence = LOST_SECONDS  # the thread ends this process with the sentence about the rank that was lost
            time.sleep(LOST_SECONDS + 6 * TICK)
        if not expected or os.environ.get("CTCDRAFT_TRACEBACK"):
            traceback.print_exception(error)
        self._end(sentence)

    def _watch(self) -> None:
        orphan, parents = False, launchers()
        while not self._over.wait(TICK):
            if not orphan and self.world > 1:
                faulthandler.dump_traceback_later(LAST_SECONDS, exit=True)  # where C code stops this thread too
            if not orphan and not all(map(_alive, parents)):
                orphan = True  # it would train on, and nobody knew
                print("\nerror: the launcher has gone: saving and ending", file=sys.stderr, flush=True)
                faulthandler.dump_traceback_later(LAST_SECONDS, exit=True)
                os.kill(os.getpid(), signal.SIGTERM)
            if cause := self.cause():
                self._end(cause)

    def cause(self) -> str | None:
        """What ends the run, if anything does, in a sentence."""
        try:
            self.publish()
            if self.store.check(["failure"]):
                return self._first("")
            looks = self.rank == 0 or self._silence < DEAD_SECONDS
            return self._hanging() or (self._dead() if looks else None)
        except RuntimeError:
            return "rank 0, which the others report to, ended without a word or cannot be reached"

    def publish(self) -> None:
        self.line["tick"] += 1
        self.store.set(str(self.rank), json.dumps(self.line))

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.store.multi_get([str(r) for r in range(self.world)])]

    def _hanging(self) -> str | None:
        """The rank that has got on least while the others wait for it."""
        limit = self.limit
        if limit is None or time.monotonic() - self._moved_at < limit:
            return None
        last, line = min(enumerate(self._lines()), key=lambda ranked: ranked[1]["moves"])
        return (
            f"rank {last} on {line['host']} hangs: it has not got beyond {line['doing']} for {limit / 60:g} minutes "
            "(train.hang_minutes)"
        )

    def _dead(self) -> str | None:
        now = time.monotonic()
        for number, line in enumerate(self._lines()):
            tick, since = self._seen.get(number, (-1, now))
            if tick != line["tick"]:
                self._seen[number] = line["tick"], now
            elif now - since > self._silence:
                place = f"rank {number} on {line['host']}"
                return f"{place} ended without a word (killed, or its machine is gone), in {line['doing']}"
        return None

    def _first(self, sentence: str) -> str:
        """What failed first, on any rank: this, unless there was something before."""
        with suppress(RuntimeError):
            return self.store.compare_set("failure", "", sentence).decode()
        return sentence

    def _end(self, cause: str) -> None:
        self._ending.acquire()  # for good: where the other thread is at it, this one waits for the end
        first, told = masked(self._first(cause)), 1
        with suppress(RuntimeError):
            told = self.store.add(f"told/{self.line['host']}/{os.getppid()}", 1)
        if told == 1:
            behind_bar = "" if threading.current_thread() is threading.main_thread() else "\n"
            print(f"{behind_bar}error: {first}", file=sys.stderr, flush=True)
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun ends with what it finds there
            Path(report).write_text(json.dumps({"message": first, "timestamp": str(int(time.time()))}))
        if self.rank == 0 and self.world > 1:
            time.sleep(3 * TICK)  # the store ends with this process; the others are to read it first
        os._exit(1)


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
