"""How everything in bench/ is measured: interleaved rounds, medians and quartiles, peak memory above the inputs."""

import json
import multiprocessing
import platform
import re
import time
from pathlib import Path
from statistics import median, quantiles

import torch

from ctcdraft.eval.run import balanced_orders

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def machine():
    """One line: what the figures were taken on."""
    if DEVICE == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, python {platform.python_version()}"
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}), {threads} threads, torch {torch.__version__}, no GPU"


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def interleaved(calls, rounds, warmups=1):
    """{name: seconds of each round}: every round runs every call once, so that they share the machine's moods, and in
    another order, so that none always runs behind the same other."""
    seconds = {name: [] for name in calls}
    orders = balanced_orders([*calls])
    for turn in range(warmups + rounds):
        for name in orders[turn % len(orders)]:
            wait()
            start = time.perf_counter()
            calls[name]()
            wait()
            if turn >= warmups:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(seconds):
    """Median and quartiles as a dict of seconds."""
    low, middle, high = quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
    return {"median": median(seconds), "low": low, "middle": middle, "high": high}


def peak_megabytes(make, *arguments):
    """What `make(*arguments)()` needs at its peak above what is there after `make`.

    On a GPU from the allocator; on a CPU the growth of the resident set of a process of its own.
    """
    if DEVICE == "cuda":
        call = make(*arguments)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        wait()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_resident_growth, args=(sender, make, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def _resident_growth(sender, make, arguments):
    call = make(*arguments)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is in use
    before = _peak_kilobytes()
    call()
    sender.send((_peak_kilobytes() - before) / 1024)


def _peak_kilobytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def told(title, table):
    """Print what was measured."""
    print(f"Machine: {machine()}. Median of interleaved rounds{title}.\n\n{table}")


def keep(rows, out):
    """The figures so far in the file `out`, if one is given."""
    if out:
        out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
