"""Conversations or texts -> sequences in the base's own words, stored once per (source, base, options).

The source is read as a stream and worked on in shards of rows. A shard is claimed by one process, so the same
command started several times (ranks, hosts, an array of jobs) shares the work; a finished shard is one rename, a
started one has a journal of the answers so far. When all are there, they are joined in order.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ctcdraft.data import embedded
from ctcdraft.data.duplicates import NearDuplicates
from ctcdraft.data.prompts import cut_prompts
from ctcdraft.data.records import Conversation, Record, Text, Tokens, record_of
from ctcdraft.data.sources import RowError, read_mixture, read_rows, source_hash
from ctcdraft.data.store import (
    Example,
    Journal,
    claimed,
    join_corpora,
    load_corpus,
    new_folder,
    read_jsonl,
    read_manifest,
    read_object,
    save_corpus,
    write_jsonl,
)
from ctcdraft.data.template import Rendered, render_all
from ctcdraft.model.base import Base, warn_if_plain
from ctcdraft.model.generate import batches_by_length
from ctcdraft.train.regenerate import LEAST_ROOM, RegenerateConfig, continued, rewrite

KINDS = ("embedded", "sharegpt", "text", "mixed")
FORMAT = 2
EMBEDDED_ROWS = 1800
SPLITS = ("train", "dev", "heldout")
FREE = ("path", "batch_size", "show")  # options that do not change what is prepared (a path's content does)
FREE_REGENERATE = ("url", "concurrency", "retries", "timeout")
ASKED_CHARACTERS = 4000  # of a row's user turns, kept to be compared with the evaluation questions


@dataclass(frozen=True)
class DataConfig:
    """kind: `embedded`, `sharegpt` (conversations, any form), `text`, or `mixed` (both); path: file, glob or Hub
    name, or a list of them, with `weights` mixed row by row in these shares until one ends.

    limit: use at most so many rows. holdout: share of rows kept for development and for questions, half
    and half. dedupe: drop rows of equal content. keep_out: questions (a file) whose near-duplicates are dropped.
    regenerate: how the base rewrites every answer (true: as by default); false: the given answers stay, with the
    base's argmax as labels. last_turn: only last answers are labels. prompt_tokens and samples_per_text: how
    texts are cut. max_new_tokens per answer. shard_rows: rows worked on, and lost by nobody, at a time. show: so
    many sequences are printed after preparing.
    """

    kind: str = "embedded"
    path: str | list[str] | None = None
    weights: list[float] | None = None
    limit: int | None = None
    holdout: float = 0.1
    dedupe: bool = True
    keep_out: str | None = None
    last_turn: bool = False
    regenerate: RegenerateConfig | bool = field(default_factory=RegenerateConfig)
    prompt_tokens: list[int] = field(default_factory=lambda: [8, 140])
    samples_per_text: int = 4
    max_new_tokens: int = 192
    batch_size: int = 64
    shard_rows: int = 2048
    show: int = 0

    def __post_init__(self) -> None:
        low_high = self.prompt_tokens
        if self.kind not in KINDS:
            raise ValueError(f"data.kind={self.kind!r} is unknown: choose one of {KINDS}")
        if self.kind != "embedded" and not self.paths:
            raise ValueError(f"data={self.kind} needs data.path=<file, glob or Hub name>")
        if self.weights is not None and (len(self.weights) != len(self.paths) or min(self.weights) <= 0):
            raise ValueError(f"data.weights={self.weights}: give one above 0 for each of {len(self.paths)} paths")
        if len(low_high) != 2 or not 1 <= low_high[0] <= low_high[1]:
            raise ValueError(f"data.prompt_tokens={low_high}: give [shortest, longest], 1 or more")
        if not 0.0 < self.holdout < 0.9:
            raise ValueError(f"data.holdout={self.holdout} must lie between 0 and 0.9")
        counts = ("samples_per_text", "max_new_tokens", "batch_size", "shard_rows")
        if min(*(getattr(self, name) for name in counts), 1 if self.limit is None else self.limit) < 1:
            raise ValueError(f"data.{', '.join(counts)} and limit must be at least 1")
        if self.show < 0:
            raise ValueError(f"data.show={self.show} must not be negative")

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path or [])

    @property
    def rewriting(self) -> RegenerateConfig | None:
        """How answers are rewritten; None where the given ones stay."""
        return self.regenerate if isinstance(self.regenerate, RegenerateConfig) else _REWRITING[self.regenerate]


_REWRITING = {True: RegenerateConfig(), False: None}


def prepared_folder(base: Base, config: DataConfig, seed: int, cache: Path) -> Path:
    """Where data for this base and these options lies, prepared or not: the name is a hash of them all."""
    options = {k: v for k, v in asdict(replace(config, regenerate=config.rewriting or False)).items() if k not in FREE}
    if config.rewriting:
        options["regenerate"] = {k: v for k, v in options["regenerate"].items() if k not in FREE_REGENERATE}
    sources = [source_hash(path) for path in (*config.paths, config.keep_out) if path] or embedded.fingerprint()
    template = None if config.kind == "text" else base.tokenizer.chat_template
    identity = {name: digest for name, digest in base.identity.items() if name != "name"}
    key = [FORMAT, options, sources, template, identity, seed]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return cache / f"data-{config.kind}-{digest}"


def prepare(base: Base, config: DataConfig, seed: int, cache: Path) -> Path:
    """The folder of prepared data, made when it is not there yet (long: the base writes every answer).

    Any number of processes may call it at once, and share the shards; each returns when all is done.
    Raises ValueError when the source holds nothing that can be used; used + rejected = read.
    """
    folder = prepared_folder(base, config, seed, cache)
    work = folder.with_name(f"{folder.name}.work")
    if read_manifest(folder) is not None:
        shutil.rmtree(work, ignore_errors=True)  # what a process left that was killed at the very end
        return folder
    if config.kind != "text":
        warn_if_plain(base)
    for wait in (False, True):  # first what is free, then what another process may have left
        shards = [_prepare_shard(work, folder, shard, base, config, seed, wait=wait) for shard in _shards(config, seed)]
        if all(shard.is_dir() for shard in shards):
            break
    with claimed(folder.with_name(f"{folder.name}.lock"), wait=True):
        if read_manifest(folder) is None:
            for left in folder.parent.glob(f"unfinished-{folder.name}-*"):
                shutil.rmtree(left)
            with new_folder(folder) as fresh:
                _join(fresh, folder, shards, base, config)
        shutil.rmtree(work, ignore_errors=True)
    return folder


class Shard(NamedTuple):
    """Rows that are worked on together: how many were read, what can be used of them by split, what cannot."""

    number: int
    read: int
    splits: dict[str, list[Record]]
    rejects: list[dict[str, Any]]


def _shards(config: DataConfig, seed: int) -> Iterator[Shard]:
    """The source as shards. Equal rows are dropped, and the split goes by a hash of the opening: rows that open
    alike land together."""
    seen: dict[bytes, str] = {}
    keep_out = NearDuplicates(_keep_out(config.keep_out)) if config.keep_out else None
    shard = _empty(0)
    for index, (name, row) in enumerate(tqdm(_rows(config, seed), "reading", unit="row", mininterval=1)):
        if config.limit is not None and index >= config.limit:
            break
        if shard.read == config.shard_rows:
            yield shard
            shard = _empty(shard.number + 1)
        shard = shard._replace(read=shard.read + 1)
        try:
            record = record_of(row, name, config.kind if config.kind != "embedded" else "sharegpt")
            if config.dedupe and (first := seen.setdefault(record.digest, name)) != name:
                raise RowError(f"the same as row {first}")
            near = keep_out.of(_asked(record)) if keep_out else None
            if near is not None:
                raise RowError(f"nearly question {near} of {config.keep_out}")
        except RowError as error:
            shard.rejects.append({"row": name, "reason": str(error)})
        else:
            shard.splits[_split(record, config.holdout)].append(replace(record, id=name))
    yield shard


def _rows(config: DataConfig, seed: int) -> Iterator[tuple[str, Any]]:
    if config.paths:
        return read_mixture(config.paths, config.weights)
    made = embedded.conversations(config.limit or EMBEDDED_ROWS, seed)
    return ((str(number), row) for number, row in enumerate(made))


def _empty(number: int) -> Shard:
    return Shard(number, 0, {split: [] for split in SPLITS}, [])


def _split(record: Record, holdout: float) -> str:
    draw = int.from_bytes(hashlib.sha256(record.opening.encode()).digest()[:8], "big") / 2**64
    return "dev" if draw < holdout / 2 else "heldout" if draw < holdout else "train"


def _asked(record: Record) -> str:
    """What a row asks, to be compared with evaluation questions."""
    if isinstance(record, Conversation):
        return "\n".join(m["content"] for m in record.messages if m["role"] == "user")[:ASKED_CHARACTERS]
    return record.text[:ASKED_CHARACTERS] if isinstance(record, Text) else ""


def _keep_out(path: str) -> list[str]:
    """The first turns of a file of evaluation questions. Raises ValueError where a row is none."""
    found = []
    for number, row in enumerate(read_rows(path, "data.keep_out")):
        try:
            found.append(record_of(row, str(number), "mixed").opening)
        except RowError as error:
            raise ValueError(f"data.keep_out={path}: row {number}: {error}") from error
    return found


def _prepare_shard(
    work: Path, folder: Path, shard: Shard, base: Base, config: DataConfig, seed: int, *, wait: bool
) -> Path:
    """The folder of a shard, filled unless it is there or, without `wait`, another process is at it."""
    target = work / f"{shard.number:05}"
    if target.is_dir():
        return target
    with claimed(work / f"{shard.number:05}.lock", wait=wait) as ours:
        if ours and not target.is_dir() and read_manifest(folder) is None:
            journal = Journal(work / f"{shard.number:05}.journal")
            with new_folder(target) as fresh:
                _fill(fresh, shard, base, config, seed, journal)
            journal.close()
            journal.path.unlink()
    return target


def _fill(folder: Path, shard: Shard, base: Base, config: DataConfig, seed: int, journal: Journal) -> None:
    """Everything that a shard gives, in files."""
    rejects, turns = shard.rejects, Counter[str]()
    for split in SPLITS[:2]:
        maker = _Maker(base, config, seed, journal, rejects, turns, f"shard {shard.number}: base answers {split}")
        examples = maker.examples(shard.splits[split])
        save_corpus(folder / f"{split}.safetensors", examples)
    write_jsonl(folder / "rejects.jsonl", rejects)
    write_jsonl(folder / "heldout.jsonl", _questions(shard.splits["heldout"]))
    asked = ({"row": record.id, "asked": _asked(record)} for record in shard.splits["train"])
    write_jsonl(folder / "asked.jsonl", (row for row in asked if row["asked"]))
    account = {"read": shard.read, "rejected": len({r["row"] for r in rejects}), "turns": dict(turns)}
    (folder / "account.json").write_text(json.dumps(account))


def example_of(base: Base, config: DataConfig, record: Record, seed: int) -> Example:
    """What one record gives, outside any folder. Raises ValueError with the reason when that is nothing."""
    rejects: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal")
        made = _Maker(base, config, seed, journal, rejects, Counter(), "one record").examples([record])
        journal.close()
    if not made:
        raise ValueError(f"the record {record.id} cannot be used: {rejects[0]['reason']}")
    return made[0]


class _Maker:
    """Records of one shard and split -> examples, in the order of the rows."""

    def __init__(
        self,
        base: Base,
        config: DataConfig,
        seed: int,
        journal: Journal,
        rejects: list[dict[str, Any]],
        turns: Counter[str],
        title: str,
    ) -> None:
        self.base, self.config, self.seed, self.journal = base, config, seed, journal
        self.rejects, self.turns, self.title = rejects, turns, title

    def examples(self, records: Sequence[Record]) -> list[Example]:
        found: dict[str, list[Example]] = {}
        chats = [r for r in records if isinstance(r, Conversation)]
        if self.config.rewriting:
            found |= self._rewritten(chats, self.config.rewriting)
        else:
            found |= self._labelled(self._given(chats))
        found |= self._labelled([(r.id, Rendered(r.ids, r.mask)) for r in records if isinstance(r, Tokens)])
        found |= self._continued([r for r in records if isinstance(r, Text)])
        return [example for record in records for example in found.get(record.id, [])]

    def _reject(self, row: str, reason: str) -> None:
        self.rejects.append({"row": row, "reason": reason})

    def _rewritten(self, chats: list[Conversation], rewriting: RegenerateConfig) -> dict[str, list[Example]]:
        """Every assistant turn rewritten by the base."""
        config = self.config
        sizes = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "seed": self.seed}
        dialogues, turns = rewrite(self.base, chats, rewriting, self.journal, title=self.title, **sizes)  # type: ignore[arg-type]
        self.turns.update(turns._asdict())
        found: dict[str, list[Example]] = {chat.id: [] for chat in chats}
        for dialogue in dialogues:
            found[dialogue.conversation.id] += dialogue.examples(last_turn=config.last_turn)
        for dialogue in dialogues[:: len(rewriting.temperatures)]:
            if not found[dialogue.conversation.id]:
                self._reject(dialogue.conversation.id, dialogue.reason)
        return found

    def _given(self, chats: list[Conversation]) -> Iterator[tuple[str, Rendered]]:
        """The given answers as they are."""
        answered = []
        for chat in chats:
            if any(m["role"] == "assistant" for m in chat.messages):
                answered.append(chat)
            else:
                self._reject(chat.id, "no answer to keep")
        rendered = render_all(self.base.tokenizer, answered, last_turn=self.config.last_turn)
        for chat, found in zip(answered, rendered, strict=True):
            if isinstance(found, RowError):
                self._reject(chat.id, str(found))
            else:
                yield chat.id, found

    def _labelled(self, rendered: Iterator[tuple[str, Rendered]] | list[tuple[str, Rendered]]) -> dict[str, Any]:
        """Given sequences, with what the base would have put at each position as labels."""
        fitting = []
        for name, found in rendered:
            problem = _misfit(found, self.base)
            if problem:
                self._reject(name, problem)
            else:
                fitting.append((name, found))
        made: dict[str, list[Example]] = {}
        batches = batches_by_length([found.ids for _, found in fitting], self.config.batch_size)
        for batch in tqdm(batches, self.title, unit="batch", mininterval=1, disable=not batches):
            labels = _choices(self.base, [fitting[i][1].ids for i in batch])
            for i, chosen in zip(batch, labels, strict=True):
                name, (ids, mask) = fitting[i]
                made[name] = [Example(ids, mask, chosen)]
        return made

    def _continued(self, texts: list[Text]) -> dict[str, list[Example]]:
        """Texts, cut somewhere and continued by the base."""
        config, base = self.config, self.base
        low, high = config.prompt_tokens
        room = base.context_length - LEAST_ROOM
        if texts and low > room:
            raise ValueError(
                f"data.prompt_tokens={config.prompt_tokens}: {base.name} takes {base.context_length} tokens"
            )
        work: list[tuple[list[int], float, str]] = []
        temperatures = (config.rewriting or RegenerateConfig()).temperatures
        for text in texts:
            key = (self.seed, *hashlib.sha256(text.id.encode()).digest()[:4])
            cuts = list(cut_prompts(base.tokenizer, text.text, (low, min(high, room)), config.samples_per_text, key))
            work += [(cut, t, text.id) for cut in cuts for t in temperatures]
            if not cuts:
                self._reject(text.id, f"fewer than {low} tokens")
        sizes = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "seed": self.seed}
        top_p = (config.rewriting or RegenerateConfig()).top_p
        answers = tqdm(
            continued(base, work, top_p, self.journal, **sizes),
            f"{self.title} (texts)",
            len(work),
            unit="prompt",
            mininterval=1,
            disable=not work,
        )
        found = dict(answers)
        made: dict[str, list[Example]] = {text.id: [] for text in texts}
        for number, (prompt, _, name) in enumerate(work):
            ids = [*prompt, *found[number]]
            made[name].append(Example(ids, [0] * len(prompt) + [1] * len(found[number]), ids))
        return made


def _misfit(found: Rendered, base: Base) -> str | None:
    if len(found.ids) > base.context_length:
        return f"{len(found.ids)} tokens, more than the context holds"
    if max(found.ids, default=0) >= base.vocab_size:
        return f"token {max(found.ids)}, but {base.name} knows {base.vocab_size}"
    return None if any(found.mask) else "no token of an answer"


@torch.no_grad()
def _choices(base: Base, sequences: list[list[int]]) -> list[list[int]]:
    """At each position of each sequence the token that the base would have put there."""
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    hidden = base.hidden(ids.to(base.device))  # padding lies behind: causal attention never sees it
    chosen = [base.logits(row[: len(s)]).argmax(dim=-1).tolist() for row, s in zip(hidden, sequences, strict=True)]
    return [[s[0], *c[:-1]] for s, c in zip(sequences, chosen, strict=True)]


def _questions(heldout: list[Record]) -> list[dict[str, Any]]:
    """Held-out records as evaluation questions."""
    rows: list[dict[str, Any]] = []
    for record in heldout:
        if isinstance(record, Text):
            rows.append({"question_id": record.id, "category": "text", "text": record.text})
        elif isinstance(record, Conversation):
            turns = [m["content"] for m in record.messages if m["role"] == "user"]
            rows.append({"question_id": record.id, "category": "chat", "turns": turns[:2]})
    return rows


def _join(fresh: Path, folder: Path, shards: list[Path], base: Base, config: DataConfig) -> None:
    """All shards as one folder; the account is written last."""
    accounts = [read_object(shard / "account.json", "read", "rejected", "turns") for shard in shards]
    read, rejected = (sum(account[key] for account in accounts) for key in ("read", "rejected"))
    turns: Counter[str] = Counter()
    for account in accounts:
        turns.update(account["turns"])
    write_jsonl(fresh / "rejects.jsonl", (row for shard in shards for row in read_jsonl(shard / "rejects.jsonl")))
    heldout = [row for shard in shards for row in read_jsonl(shard / "heldout.jsonl")]
    questions = embedded.questions() if config.kind == "embedded" else heldout
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
    account |= {"turns": dict(turns), "near_duplicates": len(near)}
    manifest = {"base": base.identity, "options": asdict(config), **account, **counts}
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
    index = NearDuplicates([q["turns"][0] if "turns" in q else q["text"] for q in questions])
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
