"""Plain and speculative decoding of every question, interleaved, in the same runner, and compared.

As Spec-Bench measures: batch 1, each turn's own answer fed back, warm-ups, whole `generate` timed.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from ctcdraft.data.sources import RowError
from ctcdraft.model.base.llm import Base
from ctcdraft.model.decode.decoder import Decoder, Generation
from ctcdraft.model.draft.tree import Tree

from .bench import BenchConfig, Question, Setting
from .control import Control, Divergence, Flips

GENERATE_TURNS = 8
SHOWN = 8  # answers at most whose drafts are kept
Side = TypeVar("Side")


@dataclass(frozen=True)
class Turn:
    """A question's turn under one setting: the answer as drafted and as plain decoding gives it, with their times.

    divergence: None where the two are equal. compared: False where they need not be, since
    drafts that are sampled keep the distribution and not the tokens. flips: the control below float32, None above.
    skipped: why it was not decoded, nor those behind it.
    """

    question: Question
    setting: Setting = field(default_factory=Setting)
    number: int = 0
    drafted: Generation = field(default_factory=Generation)
    seconds: float = 0.0
    plain: Generation = field(default_factory=Generation)
    plain_seconds: float = 0.0
    compared: bool = True
    divergence: Divergence | None = None
    flips: Flips | None = None
    skipped: str = ""


def run(
    base: Base,
    heads: Mapping[str, Decoder],
    questions: Sequence[Question],
    config: BenchConfig,
    seed: int = 0,
    done: MutableMapping[str, str] | None = None,
) -> dict[str, list[Turn]]:
    """Decode every question plainly and with each of the heads, in each of the benchmark's settings, in
    `balanced_orders`. Per head its turns, question by question. The first answers of the first `SHOWN`
    categories keep their drafts. done: what a run that was cut off has decoded, which is not decoded again; this one
    adds to it.

    A turn that cannot be asked is skipped, and those behind it. Raises RowError when that leaves nothing.
    """
    sides: dict[str | None, Decoder] = {None: Decoder(base)}  # plain decoding
    sides.update(heads.items())
    control = Control(base, 1 + max(decoder.draft.most_nodes for decoder in heads.values()))
    for decoder in heads.values():
        decoder.prepare()
    for i in range(config.warmups):
        with suppress(RowError):
            prompt = questions[i % len(questions)].prompt_after(base)
            temperature = config.temperatures[i % len(config.temperatures)]
            for decoder in sides.values():
                decoder.generate(prompt, min(32, config.max_new_tokens), temperature=temperature)
    done = {} if done is None else done
    turns: dict[str, list[Turn]] = {label: [] for label in heads}
    orders = balanced_orders([*sides])
    shown = {question.category: i for i, question in reversed([*enumerate(questions)])}  # the first of each category
    shown_at = sorted(shown.values())[:SHOWN]
    work = list(product(enumerate(questions), enumerate(config.settings(seed))))
    for (i, question), (j, setting) in tqdm(work, "decoding", unit="question", mininterval=1):
        if f"{i} {j}" not in done:
            order, keep = orders[(i + j) % len(orders)], i in shown_at and j == 0
            decoded = _decoded(question, setting, {label: sides[label] for label in order}, control, config, keep)
            done[f"{i} {j}"] = json.dumps(decoded, default=_in_json, skipkeys=True)
        for label, rows in json.loads(done[f"{i} {j}"]).items():
            turns[label] += [_turn_of(row, question) for row in rows]
    if all(turn.skipped for several in turns.values() for turn in several):
        raise RowError(f"no question could be decoded: {next(iter(turns.values()))[-1].skipped}")
    return turns


def _decoded(
    question: Question,
    setting: Setting,
    sides: Mapping[str | None, Decoder],
    control: Control,
    config: BenchConfig,
    keep: bool,
) -> dict[str, list[Turn]]:
    """Per head its turns; sides: those of plain decoding (None) and of the heads, in the order in which each turn is
    decoded by them; keep: the drafts of the first answer, a reference per step, which takes no time."""
    turns: dict[str, list[Turn]] = {label: [] for label in sides if label is not None}
    before: list[list[int]] = []  # plain decoding's answers: every side gets its next turn on top of them
    for number in range(question.asks):
        try:
            prompt = question.prompt_after(control.base, before)
        except RowError as error:
            for several in turns.values():
                several.append(Turn(question, setting, number, skipped=str(error)))
            break
        timed = {
            label: _timed(side, prompt, question, setting, config.max_new_tokens, keep and number == 0)
            for label, side in sides.items()
        }
        plain, plain_seconds = timed[None]
        flips = control.flips(prompt, plain.tokens, setting) if control.below_float32 else None
        turn = Turn(question, setting, number, plain=plain, plain_seconds=plain_seconds, flips=flips)
        for label, several in turns.items():
            drafted, seconds = timed[label]
            equal = setting.temperature == 0 or sides[label].draft.proposal != "sampled"
            found = control.explain(prompt, plain.tokens, drafted.tokens, setting) if equal else None
            several.append(replace(turn, drafted=drafted, seconds=seconds, compared=equal, divergence=found))
        before.append(plain.tokens)
    return turns


def _in_json(part: Any) -> Any:
    return part.tolist() if isinstance(part, np.ndarray) else vars(part)


def _turn_of(row: dict[str, Any], question: Question) -> Turn:
    """A turn that was written as JSON, field by field."""
    for name in ("drafted", "plain"):
        trees = row[name]["trees"] and [(_tree_of(tree), path) for tree, path in row[name]["trees"]]
        row[name] = Generation(**row[name] | {"accepted_from": Counter(row[name]["accepted_from"]), "trees": trees})
    for name, kind in (("setting", Setting), ("divergence", Divergence), ("flips", Flips)):
        row[name] = row[name] and kind(**row[name])
    return Turn(**row | {"question": question})


def _tree_of(row: dict[str, Any]) -> Tree:
    kinds = {"tokens": np.int64, "parents": np.int64, "depths": np.int64, "psi": np.float32, "source": np.int8}
    arrays: dict[str, Any] = {name: np.array(row[name], kind) for name, kind in kinds.items()}
    return Tree(**arrays)


def balanced_orders(sides: Sequence[Side]) -> list[list[Side]]:
    """Orders in which each side stands equally often in every place and right behind every other (Williams 1949): what
    runs behind plain decoding, or behind another head, is a percent or two slower or faster for it.

    As many as there are sides; twice as many of an odd number.
    """
    count = len(sides)
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]
    orders = [[sides[(number + row) % count] for number in zigzag] for row in range(count)]
    return orders + [order[::-1] for order in orders] if count % 2 else orders


def generate_rate(base: Base, questions: Sequence[Question], config: BenchConfig) -> float:
    """Tokens per second of transformers' own `generate`, greedy, on the first few questions' first turns."""
    tokens, seconds = 0, 0.0
    prompts = []
    for question in questions[:GENERATE_TURNS]:
        with suppress(RowError):
            prompts.append(question.prompt_after(base))
    for number, prompt in enumerate(tqdm([*prompts[:1], *prompts], "transformers' generate", unit="answer")):
        ids, room = torch.tensor([prompt], device=base.device), base.context_length - len(prompt)
        start = time.perf_counter()
        out = base.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(config.max_new_tokens, room), do_sample=False
        )
        if number:  # the very first is a warm-up
            seconds += time.perf_counter() - start
            tokens += out.shape[1] - len(prompt)
    return tokens / seconds if seconds else 0.0


def _timed(
    decoder: Decoder, prompt: list[int], question: Question, setting: Setting, max_new_tokens: int, keep_trees: bool
) -> tuple[Generation, float]:
    synchronize = torch.cuda.synchronize if decoder.base.device.type == "cuda" else bool
    synchronize()
    start = time.perf_counter()
    generation = decoder.generate(prompt, max_new_tokens, **asdict(setting), stop=question.stop, keep_trees=keep_trees)
    synchronize()
    return generation, time.perf_counter() - start
