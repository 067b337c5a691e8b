"""Time, memory and error of the fused CTC loss beside torch's, chunked rivals and the bare GEMMs.

python bench/fused_ctc.py [--grid quick|small|vicuna_7b|gpu|errors] [--out FOLDER] [--rounds N]

quick: one shape, some 20 s. small: what docs/results/fused_ctc.md shows for a CPU, some 10 min. gpu: the shapes of
a 7B base, for a machine with a GPU. With --out the tables and plots are written there.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import loss_paths
import psutil
import torch
from loss_paths import FLOOR, MODES, PATHS, Shape
from measure import DEVICE, interleaved, machine, peak_megabytes, spread
from tqdm import tqdm

from ctcdraft.eval.report import markdown_table

BIG = Shape(N=8192, T=8, U=5, D=4096, V=32000, dtype="bfloat16")
GRIDS = {
    "quick": {"modes": {Shape(): ("frozen",)}},
    "dry": {"modes": {Shape(N=8, D=32, V=500): ("frozen",)}, "vocabulary": [Shape(N=8, D=32, V=500)]},
    "dry errors": {"error": [Shape(N=4, D=32, V=500)]},
    "small": {
        "modes": {Shape(): MODES, Shape(N=128, D=1024): ("frozen",), Shape(N=128, V=128256): ("frozen",)},
        "lattice": [Shape(N=128, T=T, U=U) for T, U in ((4, 3), (8, 5), (16, 8))],
        "memory": [Shape(N=N, V=V) for V in (8000, 16000, 32000) for N in (128, 256, 512)],
        "vocabulary": [Shape(N=256, V=V) for V in (8000, 16000, 32000, 64000)],
        "error": [Shape(N=64, D=256, V=V, dtype=d) for d in ("float32", "bfloat16") for V in (2000, 8000, 32000)],
    },
    # One 2048-token sequence of a 7B base, every position an anchor: is the loss under 1 GB above its inputs?
    "vicuna_7b": {"alone": [replace(BIG, N=2048, U=8, dtype="bfloat16" if DEVICE == "cuda" else "float32")]},
    "errors": {"error": [replace(BIG, N=256, V=V, dtype=d) for d in ("float32", "bfloat16") for V in (32000, 128256)]},
    "gpu": {
        "modes": {
            replace(BIG, N=2048): MODES,
            **{replace(BIG, N=2048, D=D, V=V): ("frozen",) for D in (4096, 1024) for V in (128256, 151936)},
            replace(BIG, N=2048, D=1024): ("frozen",),
            BIG: ("frozen",),
        },
        "alone": [replace(BIG, N=2048, U=8)],
        "lattice": [replace(BIG, N=16384 // T, T=T, U=U) for T, U in ((4, 3), (16, 8))],
    },
}


def fits(name, shape):
    """Whole logits stand several times over: leave out what the machine cannot hold."""
    if name in ("ctcdraft", "ctcdraft, no Triton", "torch, checkpointed chunks", "Liger-style chunks"):
        return True
    if name == "Cut Cross-Entropy lse":
        return shape.dtype != "float32"
    free = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else psutil.virtual_memory().available
    copies = 1 if name == FLOOR else 8 if shape.dtype == "bfloat16" else 5
    return copies * shape.logits_bytes() < free * 0.9


def compare(shape, mode, names, rounds, memory=True):
    """One row per path: seconds, ratio to the floor, peak megabytes above the inputs."""
    runnable = [name for name in names if fits(name, shape)]
    problem = loss_paths.Problem(shape, trained=mode == "trained")
    calls = {name: loss_paths.call(name, problem, mode) for name in runnable}
    seconds = interleaved(calls, rounds)
    del problem, calls
    rows = []
    for name in names:
        if name not in runnable:
            rows.append({"path": name, "skipped": "does not fit into memory"})
            continue
        peak = peak_megabytes(loss_paths.made, name, shape, mode) if memory else None
        rows.append({"path": name, **spread(seconds[name]), "megabytes": peak})
    return {"shape": vars(shape), "mode": mode, "rows": rows}


def table(result):
    rows = {row["path"]: row for row in result["rows"]}
    floor, ours = rows[FLOOR].get("median"), rows["ctcdraft"]
    lines = []
    for name, row in rows.items():
        if "skipped" in row:
            lines.append((name, row["skipped"], "", "", "", "", ""))
            continue
        memory = row["megabytes"]
        lines.append(
            (
                name,
                f"{row['median'] * 1e3:.1f}",
                f"{row['low'] * 1e3:.1f}-{row['high'] * 1e3:.1f}",
                f"{row['median'] / floor:.2f}" if floor else "-",
                f"{row['median'] / ours['median']:.2f}",
                "-" if memory is None else f"{memory:.0f}",
                "-" if memory is None else f"{memory / ours['megabytes']:.1f}",
            )
        )
    s, mode = result["shape"], result["mode"]
    what = {"forward": "forward only", "frozen": "forward + backward", "trained": "the same, LM head trained"}[mode]
    title = f"{what}; N={s['N']} T={s['T']} U={s['U']} d={s['D']} V={s['V']} {s['dtype']}"
    header = ("path", "ms", "quartiles", "/ GEMMs", "/ ctcdraft", "peak MB", "/ ctcdraft")
    return f"**{title}**\n\n{markdown_table(header, lines)}"


def errors(shapes):
    """Relative L2 error of the slot states' gradient against float64 on the same rounded inputs."""
    found = []
    for shape in shapes:
        problem = loss_paths.Problem(shape)
        for part in ("hidden", "weight", "blank"):
            tensor = getattr(problem, part)
            setattr(problem, part, tensor.detach().double().requires_grad_(tensor.requires_grad))
        want = loss_paths.call("compact alphabet", problem, "frozen")()[0]
        for name in ("ctcdraft", "torch"):
            got = loss_paths.gradient(name, shape).double()
            error = ((got - want).norm() / want.norm()).item()
            found.append({"path": name, **vars(shape), "error": error})
    return found


def error_table(found):
    rows = [(e["path"], e["dtype"], e["V"], f"{e['error']:.1e}") for e in found]
    return markdown_table(("path", "dtype", "V", "relative L2 error"), rows)


def measured(grid, options):
    """Everything a grid asks for, with a progress bar; on a CPU each peak of memory takes a process of its own. What is
    there is written after each shape, so that a process that is ended leaves it."""
    paths, rounds = [name for name in PATHS if name not in options.without], options.rounds
    jobs = [(shape, mode) for shape, modes in grid.get("modes", {}).items() for mode in modes]
    few = ["ctcdraft", "torch", FLOOR]
    results = {"machine": machine(), "compared": [], "lattice": [], "memory": [], "vocabulary": [], "error": []}
    results["alone"] = []
    total = len(jobs) + sum(len(grid.get(key, ())) for key in ("alone", "lattice", "memory", "vocabulary"))
    with tqdm(total=total, desc="fused_ctc", leave=False) as bar:
        for shape, mode in jobs:
            results["compared"].append(compare(shape, mode, [*paths, FLOOR], rounds, not options.skip_memory))
            write(results, options.out)
            bar.update()
        for shape in grid.get("alone", ()):
            start = time.perf_counter()
            megabytes = peak_megabytes(loss_paths.made, "ctcdraft", shape, "frozen")
            results["alone"].append({**vars(shape), "megabytes": megabytes, "wall": time.perf_counter() - start})
            bar.update()
        for shape in grid.get("lattice", ()):
            results["lattice"].append(compare(shape, "frozen", few, rounds))
            bar.update()
        for key in ("memory", "vocabulary"):
            for shape in grid.get(key, ()):
                timed = rounds if key == "vocabulary" else 1
                results[key].append(compare(shape, "frozen", few, timed, memory=key == "memory"))
                bar.update()
    results["error"] = errors(grid.get("error", ()))
    write(results, options.out)
    return results


def write(results, folder):
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fused_ctc.json").write_text(json.dumps(results, indent=1) + "\n")
        (folder / "tables.md").write_text(text(results) + "\n")


def text(results):
    parts = [f"Machine: {results['machine']}. Median of interleaved rounds; the peak is above the inputs."]
    parts += [table(result) for result in (*results["compared"], *results["lattice"])]
    if results["alone"]:
        keys = ("N", "T", "U", "D", "V", "dtype")
        rows = [(*(row[key] for key in keys), f"{row['megabytes']:.0f}") for row in results["alone"]]
        parts += ["ctcdraft alone, forward + backward:", markdown_table((*keys, "peak MB above inputs"), rows)]
    if results["error"]:
        parts += [
            "Gradient of the slot states against float64 on the same rounded inputs:",
            error_table(results["error"]),
        ]
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", choices=GRIDS, default="quick")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-memory", action="store_true", help="of the table of all ways")
    parser.add_argument("--without", nargs="+", choices=PATHS, default=[], help="these ways are left out")
    options = parser.parse_args()
    if DEVICE == "cuda" and not torch.compiler.is_compiling():
        torch.backends.cuda.matmul.allow_tf32 = False
    results = measured(GRIDS[options.grid], options)
    print(text(results))
    if options.out:
        from loss_plots import draw

        draw(results, options.out)


if __name__ == "__main__":
    main()
