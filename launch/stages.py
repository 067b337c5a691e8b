"""The stages of a run, each reused when its outcome is there: base, data, head, export, eval."""

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ctcdraft.data.features import Features
from ctcdraft.data.secrets import masked
from ctcdraft.data.show import shown
from ctcdraft.data.sources import check_source
from ctcdraft.data.store import load_corpus, read_manifest, read_object
from ctcdraft.data.template import with_template_args
from ctcdraft.launch.schema import BaseConfig, BasePath, HeadChoice, TrainEntry
from ctcdraft.model.base import Base, load_base
from ctcdraft.model.export import export_head, read_config
from ctcdraft.model.folders import claimed
from ctcdraft.model.gguf import convert_gguf, is_gguf
from ctcdraft.model.head import HeadConfig, attended_on, flops_per_draft, head_on, parameters_of
from ctcdraft.model.precision import resolve_dtype
from ctcdraft.model.smollm2 import describe_smollm2, smollm2_folder
from ctcdraft.train import engine as ds
from ctcdraft.train.calibrate import calibrate, copy_rates
from ctcdraft.train.checkpoint import TrainState, load_best
from ctcdraft.train.features import FeatureStore
from ctcdraft.train.files import write_atomically
from ctcdraft.train.loop import finished
from ctcdraft.train.prepare import FREE_REGENERATE, account_of, prepare, prepared_folder
from ctcdraft.train.toy_base import toy_base

LONGEST_NAME = 200
UNREAD_SHOWN = 12
# What may differ between two commands that continue one run.
FREE = ("name", "runs_dir", "cache_dir", "bench", "logger", "draft", "zero")
FREE_DATA = ("show", "batch_size")
FREE_TRAIN = (
    "max_minutes",
    "log_every",
    "save_every",
    "micro_batch",
    "keep",
    "max_skips",
    "deterministic",
    "hang_minutes",
)


def say(text: str) -> None:
    """Tell the user, once."""
    if ds.rank() == 0:
        print(text, flush=True)


def on_rank_zero_first(make: Callable[[], Path]) -> Path:
    """Rank 0 makes what is not there, the others wait and then find it."""
    if ds.rank() == 0:
        make()
    ds.barrier()
    return make()


def with_resolved_dtype(config: TrainEntry) -> TrainEntry:
    """base.dtype=auto as what it comes to here, so that the run's name, keys and records hold that."""
    dtype = resolve_dtype(config.base.dtype, Path(config.cache_dir))
    return replace(config, base=replace(config.base, dtype=dtype))


def get_base(config: BaseConfig, cache: Path, template_args: dict[str, Any] | None = None) -> Base:
    """The base, trained, fetched or converted first where it is not there yet."""
    path, note = base_path(config, cache)
    base = load_at(path, config, cache, template_args)
    dated = f"; its chat template says that today is {base.date}" if base.date else ""
    say(f"base: {path} ({note}{config.dtype}{dated})")
    return base


def load_at(path: str, config: BaseConfig, cache: Path, template_args: dict[str, Any] | None) -> Base:
    """The base that lies at `path`, as the configuration wants it."""
    base = load_base(
        path,
        config.dtype,
        template=config.template,
        trust_remote_code=config.trust_remote_code,
        cache=cache,
        eos=config.eos,
        date=config.date,
    )
    return with_template_args(base, template_args or {})


def base_path(config: BaseConfig, cache: Path) -> tuple[str, str]:
    """Where the base lies once it is there, and a note on what it is, which ends in a semicolon or is empty."""
    if config.path is not None:
        file = Path(config.path).expanduser()
        if not is_gguf(config.path):
            return config.path, ""
        return str(on_rank_zero_first(lambda: convert_gguf(file, cache))), f"dequantised from {file}; "
    if config.kind == "smollm2":
        folder = on_rank_zero_first(lambda: smollm2_folder(cache))
        return str(folder), f"{describe_smollm2(folder)}; "
    before = set(cache.glob("toy-*"))
    folder = on_rank_zero_first(lambda: toy_base(cache, config.training))
    figures = json.loads((folder / "training.json").read_text())["held_out"]
    made = "reused" if folder in before else "trained"
    return str(folder), f"{made}; held-out loss {figures['nats_per_assistant_token']:.3f} nats per answer token; "


def get_data(config: TrainEntry, base: Base) -> Path:
    """The folder of data in the base's own words. All ranks share its making."""
    cache = Path(config.cache_dir)
    there = read_manifest(prepared_folder(base, config.data, config.seed, cache)) is not None
    folder = prepare(base, config.data, config.seed, cache)
    count = read_manifest(folder)
    assert count is not None
    train, turns = count["train"], count["turns"]
    say(
        f"data: {folder} ({'reused' if there else 'prepared'}; read {count['read']} = used {count['used']} + "
        f"rejected {count['rejected']}; {train['sequences']} sequences, {train['answer_tokens']:,} answer tokens; "
        f"length {', '.join(f'{name} {tokens}' for name, tokens in train['lengths'].items())})"
    )
    if any(turns.values()) and not there:
        say(f"turns: {account_of(turns)}")
    if count.get("unread") and not there:
        most = [f"{repr(name)[1:-1][:60]} ({times:,})" for name, times in list(count["unread"].items())[:UNREAD_SHOWN]]
        more = len(count["unread"]) - len(most)
        say(f"not read: {', '.join(most)}{f' and {more} more, in {folder}/manifest.json' if more else ''}")
    if count["near_duplicates"]:
        say(
            f"data: {count['near_duplicates']} training rows nearly repeat an evaluation question; they are in "
            f"{folder}/near_duplicates.jsonl (data.keep_out=<questions> drops such rows)"
        )
    if config.data.show:
        say(shown(base.tokenizer, load_corpus(folder, "train"), config.data.show, colour=sys.stdout.isatty()))
    return folder


def get_features(config: TrainEntry, base: Base, data_folder: Path) -> Features | None:
    """The base's hidden states of the training sequences, with the keys and values that the head attends to; stored
    first where they are asked for and not there yet."""
    if config.data.features is None:
        return None
    attended = attended_on(base, config.head)
    store = FeatureStore(base, data_folder, config.data.features, Path(config.cache_dir), attended)
    there = store.done
    if not there:
        say(f"features: storing {store.check_room()}")
        store.fill()
    found = store.open()
    say(
        f"features: {store.folder} ({'reused' if there else 'stored'}; {found.bytes / 2**30:.2f} GB in {found.kind}: "
        "training reads them, the base's layers run for evaluations alone)"
    )
    return found


def check_inputs(config: TrainEntry) -> Path:
    """runs/<name>, after a look at everything that can be wrong before long work starts.

    Raises ValueError when a data or bench file is missing or empty, or when the folder belongs to a run of
    another configuration, naming the first option that differs.
    """
    for path in config.data.paths:
        check_source("data.path", path)
    check_source("data.keep_out", config.data.keep_out)
    check_source("bench.path", config.bench.path)
    config.train.split(ds.world_size())
    settings = run_settings(config)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
    source = Path(config.base.path or config.base.kind).name
    name = config.name or f"{source}-{config.head.kind}-{config.objective.kind}-{digest}"
    folder = run_folder(name, config.runs_dir)
    record = folder / "config.yaml"
    if record.is_file():
        other = difference(_recorded(folder)["run"], settings)
        if other:
            key, before, now = other
            was, would = (f"without {key}" if value is None else f"with {key}={value}" for value in (before, now))
            raise ValueError(
                f"{folder} is a run {was}, this one is {would}: give it another name=, or delete that folder"
            )
    return folder


def run_folder(name: str, runs_dir: str) -> Path:
    """Where the run of that name lies. Raises ValueError where the name is more, or less, than a folder's."""
    if (
        Path(name).name != name
        or name in ("", ".", "..")
        or not name.isprintable()
        or len(name.encode()) > LONGEST_NAME
    ):
        raise ValueError(
            f"name={name[:LONGEST_NAME]!r}: a run's name is one folder name, without slashes or control characters, of "
            f"at most {LONGEST_NAME} bytes"
        )
    return Path(runs_dir) / name


def open_run(folder: Path, config: TrainEntry, base: Base, data_folder: Path) -> None:
    """Write down what the run is and where its base and data lie.

    Raises ValueError when the folder's run had another base or other data under the same names.
    """
    paths: dict[str, Any] = {
        "base": base.path,
        "dtype": config.base.dtype,
        "template": base.template,
        "eos": config.base.eos,
        "date": config.base.date,
        "data": str(data_folder),
        "identity": base.identity,
    }
    if (folder / "paths.json").is_file():
        before = run_paths(folder)
        if before["identity"] != base.identity or Path(before["data"]).name != data_folder.name:
            raise ValueError(
                f"{folder} is a run on {before['identity']['name']} and {before['data']}, whose content has changed "
                "since: give it another name=, or delete that folder"
            )
    elif ds.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        record = {"run": run_settings(config), "all": masked(asdict(config))}
        write_atomically(folder / "paths.json", json.dumps(paths, indent=2).encode())
        write_atomically(folder / "config.yaml", yaml.safe_dump(record, sort_keys=False).encode())
    ds.barrier()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """This command alone trains the run. Raises ValueError where another one does; a dead one holds nothing."""
    mine = claimed(folder / "lock", wait=False) if ds.rank() == 0 else nullcontext(True)
    with mine as ours:
        if not ours:
            raise ValueError(f"{folder} is being trained by another command: wait for it, or end it first")
        yield


def run_settings(config: TrainEntry) -> dict[str, Any]:
    """The part of the configuration that decides what is trained."""
    settings = {key: value for key, value in asdict(config).items() if key not in FREE}
    for name in FREE_DATA:
        settings["data"].pop(name)
    for name in FREE_REGENERATE:
        settings["data"]["regenerate"].pop(name)
    settings["train"] = {k: v for k, v in settings["train"].items() if k not in FREE_TRAIN}
    return json.loads(json.dumps(settings))


def difference(before: Any, now: Any, prefix: str = "") -> tuple[str, Any, Any] | None:
    """The first option (dotted key, old value, new value) in which two configurations differ."""
    for key in [*before, *(k for k in now if k not in before)]:
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found = difference(a, b, f"{prefix}{key}.")
            if found:
                return found
        elif a != b:
            return f"{prefix}{key}", a, b
    return None


def find_run(name: str | None, runs_dir: str) -> Path:
    """The run folder of that name, or the newest. Raises ValueError where there is none."""
    runs = Path(runs_dir)
    if name is not None:
        folder = run_folder(name, runs_dir)
        if not (folder / "config.yaml").is_file():
            there = ", ".join(sorted(p.parent.name for p in runs.glob("*/config.yaml"))) or "none"
            raise ValueError(f"name={name}: no such run in {runs}/ (there: {there})")
        return folder
    found = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"there is no run in {runs}/: start with `make train`")
    return found[-1].parent


def run_paths(folder: Path) -> dict[str, Any]:
    """Where a run's base and prepared data lie."""
    path = folder / "paths.json"
    if not path.is_file():
        raise ValueError(f"{folder} was started but got neither base nor data: run its training again")
    found = read_object(path, "base", "dtype", "template", "data", "identity")
    good = all(isinstance(found[key], str) for key in ("base", "dtype", "data"))
    if not good or not isinstance(found["identity"], dict) or "name" not in found["identity"]:
        raise ValueError(f"{path} is damaged: delete {folder} and train again")
    return found


def run_base(folder: Path, choice: BasePath) -> Base:
    """The base of a run (or another path, precision or template). Code that it brings along is asked for anew."""
    paths = run_paths(folder)
    return load_base(
        choice.path or paths["base"],
        choice.dtype or paths["dtype"],
        template=choice.template or paths["template"],
        trust_remote_code=choice.trust_remote_code,
        eos=paths.get("eos") if choice.eos is None else choice.eos,
        date=choice.date or paths.get("date"),
    )


def chosen_head(choice: HeadChoice) -> tuple[Base, Path, Path | None]:
    """The base, the folder of the exported head, and the run they belong to (None: a head from elsewhere)."""
    run: Path | None
    if choice.head.path is None:
        run = find_run(choice.name, choice.runs_dir)
        base, folder = run_base(run, choice.base), run / "head"
    else:
        run, base, folder = None, other_base(choice.base, "head.path"), Path(choice.head.path)
    return as_trained(base, [folder], choice.data.template_args), folder, run


def other_base(choice: BasePath, option: str) -> Base:
    """The base of a head that comes without a run, which `option` named."""
    if choice.path is None:
        raise ValueError(f"{option} needs base.path=<the model it was trained on>")
    return load_base(
        choice.path,
        choice.dtype or "fp32",
        template=choice.template,
        trust_remote_code=choice.trust_remote_code,
        eos=choice.eos,
        date=choice.date,
    )


def as_trained(base: Base, heads: Sequence[Path], template_args: dict[str, Any] | None) -> Base:
    """The base whose chats are rendered as in the training of these heads, or with other arguments that are asked for.

    Warns where a head was trained under others. Raises ValueError where the heads were trained under several and none
    are asked for.
    """
    trained = [read_config(folder).get("template_args", {}) for folder in heads]
    if template_args is None and any(own != trained[0] for own in trained):
        several = ", ".join(f"{folder}: {json.dumps(own)}" for folder, own in zip(heads, trained, strict=True))
        raise ValueError(f"heads=[...] were trained under several data.template_args ({several}): say which to use")
    args = trained[0] if template_args is None else template_args
    for folder, own in zip(heads, trained, strict=True):
        if own != args:
            warnings.warn(
                f"the head in {folder} was trained with data.template_args={json.dumps(own)} and drafts here for chats "
                f"with {json.dumps(args)}, which it may fit less well",
                stacklevel=2,
            )
    return with_template_args(base, args)


def _recorded(folder: Path) -> dict[str, Any]:
    """config.yaml of a run. Raises ValueError when it is damaged."""
    path = folder / "config.yaml"
    try:
        found = yaml.safe_load(path.read_text())
        if isinstance(found, dict) and {"run", "all"} <= set(found):
            return found
    except yaml.YAMLError:
        pass
    raise ValueError(f"{path} is damaged: delete {folder} and train again")


def read_state(folder: Path) -> TrainState | None:
    """How far a run's training got when it last ended by itself; not what it would go on from."""
    path = folder / "checkpoints" / "state.json"
    if not path.is_file():
        return None
    known = {field.name: type(field.default) for field in fields(TrainState) if field.name != "psi_U"}
    found = {name: read_object(path, *known)[name] for name in known}
    if not all(type(value) in (int, known[name]) for name, value in found.items()):
        raise ValueError(f"{path} is damaged: delete it and run the command again")
    return TrainState(**found)


def already_trained(folder: Path, config: TrainEntry) -> TrainState | None:
    state = read_state(folder)
    return state if state and finished(config.train, state) else None


def describe_head(config: HeadConfig, base: Base) -> str:
    """Parameters and cost of a head, in a sentence."""
    head = head_on(base, config)
    body, lm_head = flops_per_draft(head, base)
    whole = sum(p.numel() for p in base.model.parameters())
    return (
        f"head: {config.kind}, {config.slots} slots, {parameters_of(head):,} parameters; a draft costs "
        f"{(body + lm_head) / 1e6:.1f}M multiply-adds ({body / 1e6:.1f}M body, {lm_head / 1e6:.1f}M LM head); "
        f"the base has {whole:,} parameters"
    )


def export_best(folder: Path, base: Base, output: Path | None = None) -> Path:
    """Export the best head of a run."""
    record = _recorded(folder)["run"]
    if run_paths(folder)["identity"] != base.identity:
        raise ValueError(f"{folder} was trained on another base than {base.name} is now: train again")
    state = read_state(folder)
    if state is None:
        raise ValueError(f"{folder} has no finished training to export: run it again")
    base = with_template_args(base, record["data"].get("template_args") or {})
    head = head_on(base, HeadConfig(**record["head"]))
    head.load_state_dict(load_best(folder / "checkpoints"))
    head = head.to(base.device).eval()
    data_folder = Path(run_paths(folder)["data"])
    labels, longest = record["objective"]["labels"], record["train"]["max_length"]
    head.calibration = calibrate(head, base, data_folder, labels, longest)
    head.copy_rates = copy_rates(data_folder)
    target = output or folder / "head"
    training = {
        "objective": record["objective"]["kind"],
        "step": state.best_step,
        "tokens": state.tokens,
        "simulated": state.best,
    }
    export_head(head, base, target, training)
    return target


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
