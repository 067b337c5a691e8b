"""All that one hour of a GPU is for: parts in order of value, each in a process of its own, with a time limit.

bench/gpu.sh [--minutes 60] [--only PART ...] [--smollm2 FOLDER --prompts FILE --mt-bench FILE] [--out FOLDER] [--dry]
             [--with "PART OPTIONS"]: more options for a part's command, as --with "train train.max_minutes=2"

A part that lacks something is skipped, with the reason; one that takes too long is ended, and the next one begins. The
table (gpu.md) and the same as JSON (gpu.json) are written anew after each part; what a part printed is in <part>.log,
its figures beside it. No network is needed: packages that are missing can be carried along, on PYTHONPATH.
--dry runs every part at a tiny size on the CPU, so that nothing fails on the GPU that a CPU can tell.
"""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from measure import machine

from ctcdraft.eval.report import markdown_table

ROOT = Path(__file__).resolve().parents[1]
TESTS = "-m pytest -q -p no:cacheprovider tests/model"
RUN = "name=gpu runs_dir={out}/runs cache_dir={out}/cache logger=none"
TRAINING = ("deepspeed", "hydra", "datasets", "pydantic")  # what training and its command line import


@dataclass(frozen=True)
class Part:
    """minutes: the most it may take. command: a script and its options; dry: the same at a tiny size on a CPU.
    modules: what it imports and a machine may lack."""

    name: str
    what: str
    minutes: float
    command: str
    dry: str
    modules: tuple[str, ...] = ()


PARTS = [
    Part(
        name="kernels",
        what="Triton kernels against the float64 oracle",
        minutes=5,
        command=f"{TESTS}/loss/test_kernels.py",
        dry=f"{TESTS}/loss/test_kernels.py --collect-only",
        modules=("pytest", "triton"),
    ),
    Part(
        name="errors",
        what="their errors on the shapes of a 7B base",
        minutes=4,
        command="bench/fused_ctc.py --grid errors --out {out}/errors",
        dry="bench/fused_ctc.py --grid 'dry errors' --out {out}/errors",
    ),
    Part(
        name="graphs",
        what="CUDA graphs decode what eager steps decode",
        minutes=5,
        command=f"{TESTS}/decode/test_captured.py",
        dry=f"{TESTS}/decode/test_captured.py --collect-only",
        modules=("pytest",),
    ),
    Part(
        name="decode",
        what="decoding of a 7B-shaped base with scripted drafts",
        minutes=12,
        command="bench/decode.py --shape vicuna_7b --rounds 3 --nodes 8 16 32 64 --eager --out {out}/decode.json",
        dry="bench/decode.py --shape tiny --rounds 1 --tokens 16 --nodes 8 --eager --out {out}/decode.json",
    ),
    Part(
        name="batches",
        what="the same of several sequences together",
        minutes=8,
        command="bench/decode.py --shape vicuna_7b --rounds 3 --nodes 8 16 --batch 8 32 --out {out}/batches.json",
        dry="bench/decode.py --shape tiny --rounds 1 --tokens 16 --nodes 4 --batch 2 --out {out}/batches.json",
    ),
    Part(
        name="train",
        what="SmolLM2's head, ten minutes of training",
        minutes=22,
        command=f"launch/train.py {RUN} experiment=smollm2 base.path={{smollm2}} base.dtype=bf16 data.path={{prompts}} "
        "data.limit=2000 train.precision=bf16 train.max_minutes=10 bench.questions=24",
        dry=f"launch/train.py {RUN} experiment=smoke",
        modules=TRAINING,
    ),
    Part(
        name="mt_bench",
        what="MT-Bench with that head",
        minutes=10,
        command=f"launch/eval.py {RUN} bench=mt_bench bench.path={{mt_bench}} bench.max_new_tokens=256",
        dry=f"launch/eval.py {RUN} bench=toy bench.questions=2 bench.max_new_tokens=8",
        modules=TRAINING,
    ),
    Part(
        name="loss",
        what="time and memory of the loss beside its rivals",
        minutes=15,
        command="bench/fused_ctc.py --grid gpu --without torch.compile --out {out}/loss",
        dry="bench/fused_ctc.py --grid dry --without torch.compile --rounds 1 --skip-memory --out {out}/loss",
    ),
    Part(
        name="step",
        what="a training step, split by part",
        minutes=5,
        command="bench/train_step.py --shape vicuna_7b --out {out}/step.json",
        dry="bench/train_step.py --shape tiny --anchors 8 --rounds 1 --out {out}/step.json",
    ),
    Part(
        name="engine",
        what="vLLM with that head and without",
        minutes=12,
        command="bench/serve.py --head {out}/runs/gpu/head --base {smollm2} --env {prefix} --dtype bfloat16 "
        "--bench mt_bench --path {mt_bench} --questions 16 --batch 1 4 16 --logs {out} --out {out}/engine.json",
        dry="bench/serve.py --help",
        modules=("vllm",),
    ),
]


def lacking(part, command, files):
    """The first thing that a part needs and has not, as a reason; or nothing."""
    for module in part.modules:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    for name, path in files.items():
        if f"{{{name}}}" in command and path is None:
            return f"--{name.replace('_', '-')} is not given"
        if f"{{{name}}}" in command and not path.exists():
            return f"{path} is not there"
    return ""


def run(words, seconds, log, environment):
    """How it ended, and its last words."""
    with log.open("w") as stream:
        output = {"stdout": stream, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, **output)
        try:
            code = process.wait(timeout=seconds)
            outcome = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return outcome, " ".join(lines[-1].replace("|", " ").split())[:100] if lines else ""


def write(rows, out):
    """The table so far, and the same as JSON, with the last figures that the training logged."""
    log = out / "runs" / "gpu" / "metrics.jsonl"
    training = json.loads(log.read_text().splitlines()[-1]) if log.is_file() and log.stat().st_size else None
    whole = {"machine": machine(), "parts": rows, "training": training}
    (out / "gpu.json").write_text(json.dumps(whole, indent=1) + "\n")
    table = markdown_table(("part", "what", "outcome", "seconds", "last words"), [row.values() for row in rows])
    (out / "gpu.md").write_text(f"# The GPU in one call\n\n{machine()}\n\n{table}\n")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="of all parts together: 60")
    parser.add_argument("--only", nargs="+", help="these parts alone")
    more = {"dest": "more", "metavar": '"PART OPTIONS"', "help": "more options for a part's command"}
    parser.add_argument("--with", type=shlex.split, action="append", default=[], **more)
    parser.add_argument("--smollm2", type=Path, help="folder or .gguf file of SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=Path, help="conversations to train on")
    parser.add_argument("--mt-bench", type=Path, help="FastChat's question.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    given = parser.parse_args()
    out, names = given.out.resolve(), [part.name for part in PARTS]
    if unknown := {*(given.only or ()), *(part for part, *_ in given.more)} - {*names}:
        parser.error(f"no such part: {' '.join(sorted(unknown))}; choose of {' '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    files = {name: getattr(given, name) for name in ("smollm2", "prompts", "mt_bench")}
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if given.dry else {})
    end, rows = time.monotonic() + 60 * given.minutes, []
    for part in PARTS:
        if given.only and part.name not in given.only:
            continue
        command = part.dry if given.dry else part.command
        words = [word.format(out=out, prefix=sys.prefix, **files) for word in shlex.split(command)]
        words += [word for name, *options in given.more if name == part.name for word in options]
        start = time.monotonic()
        seconds, outcome, last = min(60 * part.minutes, end - start), lacking(part, command, files), ""
        if not outcome and seconds < 1:
            outcome = "no time is left"
        if outcome:
            outcome = f"skipped: {outcome}"
        else:
            print(f"{part.name}: {part.what}, at most {seconds / 60:.0f} minutes", flush=True)
            outcome, last = run([sys.executable, *words], seconds, out / f"{part.name}.log", environment)
        took = f"{time.monotonic() - start:.0f}"
        rows.append({"part": part.name, "what": part.what, "outcome": outcome, "seconds": took, "last words": last})
        print(f"{part.name}: {outcome}, {took} s", flush=True)
        table = write(rows, out)
    print(f"\n{table}\n\nlies in {out}")
    return int(any(row["outcome"] != "done" and not row["outcome"].startswith("skipped") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
