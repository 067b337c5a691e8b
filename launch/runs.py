"""A run's folder: its name, the record of what it is, its base and its head; and heads that lie elsewhere.

python launch/runs.py [runs_dir=...] lists the runs that are there, the newest last.
"""

import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from ctcdraft.data.secrets import masked
from ctcdraft.data.sources import check_source
from ctcdraft.data.store import read_object
from ctcdraft.data.template import with_template_args
from ctcdraft.eval.report import markdown_table, speedup_of
from ctcdraft.launch.cli import options_in, run
from ctcdraft.launch.pipeline import load
from ctcdraft.launch.schema import BasePath, DecoderChoice, EvalEntry, RunsEntry, TrainEntry, defaults_of
from ctcdraft.model.base.llm import Base
from ctcdraft.model.export import export_head, head_folder, read_config, trained_head
from ctcdraft.model.folders import claimed, digest_of, write_atomically
from ctcdraft.model.heads import Head, head_config, head_on
from ctcdraft.train import engine as ds
from ctcdraft.train.checkpoint import TrainState, read_checkpoint
from ctcdraft.train.options import decisive, departures

LONGEST_NAME = 200
RECORDED = ("dtype", "template", "eos", "date")  # of base, in paths.json


def run_folder(name: str, runs_dir: str) -> Path:
    """Where the run of that name lies. Raises ValueError where the name is more, or less, than a folder's."""
    plain = Path(name).name == name and name not in ("", ".", "..") and name.isprintable()
    if not plain or len(name.encode()) > LONGEST_NAME:
        raise ValueError(
            f"name={name[:LONGEST_NAME]!r}: a run's name is one folder name, without slashes or control characters, of "
            f"at most {LONGEST_NAME} bytes"
        )
    return Path(runs_dir) / name


def check_inputs(config: TrainEntry) -> Path:
    """runs/<name>, after a look at everything that can be wrong before long work starts.

    Raises ValueError when a data or bench file is missing or empty, or when the folder belongs to a run of another
    configuration, naming the first option that differs. An option that is younger than the run had its default then.
    """
    for path in config.data.paths:
        check_source("data.path", path)
    check_source("data.keep_out", config.data.keep_out)
    check_source("bench.path", config.bench.path)
    source = Path(os.path.abspath(config.base.path or config.base.kind)).name
    name = config.name or f"{source}-{config.head.kind}-{config.objective.kind}-{digest_of(departures(config))[:6]}"
    folder = run_folder(name, config.runs_dir)
    if not (folder / "config.yaml").is_file():
        return folder
    before, now = dict(options_in(settings_of(folder))), dict(options_in(decisive(config)))
    defaults = dict(options_in(defaults_of(TrainEntry) | {"head": defaults_of(type(config.head))}))
    for key in before | now:
        values = before.get(key, defaults.get(key)), now.get(key)
        if values[0] != values[1] and not all(isinstance(value, dict) for value in values):
            if key == "train.batch" and values[1] is None and isinstance(values[0], int) and values[0] > 0:
                continue  # `with_batch` takes it
            was, would = (f"without {key}" if value is None else f"with {key}={value}" for value in values)
            raise ValueError(
                f"{folder} is a run {was}, this one is {would}: give it another name=, or delete that folder"
            )
    return folder


def with_batch(config: TrainEntry, folder: Path) -> TrainEntry:
    """train.batch=null as what it comes to: the batch of the run in that folder, or of a new one on these ranks.
    Collective; rank 0 alone reads.

    Raises ValueError where the run's batch does not split over these ranks.
    """

    def batch() -> int:
        begun = settings_of(folder)["train"] if (folder / "config.yaml").is_file() else {}
        return config.train.batch or begun.get("batch") or config.train.rows_over(ds.world_size())

    train = replace(config.train, batch=ds.from_rank_zero(batch))
    train.split(ds.world_size())
    return replace(config, train=train)


def find_run(name: str | None, runs_dir: str) -> Path:
    """The run folder of that name, or the newest. Raises ValueError where there is none."""
    if name is None:
        return all_runs(runs_dir)[-1]
    folder = run_folder(name, runs_dir)
    if not (folder / "config.yaml").is_file():
        there = ", ".join(sorted(path.parent.name for path in Path(runs_dir).glob("*/config.yaml"))) or "none"
        raise ValueError(f"name={name}: no such run in {Path(runs_dir)}/ (there: {there})")
    return folder


def all_runs(runs_dir: str) -> list[Path]:
    """The folders of all runs, the newest last. Raises ValueError where there is none."""
    found = sorted(Path(runs_dir).glob("*/config.yaml"), key=os.path.getmtime)
    if not found:
        raise ValueError(f"there is no run in {Path(runs_dir)}/: start with `make train`")
    return [path.parent for path in found]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """This command alone trains the run. Raises ValueError where another one does; a dead one holds nothing."""
    mine = claimed(folder / "lock", wait=False) if ds.rank() == 0 else nullcontext(True)
    with mine as ours:
        if not ours:
            raise ValueError(f"{folder} is being trained by another command: wait for it, or end it first")
        yield


# -- its record ---------------------------------------------------------------------------------------------


def open_run(folder: Path, config: TrainEntry, base: Base, data_folder: Path) -> None:
    """Write down what the run is and where its base and data lie, unless both are there: a start may have been cut off.

    Raises ValueError when the folder's run had another base or other data under the same names.
    """
    if (folder / "paths.json").is_file():
        before = run_paths(folder)
        if before["identity"] != base.identity or Path(before["data"]).name != data_folder.name:
            raise ValueError(
                f"{folder} is a run on {before['base']} and {before['data']}, whose content has changed since: give it "
                "another name=, or delete that folder"
            )
    if ds.rank() == 0 and not all((folder / name).is_file() for name in ("paths.json", "config.yaml")):
        record = {"run": decisive(config), "all": masked(asdict(config))}
        paths = {name: getattr(config.base, name) for name in RECORDED} | {"identity": base.identity}
        for name, place in (("base", base.path), ("data", str(data_folder))):
            near = os.path.exists(place) and not os.path.isabs(place)  # as seen from the run
            paths[name] = os.path.relpath(os.path.realpath(place), os.path.realpath(folder)) if near else place
        write_atomically(folder / "paths.json", json.dumps(paths, indent=2).encode())
        write_atomically(folder / "config.yaml", yaml.safe_dump(record, sort_keys=False).encode())
    ds.barrier()


def settings_of(folder: Path) -> dict[str, Any]:
    """The part of a run's configuration that decides what is trained."""
    return _read(folder / "config.yaml", run=dict, all=dict)["run"]


def run_paths(folder: Path) -> dict[str, Any]:
    """Where a run's base and prepared data lie."""
    if not (folder / "paths.json").is_file():
        raise ValueError(f"{folder} was started but got neither base nor data: run its training again")
    found = _read(folder / "paths.json", base=str, dtype=str, data=str, identity=dict)
    near = {name: os.path.realpath(folder / found[name]) for name in ("base", "data")}
    return found | {name: place for name, place in near.items() if os.path.exists(place)}


def _read(path: Path, **kinds: type) -> dict[str, Any]:
    """A file that `open_run` wrote. Raises ValueError where it is damaged."""
    try:
        found = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
            return found
    except (ValueError, RecursionError, yaml.YAMLError):
        pass
    raise ValueError(f"{path} is damaged: delete {path.parent} and train again")


# -- its base and its head ----------------------------------------------------------------------------------


def run_base(folder: Path, choice: BasePath, cache: str = ".cache") -> Base:
    """The base of a run (or another path, precision or template). Code that it brings along is asked for anew."""
    paths = run_paths(folder)
    known = {"path": paths["base"]} | {name: paths.get(name) for name in RECORDED}
    missing = {name: value for name, value in known.items() if getattr(choice, name) is None}
    return load(replace(choice, **missing), cache)


def start_head(config: TrainEntry, base: Base) -> Head | None:
    """The head that a run begins as. Raises ValueError where there is none, or it is another than the run's."""
    if config.train.start_from is None:
        return None
    folder = run_folder(config.train.start_from, config.runs_dir) / "head"
    (start, _), wanted = trained_head(folder, base), head_on(base, config.head).config
    if start.config != wanted:
        raise ValueError(f"train.start_from: the head in {folder} is {start.config}, and not {wanted}")
    return start


def already_trained(folder: Path, config: TrainEntry) -> TrainState | None:
    """The state of a run whose training is done and has left a head. Collective."""

    def done() -> TrainState | None:
        found = read_checkpoint(folder / "checkpoints")
        return found.state if found and found.best and config.train.finished(found.state) else None

    return ds.from_rank_zero(done)


def export_best(folder: Path, base: Base, target: Path) -> None:
    """Export the best head of a run."""
    record, paths = settings_of(folder), run_paths(folder)
    if paths["identity"] | {"name": base.name} != base.identity:
        raise ValueError(f"{folder} was trained on another base than {base.name} is now: train again")
    trained = read_checkpoint(folder / "checkpoints")
    if trained is None or not trained.best:
        raise ValueError(f"{folder} has no evaluated head to export: run its training again")
    base = with_template_args(base, record["data"].get("template_args") or {})
    head = head_on(base, head_config(record["head"]))
    head.load_state_dict(trained.best)
    head = head.to(base.device).eval()
    state, objective = trained.state, record["objective"]
    training = {"objective": objective["kind"], "step": state.best_step, "tokens": state.tokens}
    export_head(head, base, target, {**training, "tokens_per_step": state.best})


def summarise(folder: Path, config: TrainEntry, state: TrainState, results: dict[str, Any]) -> None:
    """summary.json: the run in a screenful."""
    summary = {
        "name": folder.name,
        "base": results["base"]["name"],
        "head": asdict(config.head),
        "objective": asdict(config.objective),
        "training": asdict(replace(state, seconds=round(state.seconds, 1))),
        "bench": results["bench"],
        **{key: results[key] for key in ("tokens_per_step", "tokens_per_second", "speedup", "device")},
        "identical": {k: results["identical"][k] for k in ("compared", "identical")},
    }
    write_atomically(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())


# -- heads that are chosen by run or by folder ---------------------------------------------------------------


def chosen_heads(choice: DecoderChoice) -> tuple[Base, dict[str, Path], Path | None]:
    """The base, the folder of each chosen head under its label, and the prepared data of their runs.

    Raises ValueError where two heads have one label, the base is not said, a head is neither here nor on the Hub, or
    bench=heldout would ask one of several heads what it was trained on.
    """
    several: Sequence[str | None] = choice.heads if isinstance(choice, EvalEntry) else []
    heads: dict[str, Path] = {}
    runs: list[Path] = []
    for entry in several or [choice.head.path]:
        if entry is None or (several and "/" not in entry and not (Path(entry) / "config.json").is_file()):
            runs.append(find_run(choice.name if entry is None else entry, choice.runs_dir))
            entry = str(runs[-1] / "head")
        folder, place = head_folder(entry), Path(entry).resolve()
        label = place.parent.name if place.name == "head" else place.name
        if label in heads:
            raise ValueError(f"heads={several}: two of them are called {label}; give one of them another folder")
        heads[label] = folder
    data = {run_paths(run)["data"] for run in runs}
    shared = len(data) == 1 and len(runs) == len(heads)
    if isinstance(choice, EvalEntry) and several and choice.bench.kind == "heldout" and not shared:
        raise ValueError(
            "bench=heldout is for runs on the same data, which keep the same questions from training: choose another"
        )
    if not runs and choice.base.path is None:
        option = "heads=[<folder>,...]" if several else "head.path"
        raise ValueError(f"{option} needs base.path=<the model it was trained on>")
    base = run_base(runs[0], choice.base, choice.cache_dir) if runs else load(choice.base, choice.cache_dir)
    return _as_trained(base, [*heads.values()], choice.data.template_args), heads, Path(min(data)) if data else None


def _as_trained(base: Base, heads: Sequence[Path], template_args: dict[str, Any] | None) -> Base:
    """The base whose chats are rendered as in the training of these heads, or with other arguments that are asked for.

    Warns where a head was trained under others. Raises ValueError where the heads were trained under several and none
    are asked for.
    """
    trained = {folder: read_config(folder).get("template_args", {}) for folder in heads}
    args = trained[heads[0]] if template_args is None else template_args
    others = {folder: own for folder, own in trained.items() if own != args}
    if template_args is None and others:
        several = ", ".join(f"{folder}: {json.dumps(own)}" for folder, own in trained.items())
        raise ValueError(f"heads=[...] were trained under several data.template_args ({several}): say which to use")
    for folder, own in others.items():
        warnings.warn(
            f"the head in {folder} was trained with data.template_args={json.dumps(own)} and drafts here for chats "
            f"with {json.dumps(args)}, which it may fit less well",
            stacklevel=2,
        )
    return with_template_args(base, args)


# -- the list of them ---------------------------------------------------------------------------------------


def main(config: RunsEntry) -> int:
    header = ("run", "base", "head", "steps", "tokens per step", "speedup", "bench", "begun")
    print(markdown_table(header, map(_listed, all_runs(config.runs_dir))), flush=True)
    return 0


def _listed(folder: Path) -> tuple[Any, ...]:
    """The row of a run; of one that is not done, or whose summary is damaged, there are no figures."""
    try:
        found = read_object(folder / "summary.json")
        head, steps = found["head"]["kind"], found["training"]["step"]
        rates = f"{found['tokens_per_step']:.2f}", speedup_of(found)
        figures = found["base"], head, steps, *rates, found["bench"]
    except (ValueError, KeyError, TypeError):
        figures = ("-",) * 6
    begun = time.localtime(os.path.getmtime(folder / "config.yaml"))
    return folder.name, *figures, time.strftime("%Y-%m-%d %H:%M", begun)


if __name__ == "__main__":
    run("runs", RunsEntry, main)
