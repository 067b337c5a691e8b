"""Conversations or texts -> sequences in the base's own words, stored once per (source, base, options).

The source is read as a stream and worked on in shards of rows. A shard is claimed by one process, so the same
command started several times (ranks, hosts, an array of jobs) shares the work; a finished shard is one rename, a
started one has a journal of the answers so far. When all are there, they are joined in order.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt

from ctcdraft.data.duplicates import NearDuplicates
from ctcdraft.data.end_of_turn import warn_of_template
from ctcdraft.data.prompts import question_ids
from ctcdraft.data.records import Conversation, Record, Text
from ctcdraft.data.secrets import masked
from ctcdraft.data.sources import RowError, source_hash
from ctcdraft.data.store import (
    Example,
    Journal,
    join_corpora,
    load_corpus,
    read_jsonl,
    read_manifest,
    read_object,
    save_corpus,
    write_jsonl,
)
from ctcdraft.model.base.llm import Base
from ctcdraft.model.folders import MANIFEST, digest_of, new_folder, share_out, work_folder

from .examples import ExampleMaker
from .options import MayDiffer, departures
from .regenerate import OUTCOMES, AnswersConfig
from .shards import GENERATED, LEARNT, Account, RowsConfig, Shard, asked_text, read_shards

FORMAT = 5
ACCOUNT = "account.json"  # of a shard, in its folder


@dataclass(frozen=True)
class DataConfig(AnswersConfig, RowsConfig):
    """Which rows, what becomes of their answers, and how training reads them."""

    # bf16: store the base's hidden states once, train without its forward; null: at each step
    features: Literal["bf16"] | None = None
    show: MayDiffer[NonNegativeInt] = 0  # print so many prepared sequences, labels in colour

    def __post_init__(self) -> None:
        RowsConfig.__post_init__(self)
        AnswersConfig.__post_init__(self)
        if self.kind == "text" and self.labels != "rewrite":
            raise ValueError(
                f"data.labels={self.labels}: the base continues every text: leave it at rewrite for data=text"
            )


def prepared_folder(base: Base, config: DataConfig, seed: int, cache: Path) -> Path:
    """Where data for this base and these options lies, prepared or not: the name is a hash of what decides it."""
    options = {k: v for k, v in departures(config).items() if k not in ("path", "features")}  # a path's content does
    sources = [source_hash(path) for path in (*config.paths, config.keep_out) if path]
    sources += [GENERATED[config.kind].fingerprint] if sources and config.kind in GENERATED else []
    template = None if config.kind == "text" else [base.tokenizer.chat_template, dict(base.template_args)]
    identity = {name: digest for name, digest in base.identity.items() if name != "name"}
    key = [FORMAT, options, sources or GENERATED[config.kind].fingerprint, template, identity, base.weights, seed]
    return cache / f"data-{config.kind}-{digest_of(key)[:12]}"


def prepare(base: Base, config: DataConfig, seed: int, cache: Path) -> Path:
    """The folder of prepared data, made when it is not there yet (long: the base writes every answer).

    Any number of processes may call it at once, and share the shards; each returns when all is done.
    Raises ValueError when the source holds nothing that can be used (used + rejected = read), and when a server failed
    at some turns: those are asked again by the next call, and no others.
    """
    folder = prepared_folder(base, config, seed, cache)
    if config.kind != "text" and read_manifest(folder) is None:
        warn_of_template(base)
    made = _Preparation(base, config, seed, folder)
    share_out(folder, partial(read_shards, config, seed), made.add, made.join)
    return folder


def account_of(turns: Mapping[str, int]) -> str:
    """asked = answered + refused + errors + skipped, with their numbers."""
    asked, *parts = (f"{name} {turns[name]:,}" for name in ("asked", *OUTCOMES))
    return f"{asked} = {' + '.join(parts)}"


def commonest(rejects: Path) -> str:
    """Why most of the rejected rows in a file were, in brackets."""
    reasons = Counter(row["reason"] for row in read_jsonl(rejects)).most_common(1)
    return "".join(f" ({times} of them: {reason})" for reason, times in reasons)


class _Preparation:
    """Prepared data on its way: shards in folders of their own, then all of them as one."""

    def __init__(self, base: Base, config: DataConfig, seed: int, folder: Path) -> None:
        self.base, self.config, self.seed, self.folder = base, config, seed, folder
        self.work = work_folder(folder)
        self._unanswered: dict[int, Account] = {}
        self._there: set[int] = set()  # shards; who joins them has come by all: no listing of a disk is relied on

    def add(self, number: int, shard: Shard) -> None:
        """Fill the folder of a shard, unless it is there, or a server has left turns unanswered that it may yet answer:
        what it has answered is kept. Raises ValueError where the server is dead."""
        target, account = self._folder(number), shard.account
        if target.is_dir():
            self._there.add(number)
            return
        examples: dict[str, list[Example]] = {}
        with closing(Journal(target.with_name(f"{target.name}.journal"))) as journal:
            for split in LEARNT:
                title = f"shard {number}: base answers {split}"
                maker = ExampleMaker(self.base, self.config, self.seed, journal, account, title)
                examples[split] = maker.examples(shard.splits[split])
        if account.errors and not self.config.regenerate.reject_errors:
            self._unanswered[number] = account
            if account.turns["errors"] > account.turns["answered"]:  # as the next shard would find it
                raise self._server_failed()
            return
        account.heldout += _questions(self.base, shard.splits["heldout"], account)
        asked = ({"row": record.id, "asked": asked_text(record)} for record in shard.splits["train"])
        account.asked += (row for row in asked if row["asked"])
        with new_folder(target) as fresh:
            for split, found in examples.items():
                save_corpus(fresh / f"{split}.safetensors", found)
            (fresh / ACCOUNT).write_text(json.dumps(vars(account)))
        journal.path.unlink()
        self._there.add(number)

    def _folder(self, number: int) -> Path:
        return self.work / f"{number:05}"

    @property
    def _shards(self) -> list[Path]:
        """The folders of the shards that are there, in order."""
        return [*map(self._folder, sorted(self._there))]

    def _accounts(self) -> Iterator[Account]:
        """Theirs, one in memory at a time."""
        return (Account(**read_object(shard / ACCOUNT, *vars(Account()))) for shard in self._shards)

    def _server_failed(self) -> ValueError:
        """What there is so far, and what to do about the rest."""
        failed, turns = [*self._unanswered.values()], Counter[str]()
        for account in (*self._accounts(), *failed):
            turns.update(account.turns)
        return ValueError(
            f"data.regenerate.url={self.config.regenerate.url}: {turns['errors']} turns got no answer (the first: "
            f"{failed[0].errors[0]}); {account_of(turns)} so far; the same command asks for these again and keeps the "
            "others (data.regenerate.reject_errors=true rejects them)"
        )

    def join(self) -> None:
        """All shards as one folder. Raises ValueError where turns are unanswered, or there is nothing to learn."""
        if self._unanswered:
            raise self._server_failed()
        for left in self.folder.parent.glob(f"unfinished-{self.folder.name}-*"):
            shutil.rmtree(left)
        total, rejected = Account(), 0
        for account in self._accounts():
            total.read += account.read
            total.heldout += account.heldout
            total.turns.update(account.turns)
            total.unread.update(account.unread)
            rejected += len({row["row"] for row in account.rejects})
        with new_folder(self.folder, replaces=True) as fresh:  # one without a manifest is not prepared
            write_jsonl(fresh / "rejects.jsonl", (row for account in self._accounts() for row in account.rejects))
            for split in LEARNT:
                name = f"{split}.safetensors"
                join_corpora(fresh / name, [shard / name for shard in self._shards])
            _lend_dev(fresh)
            counts = {split: _counted(fresh, split) for split in LEARNT}
            if empty := [split for split, count in counts.items() if not count["answer_tokens"]]:
                kept = self.folder.with_name(f"{self.folder.name}-rejects.jsonl")
                shutil.copy(fresh / "rejects.jsonl", kept)
                raise ValueError(  # the shards stay: other processes look for them, to say the same
                    f"data.path={self.config.path}: of {total.read} rows none gave a {empty[0]} sequence; "
                    f"{rejected} rejected{commonest(kept)}; see {kept}; to read them anew delete {self.work}"
                )
            generated = GENERATED.get(self.config.kind)
            questions = generated.questions() if generated else total.heldout
            write_jsonl(fresh / "heldout.jsonl", questions)
            index = NearDuplicates([q["turns"][0] if "turns" in q else q.get("text", "") for q in questions])
            asked = ((row, index.of(row["asked"])) for account in self._accounts() for row in account.asked)
            near = [{**row, "question_id": questions[at]["question_id"]} for row, at in asked if at is not None]
            write_jsonl(fresh / "near_duplicates.jsonl", near)
            manifest = {
                "base": self.base.identity,
                "options": masked(asdict(self.config)),
                "read": total.read,
                "used": total.read - rejected,
                "rejected": rejected,
                "heldout": len(total.heldout),
                "turns": total.turns,
                "unread": dict(total.unread.most_common()),
                "near_duplicates": len(near),
                **counts,
            }
            (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _questions(base: Base, heldout: list[Record], account: Account) -> Iterator[dict[str, Any]]:
    """Held-out records as evaluation questions, but for those that the base cannot be asked."""
    for record in heldout:
        category, asked, ids = "chat", dict[str, Any](), list[int]()
        try:
            if isinstance(record, Text):
                category, asked, ids = "text", {"text": record.text}, base.tokenizer(record.text).input_ids
            elif isinstance(record, Conversation):
                asked = record.question | {"turns": record.question["turns"][:2]}
                ids = question_ids(base, asked["turns"], asked.get("system"), record.tools)
            elif record.prompt:
                asked, ids = {"input_ids": record.prompt}, record.prompt
            problem = base.unreadable(ids)
        except RowError as error:
            problem = str(error)
        if problem:
            account.reject(record.id, problem)
        elif asked:
            yield {"question_id": record.id, "category": category, **asked}


def _lend_dev(folder: Path) -> None:
    """Where few rows left no development sequence, the last of training becomes one: the best head needs it."""
    train, dev = (load_corpus(folder, split) for split in LEARNT)
    if len(train) > 1 and not len(dev):
        examples = [train[i] for i in range(len(train))]
        for split, part in (("dev", examples[-1:]), ("train", examples[:-1])):
            save_corpus(folder / f"{split}.fresh", part)
            (folder / f"{split}.fresh").replace(folder / f"{split}.safetensors")


def _counted(folder: Path, split: str) -> dict[str, Any]:
    """The sequences of a split, with quantiles of their lengths in tokens."""
    corpus = load_corpus(folder, split)
    lengths = corpus.lengths if len(corpus) else [0]
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99, 1.0], method="lower")
    names = ("median", "p90", "p99", "longest")
    return {
        "sequences": len(corpus),
        "tokens": len(corpus.ids),
        "answer_tokens": int(corpus.mask.sum()),
        "lengths": dict(zip(names, quantiles.tolist(), strict=True)),
    }
