"""Broken input at every public edge, and what became of it. `make fuzz`.

python tests/helpers/fuzz.py [--inputs 2400] [--seed 0] [--edge rows] [--only 17]

Every input must be handled (what comes out is then right) or refused with a sentence of our own. Anything else is a
defect: another exception, a sentence that some library happened to raise, a hang, a file left half-written, or a wrong
outcome. Ends with 1 where there is one; `--edge` and `--only` repeat it.
"""

import argparse
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors import safe_open
from tqdm import tqdm
from trainers import Trainers, write_inputs

from ctcdraft.data.store import load_corpus, read_manifest
from ctcdraft.eval.bench import BenchConfig, load_questions
from ctcdraft.launch import runs
from ctcdraft.launch.cli import _quoted, compose, typed
from ctcdraft.launch.schema import ChatEntry, EvalEntry, ExportEntry, TrainEntry
from ctcdraft.model import export_head, load_head
from ctcdraft.model.heads import CtcConfig, head_on
from ctcdraft.train import engine as ds
from ctcdraft.train import zero
from ctcdraft.train.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from ctcdraft.train.log import LoggerConfig, RunLog
from ctcdraft.train.prepare import DataConfig, prepare

ROOT = Path(__file__).parents[2]
SECONDS = 30  # for one input; it takes well under one
VALUES = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 1e308, -0.0, 0.5, float("nan"), float("inf"), "", " ", "\x00",
    "..", "../../etc/passwd", "/", "a" * 5000, "🦙", "\ud800", "\u202e", "null", "NaN", "1e999", "${oops}", "${name}",
    "${env:HOME}", "http://u:secret@h/v1?key=secret", "{}", "[]", "'", '"', "\\", "\n", "%s", [], {}, [[]], [None],
    {"": ""}, [1, "a"], {"role": 3}, "user", "assistant", "system", "gpt", "human", [[[[[[[[]]]]]]]],
]  # fmt: skip


class Wrong(Exception):
    """An input was taken, and what came out is not right."""


# -- mutation -----------------------------------------------------------------------------------------------


def broken_bytes(data, rng):
    """One to three edits of raw bytes."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        edit = rng.choice(["flip", "cut", "drop", "insert", "repeat", "zero"])
        if edit == "flip" and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif edit == "cut":
            del data[at:]
        elif edit == "drop":
            del data[at : at + rng.randint(1, 40)]
        elif edit == "insert":
            data[at:at] = rng.choice(
                [b"\x00", b"\xff\xfe", b"{", b"[", b'"', b"\\u0000", b"9" * 400, b"\n", rng.randbytes(20)]
            )
        elif edit == "repeat":
            data[at:at] = data[at : at + rng.randint(1, 200)]
        else:
            data[at : at + 8] = bytes(8)
    return bytes(data)


def broken_json(value, rng):
    """One to three edits of a tree of dicts and lists."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return rng.choice(VALUES)
        node, key = rng.choice(places)
        edit = rng.choice(["replace", "replace", "delete", "rename", "nest", "twice"])
        if edit == "delete":
            del node[key]
        elif edit == "rename" and isinstance(node, dict):
            node[str(rng.choice(VALUES))] = node.pop(key)
        elif edit == "nest":
            node[key] = [node[key]] if rng.random() < 0.5 else {"value": node[key]}
        elif edit == "twice" and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        else:
            node[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def _leaves(config, prefix=""):
    for key in config:
        yield f"{prefix}{key}", config[key]
        if hasattr(config[key], "keys"):
            yield from _leaves(config[key], f"{prefix}{key}.")


def _tame(value, rng):
    """Of the same type, and perhaps still good."""
    if isinstance(value, bool):
        return rng.random() < 0.5
    if isinstance(value, (int, float)):
        return rng.choice([value, 2 * value, value + 1, rng.randint(0, 20), round(rng.random(), 2)])
    return "null" if value is None else value


def _places(value):
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def break_file(path, rng):
    """Bytes, JSON, or the file as a whole."""
    draw = rng.random()
    if draw < 0.1:
        path.unlink()
    elif draw < 0.15:
        path.unlink()
        path.mkdir()
    elif path.suffix == ".json" and draw < 0.7 and _parses(path):
        path.write_text(json.dumps(broken_json(json.loads(path.read_text()), rng)), errors="replace")
    else:
        path.write_bytes(broken_bytes(path.read_bytes(), rng))


def _parses(path):
    try:
        return bool(json.loads(path.read_bytes()) or True)
    except ValueError:  # broken before
        return False


# -- the edges: each takes an rng and a folder of its own, and returns where the input was handled ---------


class Edges:
    def __init__(self, work):
        self.work = work
        write_inputs(work)
        make = Trainers(work)
        self.base = make.base
        self.trainer = make(work / "run")
        for _ in range(2):
            for _ in range(2):
                self.trainer._one_step()
            best = self.trainer.step.task.head.state_dict()
            save_checkpoint(self.trainer.step.engine, work / "checkpoints", self.trainer.state, best=best)
            (work / f"whole-{self.trainer.state.step}").mkdir()
        self.states = {4: zero.whole_state(self.trainer.step.engine)}
        shutil.rmtree(work / "whole-2")
        torch.manual_seed(0)
        config = CtcConfig(slots=4, transition="full")
        self.head = head_on(self.base, config).eval()
        training = {"objective": "prefix_ctc", "step": 3, "tokens": 100, "tokens_per_step": 1.5}
        export_head(self.head, self.base, work / "head", training)
        self.known = {name: dict(_leaves(compose(name, []))) for name in ("train", "eval", "chat", "export")}

    def options(self, rng, folder):
        schemas = {"train": TrainEntry, "eval": EvalEntry, "chat": ChatEntry, "export": ExportEntry}
        entry = rng.choice(["train", "train", "train", *schemas])
        words = [f"runs_dir={folder}/runs", f"cache_dir={folder}/cache"][: 2 if entry == "train" else 1]
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(list(self.known[entry]))
            word = f"{key}={_tame(self.known[entry][key], rng)}"
            if rng.random() < 0.3:
                odd = ["head", "data", "zero", "experiment", "nope", "+a.b", "~train", "base"]
                word = f"{rng.choice([key, *odd])}={rng.choice(VALUES)}"
            if rng.random() < 0.1:
                word = broken_bytes(word.encode(errors="replace"), rng).decode(errors="replace")
            words.append(word)
        config = typed(compose(entry, [_quoted(word) for word in words]), schemas[entry])
        if isinstance(config, TrainEntry):
            runs.check_inputs(config)
        else:
            runs.find_run(config.name, config.runs_dir)

    def rows(self, rng, folder):
        good = [
            {"conversations": [{"from": "human", "value": f"q {i}"}, {"from": "gpt", "value": "an answer"}]}
            for i in range(6)
        ]
        good.append({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                                  {"role": "assistant", "content": "a", "reasoning_content": "r"}]})  # fmt: skip
        good.append({"id": "x", "input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]})
        good += [{"text": "a text " * 30}, {"prompt": "only this"}]
        rows = [broken_json(row, rng) if rng.random() < 0.5 else row for row in good]
        lines = rng.random() < 0.5
        text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows)
        data = text.encode(errors="replace")
        path = folder / ("rows.jsonl" if lines else "rows.json")
        path.write_bytes(broken_bytes(data, rng) if rng.random() < 0.5 else data)
        config = DataConfig(
            kind=rng.choice(["sharegpt", "mixed"]),
            path=str(path),
            labels=rng.choice(["rewrite", "argmax", "given"]),
            max_new_tokens=4,
            holdout=0.3,
        )
        made = prepare(self.base, config, 0, folder / "cache")
        account = read_manifest(made)
        if account["used"] + account["rejected"] != account["read"]:
            raise Wrong(f"used + rejected is not read: {account}")
        corpus = load_corpus(made, "train")
        if corpus.ids.max() >= self.base.vocab_size or corpus.ids.min() < 0:
            raise Wrong("a token that the base does not know")

    def questions(self, rng, folder):
        kind = rng.choice(["mt_bench", "spec_bench", "gsm8k", "humaneval", "text"])
        rows = [
            {"mt_bench": {"question_id": i, "category": "c", "turns": ["hello", "again"]},
             "spec_bench": {"question_id": i, "category": "c", "turns": ["hello"]},
             "gsm8k": {"question": "how many", "answer": "#### 3"},
             "humaneval": {"task_id": f"t/{i}", "prompt": "def f():\n", "entry_point": "f"},
             "text": {"text": "words " * 60}}[kind]
            for i in range(4)
        ]  # fmt: skip
        path = folder / "questions.jsonl"
        data = "\n".join(json.dumps(broken_json(row, rng) if rng.random() < 0.2 else row) for row in rows).encode()
        path.write_bytes(broken_bytes(data, rng) if rng.random() < 0.3 else data)
        config = BenchConfig(kind=kind, path=str(path), prompt_tokens=[4, 20])
        for question in load_questions(config, self.base, None, 0):
            prompt = question.prompt_after(self.base)
            if not prompt or max(prompt) >= self.base.vocab_size:
                raise Wrong(f"question {question.id} has the prompt {prompt}")

    def heads(self, rng, folder):
        head = shutil.copytree(self.work / "head", folder / "head")
        break_file(head / rng.choice(["config.json", "config.json", "model.safetensors", "README.md"]), rng)
        loaded = load_head(head, self.base)
        mine = self.head.state_dict()
        if loaded.config != self.head.config or any(
            not torch.equal(w.float(), mine[n].float()) for n, w in loaded.state_dict().items()
        ):
            raise Wrong("another head than was exported")

    def checkpoints(self, rng, folder):
        there = shutil.copytree(self.work / "checkpoints", folder / "checkpoints")
        for _ in range(rng.randint(1, 2)):
            files = [path for path in there.rglob("*") if path.is_file()]
            break_file(rng.choice(files), rng)
        state, _ = load_checkpoint(self.trainer.step.engine, there)
        found = zero.whole_state(self.trainer.step.engine)
        with safe_open(self.work / "checkpoints" / f"step_{state.step:06d}" / "state.safetensors", "pt") as stream:
            if any(not torch.equal(stream.get_tensor(name), value) for name, value in found.items()):
                raise Wrong(f"not the state of step {state.step}")

    def runs(self, rng, folder):
        run, config = folder / "runs" / "r", typed(compose("train", [f"runs_dir={folder}/runs", "name=r"]), TrainEntry)
        run.mkdir(parents=True)
        data = self.work / "cache"
        runs.open_run(run, runs.with_batch(config, run), self.base, next(data.glob("data-*")))
        shutil.copytree(self.work / "checkpoints", run / "checkpoints")
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": i, "train/loss": 1.0 / i}) + "\n" for i in range(1, 9))
        )
        newest = f"checkpoints/step_{self.trainer.state.step:06d}"
        names = ["config.yaml", "paths.json", "metrics.jsonl", f"{newest}/manifest.json", f"{newest}/state.safetensors"]
        break_file(run / rng.choice(names), rng)
        runs.check_inputs(config)
        config = runs.with_batch(config, run)
        runs.run_paths(run)
        runs.already_trained(run, config)
        runs.open_run(run, config, self.base, next(data.glob("data-*")))
        found = read_checkpoint(run / "checkpoints")
        with safe_open(self.work / "checkpoints" / found.path.name / "state.safetensors", "pt") as stream:
            if any(not torch.equal(stream.get_tensor(f"best/{name}"), weight) for name, weight in found.best.items()):
                raise Wrong("another head than was kept")
        RunLog(run, LoggerConfig("none"), {}, 5).close()
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        if steps != sorted(set(steps)) or steps[-1:] > [5]:
            raise Wrong(f"metrics.jsonl has steps {steps}")


EDGES = ("options", "rows", "questions", "heads", "checkpoints", "runs")


# -- judging ------------------------------------------------------------------------------------------------


@contextmanager
def no_longer_than(seconds):
    def late(number, frame):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(edge, rng, folder):
    """`handled`, `sentence`, or (`defect`, what)."""
    try:
        with no_longer_than(SECONDS):
            edge(rng, folder)
    except Exception as error:
        wrong = _defect(error)
        if wrong:
            return "defect", wrong
        found = "sentence"
    else:
        found = "handled"
    left = [
        path for path in folder.rglob("*") if path.name.startswith(("unfinished-", "tmp_")) or path.suffix == ".tmp"
    ]
    return ("defect", f"left behind: {left[0]}") if left else (found, "")


def _defect(error):
    """What is wrong with how an input was refused; None where it was our own sentence, or the system's."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    told = " ".join(str(error).split())
    ours = ROOT in Path(where.filename).resolve().parents and "site-packages" not in where.filename
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return None
    if isinstance(error, ValueError) and ours and 10 < len(told) < 1500:
        return None
    return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {told[:300]}"


def fuzz(inputs, seed, edges=EDGES, only=None):
    """Outcomes by edge, and the defects as (edge, number, what)."""
    counts, defects = {edge: Counter() for edge in edges}, []
    with tempfile.TemporaryDirectory(prefix="ctcdraft-fuzz-") as work:
        made = Edges(Path(work))
        for edge in edges:
            numbers = range(inputs // len(edges)) if only is None else [only]
            for number in tqdm(numbers, edge, unit="input", mininterval=1, disable=None):
                folder = Path(work) / "inputs" / edge / str(number)
                folder.mkdir(parents=True)
                found, what = outcome(getattr(made, edge), random.Random(f"{seed}/{edge}/{number}"), folder)
                counts[edge][found] += 1
                if what:
                    defects.append((edge, number, what))
                shutil.rmtree(folder)
    return counts, defects


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--edge", choices=EDGES)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    ds.init_distributed()
    counts, defects = fuzz(asked.inputs, asked.seed, [asked.edge] if asked.edge else EDGES, asked.only)
    print(f"{'edge':12} {'inputs':>7} {'handled':>8} {'sentence':>9} {'defects':>8}")
    for edge, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{edge:12} {found.total():7} {found['handled']:8} {found['sentence']:9} {found['defect']:8}")
    for edge, number, what in defects:
        print(f"--edge {edge} --only {number}: {what}")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
