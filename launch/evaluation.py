"""The stage that decodes a benchmark, with one head or several; an evaluation that is there already is reused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.data.store import read_jsonl
from ctcdraft.eval.count import count_heads, count_table, counted_setting_of
from ctcdraft.eval.evaluate import Measurement, evaluate, evaluate_heads, heads_setting_of, setting_of
from ctcdraft.eval.place import take
from ctcdraft.eval.report import head_rows, headline, heads_table, markdown_table
from ctcdraft.eval.results import blocks_of
from ctcdraft.launch.schema import EvalEntry, TrainEntry
from ctcdraft.launch.stages import chosen_heads
from ctcdraft.model.base import Base
from ctcdraft.train.log import Media


@dataclass(frozen=True)
class Evaluated:
    """Results of one head, or a comparison of several; `reused` says that they were there already."""

    results: dict[str, Any]
    folder: Path
    reused: bool

    @property
    def per_head(self) -> dict[str, Path]:
        """Of a comparison: each head's own part of the folder."""
        return {label: self.folder / label for label in self.results.get("heads", {})}

    @property
    def exit_code(self) -> int:
        """1 where an output is not the base's own and rounding cannot explain it; 0 otherwise."""
        if self.per_head:
            heads = [head for block in self.results["temperatures"] for head in block["heads"].values()]
            return int(any(head["identical"]["beyond_bound"] for head in heads))
        found = [d for block in blocks_of(self.results) for d in block["identical"]["divergences"]]
        return int(not all(d["within_bound"] for d in found))

    @property
    def table(self) -> str:
        """The short table that ends a run."""
        title = f"on {self.results['base']['name']}, bench={self.results['bench']}"
        place = f"{self.folder}{' (reused)' if self.reused else ''}"
        if not self.per_head:
            header = f"{self.results['head']['kind']} {title}", ""
            return f"\n{markdown_table(header, [*headline(self.results), ('lies in', place)])}\n"
        parts = [
            f"{title}, temperature {block['temperature']:g}:\n{heads_table(block)}"
            for block in self.results["temperatures"]
        ]
        return "\n" + "\n\n".join([*parts, f"lies in {place}"]) + "\n"


def evaluate_run(
    base: Base, head_folder: Path, config: TrainEntry | EvalEntry, folder: Path, data_folder: Path | None
) -> Evaluated:
    """One head, in eval/<bench>/ of its run."""
    measurement = Measurement(base, config.draft, config.bench, data_folder, config.seed)
    known = take(folder, setting_of(measurement, head_folder))
    found = known or evaluate(measurement, head_folder, folder)
    return Evaluated(found, folder, known is not None)


def evaluate_chosen(config: EvalEntry) -> Evaluated:
    """The chosen head, or all of config.heads side by side, in eval/<bench>-heads/ of the first."""
    base, heads, data_folder = chosen_heads(config)
    first = next(iter(heads.values()))
    folder = first.parent / "eval" / f"{config.bench.kind}{'-heads' if config.heads else ''}"
    if not config.heads:
        return evaluate_run(base, first, config, folder, data_folder)
    measurement = Measurement(base, config.draft, config.bench, data_folder, config.seed)
    known = take(folder, heads_setting_of(measurement, heads))
    found = known or evaluate_heads(measurement, heads, folder)
    return Evaluated(found, folder, known is not None)


def count(config: EvalEntry) -> str:
    """The table of one head, or of several, counted along the base's own answers: eval/<bench>-count/ of the first."""
    base, heads, data_folder = chosen_heads(config)
    folder = next(iter(heads.values())).parent / "eval" / f"{config.bench.kind}-count"
    measurement = Measurement(base, config.draft, config.bench, data_folder, config.seed)
    known = take(folder, counted_setting_of(measurement, heads))
    found = known or count_heads(measurement, heads, folder, Path(config.cache_dir))
    return f"\n{count_table(found)}\n\nlies in {folder}{' (reused)' if known else ''}\n"


def _figures(found: Evaluated) -> dict[str, Any]:
    if found.per_head:
        return {
            f"eval/temperature_{block['temperature']:g}/{label}/{key}": head[key]
            for block in found.results["temperatures"]
            for label, head in block["heads"].items()
            for key in ("tokens_per_step", "tokens_per_second", "speedup")
        }
    figures = {f"eval/{key}": found.results[key] for key in ("tokens_per_step", "tokens_per_second", "speedup")}
    for block in found.results["other_temperatures"]:
        prefix = f"eval/temperature_{block['temperature']:g}"
        figures |= {f"{prefix}/{key}": block[key] for key in ("tokens_per_step", "speedup")}
    return figures


def media_of(found: Evaluated) -> Media:
    """For the logger: figures, every picture of the folder, the short table, and one row per question and setting."""
    places = found.per_head or {found.results["head"]["kind"]: found.folder}
    plots = {
        str(path.relative_to(found.folder).with_suffix("")): path
        for place in {found.folder, *places.values()}
        for path in sorted(place.glob("*.png"))
    }
    if found.per_head:
        short = [
            {"temperature": block["temperature"], **row}
            for block in found.results["temperatures"]
            for row in head_rows(block)
        ]
    else:
        short = [{"figure": name, "value": value} for name, value in headline(found.results)]
    questions = [
        {"head": label, **row, "answers": "\n\n".join(row["answers"])}
        for label, place in places.items()
        for row in read_jsonl(place / "answers.jsonl")
    ]
    return Media(_figures(found), plots, {"eval/table": short, "eval/questions": questions})
