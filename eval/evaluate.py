"""One evaluation: questions in, eval/<bench>/ out, for one head or for several side by side.

That folder holds the latest one; what other settings gave is kept beside it, as eval/<bench>-<hash>/.
"""

import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ctcdraft import __version__
from ctcdraft.data.sources import RowError, source_hash
from ctcdraft.data.store import Journal, read_object, write_jsonl
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.export import load_head, read_config
from ctcdraft.model.folders import digest_of, new_folder
from ctcdraft.model.heads import Head

from .bench import BenchConfig, Question, load_questions
from .control import bound_in_words
from .page import results_page
from .plots import draw, panels_of
from .report import figure_rows, heading, markdown_table, report, summary
from .results import LOOKUP_ALONE, grouped, growth, heads_at, measured, of_one_head
from .run import Turn, generate_rate, run


@dataclass(frozen=True)
class Measurement:
    """What heads are measured by; data_folder: the run's prepared data, for bench=heldout. decoder: makes one of a
    base, a head and a draft; options: its own, for results.json."""

    base: Base
    draft: DraftConfig
    bench: BenchConfig
    data_folder: Path | None = None
    seed: int = 0
    decoder: Callable[[Base, Head, DraftConfig], Decoder] = Decoder
    options: Mapping[str, Any] = field(default_factory=dict)

    def questions(self) -> list[Question]:
        """Raises ValueError as `load_questions` does."""
        return load_questions(self.bench, self.base, self.data_folder, self.seed)

    def lookup_alone(self) -> Decoder:
        """The control that needs no head, under the same draft settings."""
        draft = self.draft
        copied = self.draft.prompt_lookup or DraftConfig.prompt_lookup
        kind = draft.kind if draft.kind == "chain" else "tree"
        return Decoder(self.base, None, DraftConfig(kind, draft.nodes, budget=draft.budget, prompt_lookup=copied))

    def setting(self, head_folders: Mapping[str, Path]) -> dict[str, Any]:
        """The fields of results.json that say what is measured, and on what; one head alone stands under ""."""
        base = self.base
        heads = {}
        for label, folder in head_folders.items():
            config = read_config(folder)
            heads[label] = config["head"] | {key: config[key] for key in ("sha256", "training")}
        device = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
        if base.device.type == "cuda":
            device = torch.cuda.get_device_name(base.device)
        return {
            "format": 5,  # of results.json: what was measured in another is measured anew
            "bench": self.bench.kind,
            "bench_options": asdict(self.bench),
            "bench_hash": source_hash(self.bench.path) if self.bench.path else None,
            "base": {**base.identity, "weights": base.weights},
            "template": digest_of(base.tokenizer.chat_template)[:12],
            "template_args": base.template_args,
            "decoder": asdict(self.draft),
            **self.options,
            "seed": self.seed,
            "dtype": str(base.dtype).removeprefix("torch."),
            "rounding_bound": bound_in_words(base.dtype),
            "device": device,
            "versions": {"ctcdraft": __version__}
            | {name: version(name) for name in ("torch", "transformers", "numba")},
            "lossless": True if self.draft.proposal != "sampled" else "in distribution",
            **({"head": heads[""]} if "" in heads else {"heads": heads}),
        }


@dataclass(frozen=True)
class Evaluated:
    """What results.json holds, the folder that it lies in, and whether it was there already."""

    results: dict[str, Any]
    folder: Path
    reused: bool = False

    @property
    def exit_code(self) -> int:
        """1 where an output is not the base's own and rounding cannot explain it; 0 otherwise."""
        several = heads_at(self.results).values()
        return int(any(head["identical"]["beyond_bound"] for heads in several for head in heads.values()))

    @property
    def page(self) -> Path:
        """The same to look at."""
        return self.folder / "report.html"

    @property
    def table(self) -> str:
        """What ends a command."""
        tables = [markdown_table(*table) for table in figure_rows(self.results)]
        end = f"lies in {self.folder}{' (reused)' if self.reused else ''}; as a page: {self.page}"
        return "\n" + "\n\n".join([heading(self.results), summary(self.results), *tables, end]) + "\n"


def evaluate(measurement: Measurement, head_folders: Mapping[str, Path], folder: Path) -> Evaluated:
    """Decode the benchmark plainly, with each of the heads and with prompt lookup alone, interleaved, unless this very
    evaluation is there.

    `folder` gets results.json, report.md, report.html, plots and answers.jsonl, of one head, which is called "", or of
    several side by side. Raises ValueError as its parts do, and nothing is written then.
    """
    setting = measurement.setting(head_folders)
    if found := existing(folder, setting):
        return found
    base, bench, seed = measurement.base, measurement.bench, measurement.seed
    heads = {label: load_head(head, base) for label, head in head_folders.items()}
    decoders = {label: measurement.decoder(base, head, measurement.draft) for label, head in heads.items()}
    questions = measurement.questions()
    sides = {**decoders, LOOKUP_ALONE: measurement.lookup_alone()}
    folder.parent.mkdir(parents=True, exist_ok=True)  # where that fails nothing is decoded first
    learns = bool(measurement.options)  # online, and what was learnt is not kept
    with nullcontext() if learns else decoded_so_far(folder, setting) as done:
        turns = run(base, sides, questions, bench, seed, done)
        rate = generate_rate(base, questions, bench)
        blocks = measured(turns, seed)
        for several in blocks.values():
            for block in several.values():
                block["tokens_per_second"]["generate"] = rate
        several_heads = {"temperatures": [{"temperature": t, "heads": several} for t, several in blocks.items()]}
        figures = of_one_head(blocks) if "" in head_folders else several_heads
        with latest(folder) as fresh:
            results = write_results(fresh, setting, figures, turns, base.tokenizer)
            rows = (row for label in head_folders for row in answers(label or results["head"]["kind"], turns[label]))
            write_jsonl(fresh / "answers.jsonl", rows)
            draw(panels_of(results), fresh)
    return Evaluated(results, folder)


@contextmanager
def decoded_so_far(folder: Path, setting: Mapping[str, Any]) -> Iterator[Journal]:
    """What of this very evaluation was decoded before it was cut off: a file beside its folder, which goes when all is
    written, or where nothing was or can be decoded."""
    path = folder.with_name(f".{folder.name}-{digest_of(setting)[:6]}.decoded")
    with closing(Journal(path)) as done:
        try:
            yield done
        except BaseException as error:
            if not done or isinstance(error, RowError):
                path.unlink()
            raise
    path.unlink()


def answers(head: str, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """The rows of answers.jsonl: a question under a setting."""
    for (_, setting), several in grouped(turns, lambda turn: (id(turn.question), turn.setting)).items():
        question = several[0].question
        decoded = [turn for turn in several if not turn.skipped]
        grown, steps = growth(decoded)
        yield {
            "head": head,
            "question_id": question.id,
            "category": question.category,
            **asdict(setting),
            "answers": [turn.plain.text for turn in decoded],
            "tokens": grown + len(decoded),
            "steps": steps,
            "tokens_per_step": grown / steps if steps else 1.0,
            "speculative_seconds": sum(turn.seconds for turn in decoded),
            "plain_seconds": sum(turn.plain_seconds for turn in decoded),
            "identical": sum(turn.compared and turn.divergence is None for turn in decoded),
            "turns": len(decoded),
            "accepted": [turn.drafted.accepted for turn in decoded],  # draft tokens of each step, by turn
        }


def existing(folder: Path, setting: dict[str, Any]) -> Evaluated | None:
    """The evaluation of this very setting, if there is one; it becomes the latest."""
    digest = digest_of(setting)[:6]
    for place in (folder, folder.with_name(f"{folder.name}-{digest}")):
        results = _results(place)
        if results.get("setting") == digest:
            if place != folder:
                with latest(folder) as fresh:
                    place.rename(fresh)
            return Evaluated(results, folder, reused=True)
    return None


@contextmanager
def latest(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which then becomes the latest: all of it, or nothing. What was it is kept beside, if it was
    an evaluation."""
    with new_folder(folder) as fresh:
        yield fresh
        digest = _results(folder).get("setting")
        beside = folder.with_name(f"{folder.name}-{digest}") if digest else folder
        shutil.rmtree(beside, ignore_errors=True)
        if folder.exists():
            folder.rename(beside)


def write_results(
    folder: Path, setting: dict[str, Any], figures: dict[str, Any], turns: Mapping[str, Sequence[Turn]], tokenizer: Any
) -> dict[str, Any]:
    """Write results.json, report.md and report.html; what stands in the first. turns: as `results_page` takes them."""
    results = {"setting": digest_of(setting)[:6], **setting, **figures}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (folder / "report.md").write_text(report(results), encoding="utf-8")
    (folder / "report.html").write_text(results_page(results, turns, tokenizer), encoding="utf-8")
    return results


def _results(folder: Path) -> dict[str, Any]:
    """Empty where there are none, or they are damaged."""
    try:
        return read_object(folder / "results.json")
    except ValueError:
        return {}
