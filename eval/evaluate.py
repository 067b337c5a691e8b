"""One evaluation: questions in, eval/<bench>/ out, for one head or for several side by side."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ctcdraft.data.store import write_jsonl
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.export import load_head, read_config

from .bench import BenchConfig, load_questions, questions_hash
from .control import bound_in_words
from .plots import draw, draw_heads
from .question import Question
from .report import heads_report, report
from .results import LOOKUP_ALONE, blocks_of, compact, compared, measured
from .run import Answered, generate_rate, run
from .store import Evaluated, digest_of, existing, latest, write_results


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

    def setting(self, head_folders: Mapping[str, Path]) -> dict[str, Any]:
        """The fields of results.json that say what is measured, and on what; one head alone stands under ""."""
        base, bench = self.base, self.bench
        configs = {label: read_config(folder) for label, folder in head_folders.items()}
        heads = {label: {**c["head"], "sha256": c["sha256"], "training": c["training"]} for label, c in configs.items()}
        on_cuda, threads = base.device.type == "cuda", torch.get_num_threads()
        return {
            "format": 3,  # of results.json: what was measured in another is measured anew
            "bench": bench.kind,
            "bench_path": bench.path,
            "bench_options": asdict(bench),
            "bench_hash": questions_hash(bench.path),
            "base": base.identity,
            "template_args": base.template_args,
            "decoder": asdict(self.draft),
            "seed": self.seed,
            "max_new_tokens": bench.max_new_tokens,
            "dtype": str(base.dtype).removeprefix("torch."),
            "rounding_bound": bound_in_words(base.dtype),
            "device": torch.cuda.get_device_name(base.device)
            if on_cuda
            else f"CPU ({platform.machine()}, {threads} threads)",
            "threads": threads,
            "versions": {name: version(name) for name in ("ctcdraft", "torch", "transformers", "numba")},
            "lossless": True,
            **({"head": heads[""]} if "" in heads else {"heads": heads}),
        }


def evaluate(measurement: Measurement, head_folders: Mapping[str, Path], folder: Path) -> Evaluated:
    """Decode the benchmark plainly, with each of the heads and with prompt lookup alone, interleaved, unless this very
    evaluation is there.

    Of one head, which is called "", `folder` gets results.json, report.md, plots and answers.jsonl; of several the
    same under each one's label, and their comparison (results.json, report.md, heads.png). Raises ValueError as its
    parts do, and nothing is written then.
    """
    setting = measurement.setting(head_folders)
    found = existing(folder, setting)
    if found:
        return found
    base, bench, seed = measurement.base, measurement.bench, measurement.seed
    decoders = {label: measurement.decoder(head) for label, head in head_folders.items()}
    questions = measurement.questions()
    answers = run(base, {**decoders, LOOKUP_ALONE: measurement.lookup_alone()}, questions, bench, seed)
    rate = generate_rate(base, questions, bench)
    figures = {label: measured(several, seed) for label, several in answers.items()}
    alone = figures[LOOKUP_ALONE]
    with latest(folder) as fresh:
        for label, head in head_folders.items():
            own = measurement.setting({"": head})
            results = {"setting": digest_of(own), **own, **figures[label]}
            results["tokens_per_second"]["generate"] = rate
            for block, lookup in zip(blocks_of(results), blocks_of(alone), strict=True):
                block["prompt_lookup_alone"] = compact(lookup)
            (fresh / label).mkdir(exist_ok=True)
            write_jsonl(fresh / label / "answers.jsonl", (_row(answer) for answer in answers[label]))
            (fresh / label / "report.md").write_text(report(results))
            draw(results, fresh / label)
            write_results(fresh / label, results)
        if "" not in head_folders:
            results = {"setting": digest_of(setting), **setting, "questions": alone["questions"]}
            results["temperatures"] = compared(figures, answers, seed)
            (fresh / "report.md").write_text(heads_report(results))
            draw_heads(results, fresh)
            write_results(fresh, results)
    return Evaluated(results, folder)


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
        "identical": sum(turn.divergence is None for turn in answer.turns),
        "turns": len(answer.turns),
    }
