"""Kill a training run at random moments, half of them within a save, and compare what it ends with. `make soak`.

python tests/helpers/soak.py [--kills 30] [--zero 0] [--ranks 1] [--seed 0]

Ends with 1 unless weights, losses, learning rates and data order are, bit for bit, those of the undisturbed run.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from safetensors.torch import load_file
from tqdm import tqdm
from trainers import OPTIONS, write_inputs

ROOT = Path(__file__).parents[2]
OFTEN = ["logger=none", "data.max_new_tokens=16", "train.log_every=1", "train.save_every=2", "train.eval_anchors=16"]
START_SECONDS = 180


def command(name: str, steps: int, zero: int, ranks: int) -> list[str]:
    varying = [f"name={name}", f"zero={zero}", f"train.steps={steps}", f"train.eval_every={steps // 4}"]
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node", str(ranks)]
    launcher = [sys.executable] if ranks == 1 else torchrun
    return [*launcher, str(ROOT / "launch" / "train.py"), *OPTIONS, *OFTEN, *varying]


def start(words: list[str], work: Path) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        words, cwd=work, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen) -> None:
    error = process.communicate()[1]
    if process.returncode:
        sys.exit(f"the run failed by itself: {error[-2000:]}")


def kill_at_random(process: subprocess.Popen, run: Path, rng: random.Random, in_save: bool) -> tuple[bool, int]:
    """Kill it once it trains: (a save was under way, logged steps)."""
    log = run / "metrics.jsonl"
    before = log.stat().st_size if log.is_file() else 0
    until(lambda: log.is_file() and log.stat().st_size > before, process)
    time.sleep(rng.uniform(0.0, 0.4))
    if in_save:
        until(lambda: any(run.glob("checkpoints/unfinished-*")), process)
        time.sleep(rng.uniform(0.0, 0.005))
    everyone = [
        *psutil.Process(process.pid).children(recursive=True),
        process,
    ]  # torchrun's ranks lead their own groups
    for one in everyone:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate()
    return any(run.glob("checkpoints/unfinished-*")), log.read_bytes().count(b"\n")


def until(so, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not so():
        if process.poll() is not None:
            sys.exit(f"the run ended before it could be killed: {process.communicate()[1][-2000:]}")
        if time.monotonic() > deadline:
            sys.exit(f"nothing happened for {START_SECONDS} s")
        time.sleep(0.001)


def outcome(run: Path) -> tuple[dict, list]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures = [{k: v for k, v in row.items() if not k.startswith(("perf/", "time/"))} for row in rows]
    return load_file(run / "head" / "model.safetensors"), figures


def first_difference(rows: list[dict], others: list[dict]) -> str:
    """Where two runs part: the step, and the figures that differ there."""
    for row, other in zip(rows, others, strict=False):
        names = sorted(name for name in row.keys() | other.keys() if row.get(name) != other.get(name))
        if names:
            return f"first at step {row['step']}: " + ", ".join(f"{n} {row.get(n)} {other.get(n)}" for n in names)
    return "one has more rows"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--zero", type=int, default=0, choices=range(4))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, begin = random.Random(asked.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ctcdraft-soak-") as folder:
        work = Path(folder)
        write_inputs(work)
        finish(start(command("calm", asked.steps, asked.zero, asked.ranks), work))
        within, lost = 0, 0
        words, run = command("killed", asked.steps, asked.zero, asked.ranks), work / "runs" / "killed"
        for kill in tqdm(range(asked.kills), "kills", unit="kill"):
            process = start(words, work)
            saving, logged = kill_at_random(process, run, rng, in_save=kill % 2 == 1)
            latest = run / "checkpoints" / "latest"
            kept = int(latest.read_text()[5:]) if latest.is_file() else 0
            within, lost = within + saving, lost + max(0, logged - kept)
        finish(start(words, work))
        weights, figures = outcome(work / "runs" / "calm")
        again, rows_again = outcome(run)
        steps_once = [row["step"] for row in rows_again] == list(range(1, asked.steps + 1))
        same_rows = figures == rows_again
        same_weights = weights.keys() == again.keys() and all(w.equal(again[name]) for name, w in weights.items())
    setting = f"zero={asked.zero}, ranks: {asked.ranks}, {asked.steps} steps"
    print(f"kills: {asked.kills}, {within} of them within a save; {setting}")
    print(f"steps done again: {lost} ({lost / max(1, asked.kills):.1f} per kill; a checkpoint every 2)")
    print(f"metrics.jsonl: {len(rows_again)} rows, each step once: {steps_once}; all figures identical: {same_rows}")
    if not same_rows:
        print(first_difference(figures, rows_again))
    print(f"final weights bit-identical to the undisturbed run: {same_weights} ({len(weights)} tensors)")
    print(f"took {time.monotonic() - begin:.0f} s")
    return 0 if steps_once and same_rows and same_weights else 1


if __name__ == "__main__":
    sys.exit(main())
