"""What a refactor must not change, to the bit: of a small training of every kind of head its losses, weights, decoded
tokens, and what its drafts come to along known answers.

python tests/helpers/golden.py record <folder>      before
python tests/helpers/golden.py compare <folder>     after: prints what differs, and exits with 1

Bits depend on the machine and its threads: record and compare on the same one. Speed is measured in bench/.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMON = ["experiment=smoke", "logger=none", "train.deterministic=true", "train.steps=10", "draft.budget=fixed"]
COUNT = ["count=true", "bench=toy", "bench.questions=4", "bench.max_new_tokens=24"]
CASES = {
    "default": [],
    "no_lookup": ["draft.prompt_lookup=0", "bench=toy"],
    "chain": ["draft=chain"],
    "paper": ["objective=ctc", "head.merge=true", "head.band=null", "head.transition=none"],
    "whole vocabulary": ["head.draft_vocab_size=null", "objective.negatives=null"],
    "parallel": ["head=parallel", "objective=cross_entropy", "head.transition=full"],
    "medusa": ["head=medusa", "objective=cross_entropy"],
    "eagle": ["head=eagle", "objective=cross_entropy"],
    "mlp": ["head=mlp", "objective=cross_entropy"],
    "glide": ["head=glide", "objective=cross_entropy"],
    "packed": ["train.pack=true", "data.features=bf16", "zero=2", "train.micro_batch=2"],
    "diffusion": ["head=diffusion", "objective=cross_entropy"],
    "divergence": ["objective.divergence=js"],
    "graph": ["draft=graph"],
    "coupled": ["draft=coupled", "bench.temperatures=[0.8]", "bench.seeds=1"],
    "sampled": ["bench.temperatures=[0,0.8]", "bench.seeds=1", "head.layers=1"],
}
TIMED = ("perf/", "time/", "data/")  # rows of metrics.jsonl
ANSWER = ("question_id", "temperature", "answers", "tokens", "steps", "identical")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    differing = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            found, path = outcome(name, Path(scratch)), options.folder / f"{name}.json"
            if options.do == "record":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found, indent=1) + "\n")
            else:
                differing += [f"{name}: {where}" for where in differences(json.loads(path.read_text()), found)]
            print(f"{name}: {len(found['steps'])} steps, {len(found['answers'])} answers", flush=True)
    print("\n".join(differing) or f"{options.do}: {len(options.only)} cases, nothing differs")
    return int(bool(differing))


def outcome(name, scratch):
    """All figures of a case that no clock decides."""
    config = [f"name={name}", f"runs_dir={scratch}/runs", f"cache_dir={scratch}/cache"]
    options = [*COMMON, "objective.labels=4", "head.slots=4", *CASES[name]]
    run("launch/train.py", [*config, *options])
    folder = scratch / "runs" / name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (answers,) = (folder / "eval").glob("*/answers.jsonl")
    draft = [word for word in options if word.startswith("draft")]
    run("launch/eval.py", [*config, *draft, *COUNT])
    counted = json.loads((folder / "eval" / "toy-count" / "results.json").read_text())
    return {
        "steps": [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows],
        "weights": hashlib.sha256((folder / "head" / "model.safetensors").read_bytes()).hexdigest(),
        "answers": [{key: row[key] for key in ANSWER} for row in map(json.loads, answers.read_text().splitlines())],
        "counted": counted["drafts"],
    }


def run(entry, options):
    """Raises SystemExit with what a failed command said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([sys.executable, entry, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{entry} {' '.join(options)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def differences(want, got, where=""):
    """Where two nested values are not the same."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key in want.keys() | got.keys():
            yield from differences(want.get(key), got.get(key), f"{where}/{key}")
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for number, pair in enumerate(zip(want, got, strict=True)):
            yield from differences(*pair, f"{where}/{number}")
    elif want != got:
        yield f"{where}: {want!r} -> {got!r}"[:300]


if __name__ == "__main__":
    sys.exit(main())
