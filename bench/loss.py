"""Time and peak memory of the CTC loss: this project's chunked path, torch's, and the two bare GEMMs.

python bench/loss.py [anchors slots labels hidden vocab]
"""

import multiprocessing
import re
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import torch

from ctcdraft.eval.report import markdown_table
from ctcdraft.model import fused_ctc_loss

ROUNDS = 5


def problem(N, T, U, D, V):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, T, D, generator=g).requires_grad_()
    weight = torch.randn(V, D, generator=g) * 0.05
    blank = torch.randn(D, generator=g) * 0.05
    return hidden, weight, blank, torch.randint(0, V, (N, U), generator=g), torch.full((N,), U)


def ours(hidden, weight, blank, labels, lengths):
    fused_ctc_loss(hidden, weight, blank, labels, lengths).backward()


def torch_path(hidden, weight, blank, labels, lengths):
    logits = hidden @ torch.cat([weight, blank.unsqueeze(0)]).T
    log_probs = logits.log_softmax(2).transpose(0, 1)
    slots = torch.full_like(lengths, hidden.shape[1])
    torch.nn.functional.ctc_loss(
        log_probs, labels, slots, lengths, blank=weight.shape[0], zero_infinity=True
    ).backward()


def bare_gemms(hidden, weight, blank, labels, lengths):
    with torch.no_grad():
        (hidden.flatten(0, 1) @ weight.T) @ weight


PATHS = {"ctcdraft, chunked": ours, "torch: matmul, log_softmax, ctc_loss": torch_path, "two bare GEMMs": bare_gemms}


def peak_megabytes(name, shape, queue):
    arguments = problem(*shape)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is in use
    before = peak_kilobytes()
    PATHS[name](*arguments)
    queue.put((peak_kilobytes() - before) / 1024)


def peak_kilobytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def measured_memory(name, shape):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=peak_megabytes, args=(name, shape, queue))
    process.start()
    peak = queue.get()
    process.join()
    return peak


def main():
    shape = tuple(int(word) for word in sys.argv[1:]) or (512, 8, 4, 256, 32000)
    arguments = problem(*shape)
    seconds = {name: [] for name in PATHS}
    for _ in range(ROUNDS):
        for name, path in PATHS.items():
            start = time.perf_counter()
            path(*arguments)
            seconds[name].append(time.perf_counter() - start)
    floor = median(seconds["two bare GEMMs"])
    rows = []
    for name, taken in seconds.items():
        low, _, high = quantiles(taken, n=4)
        memory = measured_memory(name, shape)
        rows.append(
            (name, f"{median(taken):.2f}", f"{low:.2f}-{high:.2f}", f"{median(taken) / floor:.2f}", f"{memory:.0f}")
        )
    print(f"anchors, slots, labels, hidden, vocabulary = {shape}; forward and backward, float32,")
    print(f"CPU with {torch.get_num_threads()} threads, torch {torch.__version__}, median of {ROUNDS} interleaved")
    print(markdown_table(("path", "seconds", "quartiles", "against GEMMs", "peak MB above inputs"), rows))


if __name__ == "__main__":
    main()
