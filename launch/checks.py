"""What `launch/doctor.py` looks at."""

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import torch

from ctcdraft.data.end_of_turn import missing_end
from ctcdraft.data.records import Conversation, record_of
from ctcdraft.data.sources import RowError
from ctcdraft.data.store import read_manifest
from ctcdraft.data.template import prompt_ids, render
from ctcdraft.launch.pipeline import configured_base, feature_store, with_resolved_dtype
from ctcdraft.launch.runs import start_head
from ctcdraft.launch.schema import TrainEntry
from ctcdraft.model.base.llm import Base
from ctcdraft.model.heads import parameters_of
from ctcdraft.train import engine as ds
from ctcdraft.train.log import OFFLINE, has_key, wandb_settings
from ctcdraft.train.loop import Trainer
from ctcdraft.train.overfit import OverfitCheck
from ctcdraft.train.prepare import prepared_folder
from ctcdraft.train.toy_base import toy_folder

PACKAGES = ("ctcdraft", "torch", "transformers", "datasets", "deepspeed", "wandb", "hydra-core", "numba", "numpy")
NEEDED_GB = 5
PROBE_STEPS = 20
REACH_SECONDS = 5
HELLO = [{"role": "user", "content": "Name three rivers of Europe and say where each of them ends."}]


@dataclass
class Report:
    """Rows (what, found), warnings, errors, and the conversation as (text, supervised) pieces."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    pieces: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, what: str, found: str) -> None:
        self.rows.append((what, found))

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What fails inside is an error of the report, and the rest of it goes on."""
        try:
            yield
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            self.add(what, "failed")
            self.errors.append(f"{what}: {' '.join(str(error).split())[:400]}")


def examine(config: TrainEntry) -> Report:
    """Everything, in the order in which a run would find it."""
    config, report = with_resolved_dtype(config), Report()
    _machine(report, config)
    with report.trying("W&B"):
        _wandb(report, config)
    if config.base.kind == "toy" and not toy_folder(Path(config.cache_dir), config.base.training).exists():
        report.add("base", "the toy base is not made yet: `make train` makes it, in under three minutes")
    elif not report.errors:
        ds.init_distributed()
        with report.trying("base"):
            base, note = configured_base(config)
            sizes = f"{parameters_of(base.model):,} parameters, {base.vocab_size:,} tokens"
            report.add("base", f"{base.name}: {sizes}, {note}{base.dtype} on {base.device}")
            for check in (_tokenizer, _template, _steps, _overfit):
                with report.trying(check.__name__.strip("_")):
                    check(report, config, base)
    return report


# -- the machine --------------------------------------------------------------------------------------------


def _machine(report: Report, config: TrainEntry) -> None:
    report.add("python", sys.version.split()[0])
    for package in PACKAGES:
        try:
            report.add(package, version(package))
        except PackageNotFoundError:
            report.add(package, "missing")
            report.errors.append(f"{package} is not installed: run `make setup`")
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        report.add(f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, {memory:.0f} GB")
    memory = psutil.virtual_memory()
    report.add("cpu cores", str(psutil.cpu_count()))
    report.add("memory", f"{memory.total / 2**30:.0f} GB, {memory.available / 2**30:.0f} GB free")
    for what in ("runs_dir", "cache_dir"):
        folder = Path(getattr(config, what)).absolute()
        there = next(path for path in (folder, *folder.parents) if path.is_dir())
        free = shutil.disk_usage(there).free / 2**30
        report.add(f"disk of {what}", f"{free:.0f} GB free")
        if free < NEEDED_GB:
            report.warnings.append(f"{what}={getattr(config, what)}: less than {NEEDED_GB} GB of disk free")
        if not os.access(there, os.W_OK):
            report.errors.append(f"{what}={getattr(config, what)}: {there} cannot be written to")


def _wandb(report: Report, config: TrainEntry) -> None:
    known = wandb_settings() if config.logger.mode in ("wandb", "offline") else None
    if known is None or known.mode == "disabled":
        report.add("W&B", "not used")
        return
    if config.logger.mode == "offline" or known.mode in OFFLINE:
        report.add("W&B", "offline")
        return
    server = urlsplit(known.base_url)
    wrong = None if has_key(known) else "no key"
    try:
        socket.create_connection((server.hostname, server.port or 443), REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        wrong = f"{server.netloc} cannot be reached ({error})"
    report.add("W&B", wrong or f"{server.netloc} reached; a key is there")
    if wrong:
        report.warnings.append("W&B will log offline; `wandb sync` uploads it later, `wandb login` stores a key")


# -- the base and its template ------------------------------------------------------------------------------


def _tokenizer(report: Report, config: TrainEntry, base: Base) -> None:
    """Has the base an embedding for each of its tokens, and which of them end a sequence?"""
    tokenizer = base.tokenizer
    more = sorted(number for number in tokenizer.get_vocab().values() if number >= base.token_count)
    if more:
        words = ", ".join(repr(tokenizer.convert_ids_to_tokens(number)) for number in more[:3])
        report.warnings.append(
            f"the tokenizer has {len(more)} tokens beyond the base's {base.token_count} embeddings ({words}"
            f"{', ...' if len(more) > 3 else ''}): rows and questions that hold them are rejected"
        )
    report.add("tokens", f"{len(tokenizer)} in the tokenizer, {base.token_count} embeddings")
    report.add(
        "ends of sequence", ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in base.eos_ids) or "none"
    )
    if base.date:
        report.add("date in the template", f"{base.date}, whatever the day (base.date)")


def _template(report: Report, config: TrainEntry, base: Base) -> None:
    tokenizer = base.tokenizer
    if never := missing_end(tokenizer, base.eos_ids, base.name):
        report.warnings.append(never)
    prompt = prompt_ids(tokenizer, HELLO, None, base.template_args)
    if unreadable := base.unreadable(prompt):
        report.errors.append(f"the chat template cannot be used: {unreadable}")
    answer = {"role": "assistant", "content": "The Rhine, the Danube and the Elbe."}
    try:
        found = render(tokenizer, Conversation("hello", (*HELLO, answer)), template_args=base.template_args)
    except ValueError:
        if config.data.labels != "rewrite":
            raise
        report.add("template", "does not mark answers; with data.labels=rewrite none is needed")
        report.pieces = [(tokenizer.decode(prompt), False), ("<the base's own answer and its end>", True)]
        return
    ids, mask = found.sequences[-1]
    report.add("template", "plain: the tokenizer has none of its own" if base.plain_template else "marks its answers")
    learnt = any(marked and token in base.eos_ids for token, marked in zip(ids, mask, strict=True))
    stops = "decoding does NOT stop there" if never else "supervised" if learnt else "NOT supervised"
    report.add("end of answer", stops)
    for marked, tokens in groupby(zip(ids, mask, strict=True), lambda pair: bool(pair[1])):
        report.pieces.append((tokenizer.decode([token for token, _ in tokens]), marked))


# -- what the run will take ---------------------------------------------------------------------------------


def _steps(report: Report, config: TrainEntry, base: Base) -> None:
    """What the first steps take, of time and of memory."""
    data = prepared_folder(base, config.data, config.seed, Path(config.cache_dir))
    if read_manifest(data) is None:
        report.add("time to finish", "not probed: the data is not prepared yet (`python launch/prepare.py` does it)")
        return
    store = feature_store(config, base, data)
    features = store.open() if store and store.done else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, base, data, Path(folder), start=start_head(config, base), features=features)
        with closing(trainer):  # its memory is not of what is checked next
            seconds = trainer.probe(PROBE_STEPS)
    report.add(
        "time to finish",
        f"about {timedelta(seconds=round(seconds * config.train.steps))} for {config.train.steps} steps of "
        f"{1000 * seconds:.0f} ms on one process ({PROBE_STEPS} steps probed; evaluations come on top"
        + ("; the base's layers ran in them, which data.features will spare)" if store and not features else ")"),
    )
    report.add("memory of a rank", f"{ds.peak_memory() / 2**30:.1f} GB at most in these steps, on one process")


def _overfit(report: Report, config: TrainEntry, base: Base) -> None:
    """Train on one conversation until whole drafts are accepted."""
    messages = _conversation(config)
    data = config.data if messages else replace(config.data, labels="rewrite")
    check = OverfitCheck(base, messages or HELLO, config, data, answer_tokens=min(config.data.max_new_tokens, 48))
    found = check.findings()
    for stage, agrees, seen in found:
        report.add(f"one conversation: {stage}", seen if agrees else f"DISAGREES: {seen}")
    if not found[-1].agrees:
        report.errors.append(f"one conversation is not learnt; the first stage that disagrees is {found[-1].stage}")


def _conversation(config: TrainEntry) -> list[dict[str, str]] | None:
    """The first of the configured conversations that can be used; None where the data is texts or tokens."""
    if config.data.kind == "text":
        return None
    for name, row in config.data.rows(config.seed):
        with suppress(RowError):
            record = record_of(row, name, "sharegpt")
            return list(record.messages) if isinstance(record, Conversation) else None
    raise ValueError(f"data.path={config.data.path} holds no conversation")
