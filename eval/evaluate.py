"""One evaluation: questions in, eval/<bench>/ out (results.json last, and all of it or nothing)."""

import json
import platform
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ctcdraft.data.store import read_object, write_jsonl
from ctcdraft.eval.bench import BenchConfig, load_questions
from ctcdraft.eval.plots import draw
from ctcdraft.eval.report import report
from ctcdraft.eval.results import aggregate
from ctcdraft.eval.run import Answered, generate_rate, run
from ctcdraft.model.base import Base
from ctcdraft.model.decoder import Decoder, DraftConfig
from ctcdraft.model.export import load_head, read_config, replace_folder


def evaluate(
    base: Base,
    head_folder: Path,
    draft: DraftConfig,
    bench: BenchConfig,
    folder: Path,
    *,
    data_folder: Path | None,
    seed: int,
) -> dict[str, Any]:
    """Decode the benchmark with an exported head, write results.json, report.md, plots and answers.jsonl
    into `folder`, and return the results. Raises ValueError as its parts do; nothing is written then."""
    head = load_head(head_folder, base)
    questions = load_questions(bench, base, data_folder, seed)
    answers = run(base, Decoder(base, head, draft), questions, bench)
    results = {
        **_setting(base, head_folder, draft, bench, seed),
        **aggregate(answers, seed),
    }
    results["tokens_per_second"]["generate"] = generate_rate(base, questions, bench)
    fresh = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_jsonl(fresh / "answers.jsonl", (_row(answer) for answer in answers))
    (fresh / "report.md").write_text(report(results))
    draw(results, fresh)
    (fresh / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    replace_folder(fresh, folder)
    return results


def reusable(
    folder: Path, base: Base, head_folder: Path, draft: DraftConfig, bench: BenchConfig, seed: int
) -> dict[str, Any] | None:
    """Results of the very same evaluation (head, draft, bench, seed), if they are there."""
    path = folder / "results.json"
    if not path.is_file():
        return None
    try:
        found = read_object(path)
    except ValueError:
        return None
    setting = json.loads(json.dumps(_setting(base, head_folder, draft, bench, seed)))
    return found if all(found.get(key) == value for key, value in setting.items()) else None


def _setting(base: Base, head_folder: Path, draft: DraftConfig, bench: BenchConfig, seed: int) -> dict[str, Any]:
    config = read_config(head_folder)
    return {
        "bench": bench.kind,
        "bench_path": bench.path,
        "bench_options": asdict(bench),
        "base": base.identity,
        "head": {**config["head"], "sha256": config["sha256"], "training": config["training"]},
        "decoder": asdict(draft),
        "temperature": 0.0,
        "seed": seed,
        "max_new_tokens": bench.max_new_tokens,
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": _device(base),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("ctcdraft", "torch", "transformers", "numba")},
        "lossless": True,
    }


def _device(base: Base) -> str:
    if base.device.type == "cuda":
        return torch.cuda.get_device_name(base.device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def _row(answer: Answered) -> dict[str, Any]:
    return {
        "question_id": answer.question.id,
        "category": answer.question.category,
        "answers": answer.texts,
        "tokens": answer.tokens,
        "steps": answer.steps,
        "speculative_seconds": answer.speculative_seconds,
        "plain_seconds": answer.plain_seconds,
    }
