"""Conversations or texts -> sequences in the base's own words, stored once per (source, base, options).

The source is read as a stream and worked on in shards of rows. A shard is claimed by one process, so the same
command started several times (ranks, hosts, an array of jobs) shares the work; a finished shard is one rename, a
started one has a journal of the answers so far. When all are there, they are joined in order.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctcdraft.data.duplicates import NearDuplicates
from ctcdraft.data.end_of_turn import warn_if_no_end
from ctcdraft.data.prompts import question_ids
from ctcdraft.data.records import Conversation, Record, Text
from ctcdraft.data.secrets import masked
from ctcdraft.data.sources import RowError, source_hash
from ctcdraft.data.store import (
    Journal,
    join_corpora,
    load_corpus,
    read_jsonl,
    read_manifest,
    read_object,
    save_corpus,
    write_jsonl,
)
from ctcdraft.model.base import Base, warn_if_plain
from ctcdraft.model.folders import claimed, new_folder
from ctcdraft.train.examples import ExampleMaker
from ctcdraft.train.options import decisive
from ctcdraft.train.regenerate import OUTCOMES
from ctcdraft.train.shards import GENERATED, SPLITS, Account, DataConfig, Shard, asked_text, read_shards

FORMAT = 4


def prepared_folder(base: Base, config: DataConfig, seed: int, cache: Path) -> Path:
    """Where data for this base and these options lies, prepared or not: the name is a hash of them all."""
    options = {k: v for k, v in decisive(config).items() if k not in ("path", "features")}  # a path's content does
    sources = [source_hash(path) for path in (*config.paths, config.keep_out) if path]
    sources = sources or GENERATED[config.kind].fingerprint()
    template = None if config.kind == "text" else [base.tokenizer.chat_template, dict(base.template_args)]
    identity = {name: digest for name, digest in base.identity.items() if name != "name"}
    key = [FORMAT, options, sources, template, identity, seed]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return cache / f"data-{config.kind}-{digest}"


def prepare(base: Base, config: DataConfig, seed: int, cache: Path) -> Path:
    """The folder of prepared data, made when it is not there yet (long: the base writes every answer).

    Any number of processes may call it at once, and share the shards; each returns when all is done.
    Raises ValueError when the source holds nothing that can be used (used + rejected = read), and when a server failed
    at some turns: those are asked again by the next call, and no others.
    """
    folder = prepared_folder(base, config, seed, cache)
    work = folder.with_name(f"{folder.name}.work")
    if read_manifest(folder) is not None:
        shutil.rmtree(work, ignore_errors=True)  # what a process left that was killed at the very end
        return folder
    if config.kind != "text":
        warn_if_plain(base)
        warn_if_no_end(base.tokenizer, base.eos_ids, base.name)
    shards = _prepare_shards(work, folder, base, config, seed)
    with claimed(folder.with_name(f"{folder.name}.lock"), wait=True):
        if read_manifest(folder) is None:
            for left in folder.parent.glob(f"unfinished-{folder.name}-*"):
                shutil.rmtree(left)
            with new_folder(folder) as fresh:
                _join(fresh, folder, shards, base, config)
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _prepare_shards(work: Path, folder: Path, base: Base, config: DataConfig, seed: int) -> list[Path]:
    """The folders of all shards, filled. Raises ValueError where a server left turns unanswered."""
    unanswered: dict[int, Account] = {}
    for wait in (False, True):  # first what is free, then what another process may have left
        shards = []
        for shard in read_shards(config, seed):
            shards.append(work / f"{shard.number:05}")
            if shard.number in unanswered or _prepare_shard(shards[-1], folder, shard, base, config, seed, wait=wait):
                continue
            unanswered[shard.number] = shard.account
            if shard.account.turns["errors"] > shard.account.turns["answered"]:  # dead, as the next would find it
                raise _unanswered(shards, unanswered, config)
        if all(shard.is_dir() for shard in shards):
            return shards
    if unanswered:
        raise _unanswered(shards, unanswered, config)
    return shards


def _unanswered(shards: list[Path], unanswered: dict[int, Account], config: DataConfig) -> ValueError:
    """What there is so far, and what to do about the rest."""
    turns: Counter[str] = Counter()
    for number, shard in enumerate(shards):
        account = shard / "account.json"
        found = read_object(account, "turns")["turns"] if account.is_file() else {}
        turns.update(unanswered[number].turns if number in unanswered else found)
    return ValueError(
        f"data.regenerate.url={config.regenerate.url}: {turns['errors']} turns got no answer (the first: "
        f"{next(iter(unanswered.values())).errors[0]}); {account_of(turns)} so far; the same command asks for these "
        "again and keeps the others (data.regenerate.reject_errors=true rejects them)"
    )


def account_of(turns: Mapping[str, int]) -> str:
    """asked = answered + refused + errors + skipped, with their numbers."""
    asked, *parts = (f"{name} {turns[name]:,}" for name in ("asked", *OUTCOMES))
    return f"{asked} = {' + '.join(parts)}"


def _prepare_shard(
    target: Path, folder: Path, shard: Shard, base: Base, config: DataConfig, seed: int, *, wait: bool
) -> bool:
    """Fill the folder of a shard, unless it is there or, without `wait`, another process is at it. False where a server
    may yet answer what it has not: what it has answered is kept."""
    if target.is_dir():
        return True
    with claimed(target.with_name(f"{target.name}.lock"), wait=wait) as ours:
        if not ours or target.is_dir() or read_manifest(folder) is not None:
            return True
        account, examples = shard.account, {}
        with closing(Journal(target.with_name(f"{target.name}.journal"))) as journal:
            for split in SPLITS[:2]:
                maker = ExampleMaker(
                    base, config, seed, journal, account, f"shard {shard.number}: base answers {split}"
                )
                examples[split] = maker.examples(shard.splits[split])
        if account.errors and not config.regenerate.reject_errors:
            return False
        with new_folder(target) as fresh:
            for split, found in examples.items():
                save_corpus(fresh / f"{split}.safetensors", found)
            write_jsonl(fresh / "heldout.jsonl", list(_questions(base, shard.splits["heldout"], account)))
            write_jsonl(fresh / "rejects.jsonl", account.rejects)
            asked = ({"row": record.id, "asked": asked_text(record)} for record in shard.splits["train"])
            write_jsonl(fresh / "asked.jsonl", (row for row in asked if row["asked"]))
            counts: dict[str, Any] = {"read": account.read, "rejected": len({row["row"] for row in account.rejects})}
            counts |= {"turns": dict(account.turns), "unread": dict(account.unread)}
            (fresh / "account.json").write_text(json.dumps(counts))
        journal.path.unlink()
    return True


def _questions(base: Base, heldout: list[Record], account: Account) -> Iterator[dict[str, Any]]:
    """Held-out records as evaluation questions, but for those that the base cannot be asked."""
    for record in heldout:
        category, asked, ids = "chat", dict[str, Any](), list[int]()
        try:
            if isinstance(record, Text):
                category, asked, ids = "text", {"text": record.text}, base.tokenizer(record.text).input_ids
            elif isinstance(record, Conversation):
                asked = _asked(record)
                ids = question_ids(
                    base.tokenizer, asked["turns"], asked.get("system"), asked.get("tools"), base.template_args
                )
            elif record.prompt:
                asked, ids = {"input_ids": record.prompt}, record.prompt
            problem = base.unreadable(ids)
        except RowError as error:
            problem = str(error)
        if problem:
            account.reject(record.id, problem)
        elif asked:
            yield {"question_id": record.id, "category": category, **asked}


def _asked(chat: Conversation) -> dict[str, Any]:
    """The first two user turns up to a tool's result (the base need not call it), the system turn and the tools."""
    messages = list(takewhile(lambda message: message["role"] != "tool", chat.messages))
    asked: dict[str, Any] = {"turns": [m["content"] for m in messages if m["role"] == "user"][:2]}
    if messages[0]["role"] == "system":
        asked["system"] = messages[0]["content"]
    return asked | ({"tools": chat.tools} if chat.tools else {})


def _join(fresh: Path, folder: Path, shards: list[Path], base: Base, config: DataConfig) -> None:
    """All shards as one folder; the account is written last."""
    accounts = [read_object(shard / "account.json", "read", "rejected", "turns", "unread") for shard in shards]
    read, rejected = (sum(account[key] for account in accounts) for key in ("read", "rejected"))
    turns, unread = Counter[str](), Counter[str]()
    for account in accounts:
        turns.update(account["turns"])
        unread.update(account["unread"])
    write_jsonl(fresh / "rejects.jsonl", (row for shard in shards for row in read_jsonl(shard / "rejects.jsonl")))
    heldout = [row for shard in shards for row in read_jsonl(shard / "heldout.jsonl")]
    questions = GENERATED[config.kind].questions() if config.kind in GENERATED else heldout
    write_jsonl(fresh / "heldout.jsonl", questions)
    for split in SPLITS[:2]:
        join_corpora(fresh / f"{split}.safetensors", [shard / f"{split}.safetensors" for shard in shards])
    _lend_dev(fresh)
    counts = {split: _counted(fresh, split) for split in SPLITS[:2]}
    for split, count in counts.items():
        if not count["answer_tokens"]:
            kept = folder.with_name(f"{folder.name}-rejects.jsonl")
            shutil.copy(fresh / "rejects.jsonl", kept)
            first = next((f" (the first: {row['reason']})" for row in read_jsonl(kept)), "")
            shutil.rmtree(shards[0].parent, ignore_errors=True)
            raise ValueError(
                f"data.path={config.path}: of {read} rows none gave a {split} sequence; "
                f"{rejected} rejected{first}; see {kept}"
            )
    near = list(_near_duplicates(shards, questions))
    write_jsonl(fresh / "near_duplicates.jsonl", near)
    account = {"read": read, "used": read - rejected, "rejected": rejected, "heldout": len(heldout)}
    account |= {"turns": dict(turns), "unread": dict(unread.most_common()), "near_duplicates": len(near)}
    manifest = {"base": base.identity, "options": masked(asdict(config)), **account, **counts}
    (fresh / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _lend_dev(folder: Path) -> None:
    """Where few rows left no development sequence, the last of training becomes one: the best head needs it."""
    train, dev = (load_corpus(folder, split) for split in SPLITS[:2])
    if len(train) > 1 and not len(dev):
        examples = [train[i] for i in range(len(train))]
        for split, part in (("dev", examples[-1:]), ("train", examples[:-1])):
            save_corpus(folder / f"{split}.fresh", part)
            (folder / f"{split}.fresh").replace(folder / f"{split}.safetensors")


def _near_duplicates(shards: list[Path], questions: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Training rows that nearly repeat a question on which the head is evaluated."""
    index = NearDuplicates([q["turns"][0] if "turns" in q else q.get("text", "") for q in questions])
    for shard in shards:
        for row in read_jsonl(shard / "asked.jsonl"):
            near = index.of(row["asked"])
            if near is not None:
                yield {**row, "question_id": questions[near]["question_id"]}


def _counted(folder: Path, split: str) -> dict[str, Any]:
    corpus = load_corpus(folder, split)
    return {
        "sequences": len(corpus),
        "tokens": len(corpus.ids),
        "answer_tokens": int(corpus.mask.sum()),
        "lengths": length_statistics(corpus.lengths),
    }


def length_statistics(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Quantiles of sequence lengths, in tokens."""
    if not len(lengths):
        return {}
    found = np.quantile(lengths, [0.5, 0.9, 0.99, 1.0], method="lower").astype(int).tolist()
    return dict(zip(("median", "p90", "p99", "longest"), found, strict=True))
