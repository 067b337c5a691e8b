"""The stage that decodes a benchmark, with one head or several; an evaluation that is there already is reused."""

from collections.abc import Mapping, Sequence
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
from ctcdraft.launch.stages import as_trained, chosen_head, find_run, other_base, run_base, run_paths
from ctcdraft.model.base import Base


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


def evaluate_several(config: EvalEntry) -> Evaluated:
    """All of config.heads, side by side, in eval/<bench>-heads/ of the first."""
    base, heads, data_folder = chosen_heads(config)
    folder = next(iter(heads.values())).parent / "eval" / f"{config.bench.kind}-heads"
    measurement = Measurement(base, config.draft, config.bench, data_folder, config.seed)
    known = take(folder, heads_setting_of(measurement, heads))
    found = known or evaluate_heads(measurement, heads, folder)
    return Evaluated(found, folder, known is not None)


def count(config: EvalEntry) -> str:
    """The table of one head, or of several, counted along the base's own answers: eval/<bench>-count/ of the first."""
    if config.heads:
        base, heads, data_folder = chosen_heads(config)
    else:
        base, head_folder, run = chosen_head(config)
        heads = {head_folder.resolve().parent.name: head_folder}
        data_folder = None if run is None else Path(run_paths(run)["data"])
    folder = next(iter(heads.values())).parent / "eval" / f"{config.bench.kind}-count"
    measurement = Measurement(base, config.draft, config.bench, data_folder, config.seed)
    known = take(folder, counted_setting_of(measurement, heads))
    found = known or count_heads(measurement, heads, folder, Path(config.cache_dir))
    return f"\n{count_table(found)}\n\nlies in {folder}{' (reused)' if known else ''}\n"


def chosen_heads(config: EvalEntry) -> tuple[Base, dict[str, Path], Path | None]:
    """The base, the folder of each head under its label, and the runs' prepared data.

    Raises ValueError where two heads have one label, the base is not said, or bench=heldout would ask a head what it
    was trained on.
    """
    heads: dict[str, Path] = {}
    runs: list[Path] = []
    for entry in config.heads:
        folder = Path(entry)
        if not (folder / "config.json").is_file():
            runs.append(find_run(entry, config.runs_dir))
            folder = runs[-1] / "head"
        place = folder.resolve()
        label = place.parent.name if place.name == "head" else place.name
        if label in heads:
            raise ValueError(f"heads={config.heads}: two of them are called {label}; give one of them another folder")
        heads[label] = folder
    data = {run_paths(run)["data"] for run in runs}
    if config.bench.kind == "heldout" and (len(data) != 1 or len(runs) < len(heads)):
        raise ValueError(
            "bench=heldout is for runs on the same data, which keep the same questions from training: choose another"
        )
    own = config.base
    base = run_base(runs[0], own) if runs else other_base(own, "heads=[<folder>,...]")
    base = as_trained(base, list(heads.values()), config.data.template_args)
    return base, heads, Path(data.pop()) if data else None


def figures_of(found: Evaluated) -> dict[str, Any]:
    """What the logger's summary holds."""
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


def plots_of(found: Evaluated) -> dict[str, Path]:
    """Every picture of the folder, by its name."""
    return {
        str(path.relative_to(found.folder).with_suffix("")): path
        for place in (found.folder, *found.per_head.values())
        for path in sorted(place.glob("*.png"))
    }


def tables_of(found: Evaluated) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The short table, and one row per question and setting."""
    if found.per_head:
        short = [
            {"temperature": block["temperature"], **row}
            for block in found.results["temperatures"]
            for row in head_rows(block)
        ]
    else:
        short = [{"figure": name, "value": value} for name, value in headline(found.results)]
    places = found.per_head or {found.results["head"]["kind"]: found.folder}
    questions = [
        {"head": label, **row, "answers": "\n\n".join(row["answers"])}
        for label, place in places.items()
        for row in read_jsonl(place / "answers.jsonl")
    ]
    return {"eval/table": short, "eval/questions": questions}
