"""What comes before the training of a head: base, data and hidden states, each made where it is not there yet."""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ctcdraft.data.features import Features, FeatureStore
from ctcdraft.data.show import shown
from ctcdraft.data.store import load_corpus, read_manifest
from ctcdraft.data.template import with_template_args
from ctcdraft.model.base.llm import Base
from ctcdraft.model.heads import HeadConfig, attended_on, head_on, parameters_of
from ctcdraft.model.load.gguf import is_gguf
from ctcdraft.model.load.precision import resolve_dtype
from ctcdraft.model.load.pretrained import load_base
from ctcdraft.model.load.smollm2 import describe_smollm2, smollm2_folder
from ctcdraft.train import engine as ds
from ctcdraft.train.prepare import account_of, commonest, prepare, prepared_folder
from ctcdraft.train.toy_base import toy_base, toy_folder

from .schema import BasePath, TrainEntry

UNREAD_SHOWN = 12


def say(text: str) -> None:
    """Tell the user, once."""
    if ds.rank() == 0:
        print(text, flush=True)


def with_resolved_dtype(config: TrainEntry) -> TrainEntry:
    """base.dtype=auto as what it comes to here, so that the run's name, keys and records hold that."""
    dtype = resolve_dtype(config.base.dtype, Path(config.cache_dir))
    return replace(config, base=replace(config.base, dtype=dtype))


def get_base(config: TrainEntry) -> Base:
    """The base, trained, fetched or converted first where it is not there yet."""
    base, note = configured_base(config)
    dated = f"; its chat template says that today is {base.date}" if base.date else ""
    say(f"base: {base.path} ({note}{config.base.dtype}{dated})")
    return base


def configured_base(config: TrainEntry) -> tuple[Base, str]:
    """The base as the configuration wants it, and a note on what it is, which ends in a semicolon or is empty."""
    choice, cache = config.base, Path(config.cache_dir)
    if choice.path is not None:
        path, note = choice.path, f"dequantised from {choice.path}; " if is_gguf(choice.path) else ""
    elif choice.kind == "smollm2":
        folder = ds.from_rank_zero(lambda: smollm2_folder(cache))
        path, note = str(folder), f"{describe_smollm2(folder)}; "
    else:
        made = "reused" if toy_folder(cache, choice.training).exists() else "trained"
        folder = ds.from_rank_zero(lambda: toy_base(cache, choice.training))
        loss = json.loads((folder / "training.json").read_text())["held_out"]["nats_per_assistant_token"]
        path, note = str(folder), f"{made}; held-out loss {loss:.3f} nats per answer token; "
    base = load(replace(choice, path=path), config.cache_dir)
    return with_template_args(base, config.data.template_args or {}), note


def load(choice: BasePath, cache: str = ".cache") -> Base:
    """The base that lies at a path."""
    options: dict[str, Any] = {field.name: getattr(choice, field.name) for field in fields(BasePath)}
    return load_base(**options | {"dtype": choice.dtype or "fp32"}, cache=cache)


def get_data(config: TrainEntry, base: Base) -> Path:
    """The folder of data in the base's own words. All ranks share its making."""
    cache = Path(config.cache_dir)
    there = read_manifest(prepared_folder(base, config.data, config.seed, cache)) is not None
    folder = prepare(base, config.data, config.seed, cache)
    count = read_manifest(folder)
    assert count is not None
    train, turns = count["train"], count["turns"]
    why = commonest(folder / "rejects.jsonl") if not there else ""
    say(
        f"data: {folder} ({'reused' if there else 'prepared'}; read {count['read']} = used {count['used']} + "
        f"rejected {count['rejected']}{why}; {train['sequences']} sequences, {train['answer_tokens']:,} answer tokens; "
        f"length {', '.join(f'{name} {tokens}' for name, tokens in train['lengths'].items())})"
    )
    if any(turns.values()) and not there:
        say(f"turns: {account_of(turns)}")
    if count.get("unread") and not there:
        named = [f"{repr(name)[1:-1][:60]} ({times:,})" for name, times in count["unread"].items()]
        more = f" and {len(named) - UNREAD_SHOWN} more, in {folder}/manifest.json" if named[UNREAD_SHOWN:] else ""
        say(f"not read: {', '.join(named[:UNREAD_SHOWN])}{more}")
    if count["near_duplicates"]:
        say(
            f"data: {count['near_duplicates']} training rows nearly repeat an evaluation question; they are in "
            f"{folder}/near_duplicates.jsonl (data.keep_out=<questions> drops such rows)"
        )
    if config.data.show:
        say(shown(base.tokenizer, load_corpus(folder, "train"), config.data.show, colour=sys.stdout.isatty()))
    return folder


def feature_store(config: TrainEntry, base: Base, data_folder: Path) -> FeatureStore | None:
    """Where the base's hidden states of the training sequences lie, with the keys and values that the head attends to,
    if they are asked for."""
    if config.data.features is None:
        return None
    attended = attended_on(base, config.head)
    return FeatureStore(base, data_folder, Path(config.cache_dir), attended)


def get_features(config: TrainEntry, base: Base, data_folder: Path) -> Features | None:
    """The states of `feature_store`; stored first where they are not there yet."""
    store = feature_store(config, base, data_folder)
    if store is None:
        return None
    there = store.done
    if not there:
        say(f"features: storing {store.check_room()}")
        store.fill()
    found = store.open()
    say(
        f"features: {store.folder} ({'reused' if there else 'stored'}; {found.bytes / 2**30:.2f} GB in bf16: "
        "training reads them, the base's layers run for evaluations alone)"
    )
    return found


def describe_head(config: HeadConfig, base: Base) -> str:
    """How large a head is, in a sentence. Raises ValueError where the base can have none such."""
    head = head_on(base, config)
    return (
        f"head: {config.kind}, {config.slots} slots, {parameters_of(head):,} parameters; "
        f"the base has {parameters_of(base.model):,}"
    )
