"""Conversations or texts -> sequences in the base's own words, stored once per (source, base, options)."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ctcdraft.data import embedded
from ctcdraft.data.prompts import cut_prompts
from ctcdraft.data.records import Conversation, Text, conversation_of, text_of
from ctcdraft.data.sources import RowError, read_rows, source_hash
from ctcdraft.data.store import Example, new_folder, read_manifest, save_corpus, write_jsonl
from ctcdraft.data.template import prompt_ids, render
from ctcdraft.model.base import Base, warn_if_plain
from ctcdraft.model.generate import continue_prompts

KINDS = ("embedded", "sharegpt", "text")
FORMAT = 1
EMBEDDED_ROWS = 1800
LEAST_ROOM = 16  # tokens that a prompt leaves for its answer


@dataclass(frozen=True)
class DataConfig:
    """kind: `embedded`, `sharegpt` (conversations, either form) or `text`; path: file, glob or Hub name.

    limit: use at most so many rows. holdout: share of rows kept for development and for questions, half
    and half. regenerate: the base rewrites every answer; else the given answers stay, with the base's
    argmax as labels. prompt_tokens and samples_per_text: how texts are cut. max_new_tokens per answer.
    """

    kind: str = "embedded"
    path: str | None = None
    limit: int | None = None
    holdout: float = 0.1
    regenerate: bool = True
    prompt_tokens: list[int] = field(default_factory=lambda: [8, 140])
    samples_per_text: int = 4
    max_new_tokens: int = 192
    batch_size: int = 64

    def __post_init__(self) -> None:
        low_high = self.prompt_tokens
        if self.kind not in KINDS:
            raise ValueError(f"data.kind={self.kind!r} is unknown: choose one of {KINDS}")
        if self.kind != "embedded" and self.path is None:
            raise ValueError(f"data={self.kind} needs data.path=<file, glob or Hub name>")
        if len(low_high) != 2 or not 1 <= low_high[0] <= low_high[1]:
            raise ValueError(f"data.prompt_tokens={low_high}: give [shortest, longest], 1 or more")
        if not 0.0 < self.holdout < 0.9:
            raise ValueError(f"data.holdout={self.holdout} must lie between 0 and 0.9")
        if min(self.samples_per_text, self.max_new_tokens, self.batch_size, self.limit or 1) < 1:
            raise ValueError("data.samples_per_text, max_new_tokens, batch_size and limit must be at least 1")


def prepared_folder(base: Base, config: DataConfig, seed: int, cache: Path) -> Path:
    """Where data for this base and these options lies, prepared or not: the name is a hash of them all."""
    options = {k: v for k, v in asdict(config).items() if k not in ("path", "batch_size")}
    source = embedded.fingerprint() if config.path is None else source_hash(config.path)
    template = None if config.kind == "text" else base.tokenizer.chat_template
    identity = {name: digest for name, digest in base.identity.items() if name != "name"}
    key = [FORMAT, options, source, template, identity, seed]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return cache / f"data-{config.kind}-{digest}"


def prepare(base: Base, config: DataConfig, seed: int, cache: Path) -> Path:
    """The folder of prepared data, made when it is not there yet (long: the base writes every answer).

    Raises ValueError when the source holds nothing that can be used; used + rejected = read.
    """
    folder = prepared_folder(base, config, seed, cache)
    if read_manifest(folder) is not None:
        return folder
    with new_folder(folder) as fresh:
        _prepare_into(fresh, folder, base, config, seed)
    return folder


def _prepare_into(fresh: Path, folder: Path, base: Base, config: DataConfig, seed: int) -> None:
    rejects: list[dict[str, Any]] = []
    records = list(_records(config, rejects, seed))
    read = len(records) + len(rejects)
    train, dev, heldout = _split(records, config)
    parts = {"train": train, "dev": dev}
    splits = {name: list(_examples(base, config, part, rejects, seed, name)) for name, part in parts.items()}
    if len(splits["train"]) > 1 and not splits["dev"]:  # still one to choose the best head by
        splits["dev"].append(splits["train"].pop())
    write_jsonl(fresh / "rejects.jsonl", rejects)
    write_jsonl(fresh / "heldout.jsonl", _questions(config, heldout))
    counts = {name: _counted(examples) for name, examples in splits.items()}
    for name, count in counts.items():
        if not count["answer_tokens"]:
            first = f" (the first: {rejects[0]['reason']})" if rejects else ""
            kept = folder.with_name(f"{folder.name}-rejects.jsonl")
            write_jsonl(kept, rejects)
            raise ValueError(
                f"data.path={config.path}: of {read} rows none gave a {name} sequence; "
                f"{len(rejects)} rejected{first}; see {kept}"
            )
        save_corpus(fresh / f"{name}.safetensors", splits[name])
    account = {"read": read, "used": read - len(rejects), "rejected": len(rejects), "heldout": len(heldout)}
    manifest = {"base": base.identity, "options": asdict(config), **account, **counts}
    (fresh / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _counted(examples: list[Example]) -> dict[str, int]:
    return {
        "sequences": len(examples),
        "tokens": sum(len(example.ids) for example in examples),
        "answer_tokens": sum(int(sum(example.mask)) for example in examples),
    }


def _records(config: DataConfig, rejects: list[dict[str, Any]], seed: int) -> Iterator[Conversation | Text]:
    rows = read_rows(config.path) if config.path else embedded.conversations(config.limit or EMBEDDED_ROWS, seed)
    parse = text_of if config.kind == "text" else conversation_of
    for index, row in enumerate(rows):
        if config.limit is not None and index >= config.limit:
            return
        try:
            yield parse(row, index)
        except RowError as error:
            rejects.append({"row": index, "reason": str(error)})


def _split(records: list[Conversation | Text], config: DataConfig) -> tuple[list[Any], list[Any], list[Any]]:
    """train, dev and heldout, by a hash of the content: equal rows land together."""
    parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for record in records:
        content = record.text if isinstance(record, Text) else record.messages[0]["content"]
        draw = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64
        parts[1 if draw < config.holdout / 2 else 2 if draw < config.holdout else 0].append(record)
    return parts


def _questions(config: DataConfig, heldout: list[Any]) -> list[dict[str, Any]]:
    if config.kind == "embedded":
        return embedded.questions()
    if config.kind == "text":
        return [{"question_id": r.id, "category": "text", "text": r.text} for r in heldout]
    turns = [[m["content"] for m in r.messages if m["role"] == "user"] for r in heldout]
    return [{"question_id": r.id, "category": "chat", "turns": t[:2]} for r, t in zip(heldout, turns, strict=True)]


def _examples(
    base: Base, config: DataConfig, records: list[Any], rejects: list[dict[str, Any]], seed: int, split: str
) -> Iterator[Example]:
    if config.kind == "text":
        return _continuations(base, config, records, rejects, seed, split)
    warn_if_plain(base)
    if config.regenerate:
        return _rewritten(base, config, records, rejects, split)
    return _given(base, records, rejects, split)


def _reject(rejects: list[dict[str, Any]], record: Conversation | Text, reason: str) -> None:
    rejects.append({"row": record.id, "reason": reason})


def _continuations(
    base: Base, config: DataConfig, texts: list[Text], rejects: list[dict[str, Any]], seed: int, split: str
) -> Iterator[Example]:
    """Texts, cut somewhere and continued by the base."""
    low, high = config.prompt_tokens
    room = base.context_length - LEAST_ROOM
    if low > room:
        raise ValueError(f"data.prompt_tokens={config.prompt_tokens}: {base.name} takes {base.context_length} tokens")
    prompts: list[list[int]] = []
    for number, text in enumerate(texts):
        cuts = cut_prompts(base.tokenizer, text.text, (low, min(high, room)), config.samples_per_text, (seed, number))
        found = list(cuts)
        prompts += found
        if not found:
            _reject(rejects, text, f"fewer than {low} tokens")
    answers = continue_prompts(base, prompts, config.max_new_tokens, config.batch_size)
    bar = tqdm(answers, f"base continues {split} texts", len(prompts), unit="prompt", mininterval=1)
    for number, answer in bar:
        yield _own_words([*prompts[number], *answer], [0] * len(prompts[number]) + [1] * len(answer))


def _rewritten(
    base: Base,
    config: DataConfig,
    conversations: list[Conversation],
    rejects: list[dict[str, Any]],
    split: str,
) -> Iterator[Example]:
    """Every assistant turn rewritten by the base, in order, on top of its own earlier answers."""
    drafts = [_Rewrite(base, c) for c in conversations]
    total = sum(d.turns for d in drafts)
    with tqdm(total=total, desc=f"base answers {split} turns", unit="turn", mininterval=1) as bar:
        while active := [d for d in drafts if d.next_prompt()]:
            prompts = [d.prompt for d in active]
            for number, answer in continue_prompts(base, prompts, config.max_new_tokens, config.batch_size):
                active[number].answered(answer)
                bar.update()
        bar.update(total - bar.n)  # turns after a cut answer or the end of the context are not asked
    asked, answered = total, sum(d.answers for d in drafts)
    if answered < asked:
        print(f"{split}: {asked - answered} of {asked} turns not answered (an answer was cut, or the context ended)")
    for draft in drafts:
        if draft.mask:
            yield _own_words(draft.ids, draft.mask)
        else:
            _reject(rejects, draft.conversation, draft.reason)


class _Rewrite:
    """One conversation on its way: what has been said, as messages and as the very tokens."""

    def __init__(self, base: Base, conversation: Conversation) -> None:
        self.base, self.conversation = base, conversation
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.prompt: list[int] = []
        self._said: list[dict[str, str]] = []
        self._left = [m for m in conversation.messages if m["role"] != "assistant"]
        self.turns = sum(m["role"] == "user" for m in self._left)
        self.answers = 0
        self.reason = ""

    def next_prompt(self) -> bool:
        """Is there another turn to answer? A history that no longer tokenizes to itself ends here."""
        if not self._left:
            return False
        while self._left[0]["role"] == "system":
            self._said.append(self._left.pop(0))
        self._said.append(self._left.pop(0))
        try:
            self.prompt = prompt_ids(self.base.tokenizer, self._said)
        except RowError as error:
            return self._end(str(error))
        if len(self.prompt) + LEAST_ROOM > self.base.context_length:
            return self._end(f"turn {self.answers + 1} has {len(self.prompt)} tokens, more than the context holds")
        if self.prompt[: len(self.ids)] != self.ids:
            return self._end(f"the template rewrites what was said before turn {self.answers + 1}")
        return True

    def _end(self, reason: str) -> bool:
        self._left, self.reason = [], reason
        return False

    def answered(self, answer: list[int]) -> None:
        self.mask += [0] * (len(self.prompt) - len(self.ids)) + [1] * len(answer)
        self.ids = [*self.prompt, *answer]
        self.answers += 1
        if answer[-1] not in self.base.eos_ids:
            self._end(f"answer {self.answers} was cut")
        text = self.base.tokenizer.decode(answer, skip_special_tokens=True)
        self._said.append({"role": "assistant", "content": text})


def _given(
    base: Base, conversations: list[Conversation], rejects: list[dict[str, Any]], split: str
) -> Iterator[Example]:
    """The given answers, with what the base would have put at each position as labels."""
    for conversation in tqdm(conversations, f"base reads {split} answers", mininterval=1):
        if len(conversation.messages) < 2:
            _reject(rejects, conversation, "no answer to keep")
            continue
        try:
            ids, mask = render(base.tokenizer, conversation.messages)
        except RowError as error:
            _reject(rejects, conversation, str(error))
            continue
        if len(ids) > base.context_length:
            _reject(rejects, conversation, f"{len(ids)} tokens, more than the context holds")
            continue
        hidden = base.hidden(torch.tensor([ids], device=base.device))
        choice = base.logits(hidden[0]).argmax(dim=-1).tolist()
        yield Example(ids, mask, [ids[0], *choice[:-1]])


def _own_words(ids: list[int], mask: list[int]) -> Example:
    return Example(ids, mask, ids)
