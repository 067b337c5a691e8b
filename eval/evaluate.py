"""One evaluation: questions in, eval/<bench>/ out, for one head or for several side by side."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ctcdraft.data.store import write_jsonl
from ctcdraft.eval.bench import BenchConfig, Question, load_questions
from ctcdraft.eval.compare import compared
from ctcdraft.eval.control import bound_in_words
from ctcdraft.eval.place import digest_of, put
from ctcdraft.eval.plots import draw, draw_heads
from ctcdraft.eval.report import heads_report, report
from ctcdraft.eval.results import blocks_of, measured
from ctcdraft.eval.rows import questions_hash
from ctcdraft.eval.run import Answered, generate_rate, run
from ctcdraft.model.base import Base
from ctcdraft.model.decoder import Decoder, DraftConfig
from ctcdraft.model.export import load_head, read_config

Measured = tuple[dict[str, Any], Sequence[Answered]]
LOOKUP_ALONE = "prompt lookup alone"  # stands beside every head: it costs no training
LOOKUP_SHOWN = ("tokens_per_step", "tokens_per_step_ci95", "tokens_per_second", "speedup", "identical")


@dataclass(frozen=True)
class Measurement:
    """What heads are measured by; data_folder: the run's prepared data, for bench=heldout."""

    base: Base
    draft: DraftConfig
    bench: BenchConfig
    data_folder: Path | None = None
    seed: int = 0

    def questions(self) -> list[Question]:
        """Raises ValueError as `load_questions` does."""
        return load_questions(self.bench, self.base, self.data_folder, self.seed)

    def decoder(self, head_folder: Path) -> Decoder:
        return Decoder(self.base, load_head(head_folder, self.base), self.draft)

    def lookup_alone(self) -> Decoder:
        """The control that needs no head, under the same draft settings."""
        copied = self.draft.prompt_lookup or DraftConfig.prompt_lookup
        return Decoder(self.base, None, replace(self.draft, prompt_lookup=copied))


def evaluate(measurement: Measurement, head_folder: Path, folder: Path) -> dict[str, Any]:
    """Decode the benchmark with an exported head, write results.json, report.md, plots and answers.jsonl
    into `folder`, and return the results. Raises ValueError as its parts do; nothing is written then."""
    found = _measure(measurement, {"": head_folder})
    results, answers = found[""]
    for block, lookup in zip(blocks_of(results), blocks_of(found[LOOKUP_ALONE][0]), strict=True):
        block["prompt_lookup_alone"] = {key: lookup[key] for key in LOOKUP_SHOWN}
    put(folder, lambda fresh: _write(fresh, results, answers))
    return results


def evaluate_heads(measurement: Measurement, head_folders: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Decode every question with each of the heads and with prompt lookup alone, interleaved.

    `folder` gets the comparison (results.json, report.md, heads.png), which is returned, and under each head's label
    what `evaluate` writes. Raises ValueError as its parts do, and nothing is written then.
    """
    found = _measure(measurement, head_folders)
    all_results = {label: results for label, (results, _) in found.items()}
    setting = heads_setting_of(measurement, head_folders)
    answers = {label: answers for label, (_, answers) in found.items()}
    comparison = {
        "setting": digest_of(setting),
        **setting,
        "questions": next(iter(all_results.values()))["questions"],
        "temperatures": compared(all_results, answers, measurement.seed),
    }

    def fill(fresh: Path) -> None:
        for label in head_folders:
            (fresh / label).mkdir()
            _write(fresh / label, *found[label])
        (fresh / "report.md").write_text(heads_report(comparison))
        draw_heads(comparison, fresh)
        (fresh / "results.json").write_text(json.dumps(comparison, indent=2) + "\n")

    put(folder, fill)
    return comparison


def setting_of(measurement: Measurement, head_folder: Path) -> dict[str, Any]:
    """The fields of results.json that say what is measured, and on what."""
    return {**_common(measurement), "head": _head(head_folder)}


def heads_setting_of(measurement: Measurement, head_folders: Mapping[str, Path]) -> dict[str, Any]:
    return {
        **_common(measurement),
        "heads": {label: _head(folder) for label, folder in head_folders.items()},
    }


def _measure(measurement: Measurement, head_folders: Mapping[str, Path]) -> dict[str, Measured]:
    """Results and answers of each head, and of prompt lookup alone (its results are the measured fields only)."""
    base, bench, seed = measurement.base, measurement.bench, measurement.seed
    decoders = {label: measurement.decoder(folder) for label, folder in head_folders.items()}
    decoders[LOOKUP_ALONE] = measurement.lookup_alone()
    questions = measurement.questions()
    answers = run(base, decoders, questions, bench, seed)
    rate = generate_rate(base, questions, bench)
    found: dict[str, Measured] = {}
    for label, folder in head_folders.items():
        setting = setting_of(measurement, folder)
        results = {"setting": digest_of(setting), **setting, **measured(answers[label], seed)}
        results["tokens_per_second"]["generate"] = rate
        found[label] = results, answers[label]
    found[LOOKUP_ALONE] = measured(answers[LOOKUP_ALONE], seed), answers[LOOKUP_ALONE]
    return found


def _write(fresh: Path, results: dict[str, Any], answers: Sequence[Answered]) -> None:
    write_jsonl(fresh / "answers.jsonl", (_row(answer) for answer in answers))
    (fresh / "report.md").write_text(report(results))
    draw(results, fresh)
    (fresh / "results.json").write_text(json.dumps(results, indent=2) + "\n")


def _common(measurement: Measurement) -> dict[str, Any]:
    base, bench = measurement.base, measurement.bench
    return {
        "format": 2,  # of results.json: what was measured in another is measured anew
        "bench": bench.kind,
        "bench_path": bench.path,
        "bench_options": asdict(bench),
        "bench_hash": questions_hash(bench.path),
        "bench_rows": "evenly spread",  # until 2026-11-24: the first ones
        "base": base.identity,
        "template_args": base.template_args,
        "decoder": asdict(measurement.draft),
        "seed": measurement.seed,
        "max_new_tokens": bench.max_new_tokens,
        "dtype": str(base.dtype).removeprefix("torch."),
        "rounding_bound": bound_in_words(base.dtype),
        "device": _device(base),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("ctcdraft", "torch", "transformers", "numba")},
        "lossless": True,
    }


def _head(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    return {**config["head"], "sha256": config["sha256"], "training": config["training"]}


def _device(base: Base) -> str:
    if base.device.type == "cuda":
        return torch.cuda.get_device_name(base.device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def _row(answer: Answered) -> dict[str, Any]:
    return {
        "question_id": answer.question.id,
        "category": answer.question.category,
        "temperature": answer.setting.temperature,
        "seed": answer.setting.seed,
        "answers": [turn.text for turn in answer.turns],
        "tokens": answer.tokens,
        "steps": answer.steps,
        "tokens_per_step": answer.grown / answer.steps if answer.steps else 1.0,
        "speculative_seconds": answer.seconds,
        "plain_seconds": answer.plain_seconds,
        "identical": len(answer.turns) - len(answer.divergences),
        "turns": len(answer.turns),
    }
