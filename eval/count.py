"""A benchmark counted instead of decoded: the base answers it once, alone, and drafts are replayed along its answers.

Greedy tokens per step do not depend on when a draft is made, so that one pass over the answers counts every head and
every way to draft with it. In float32 it is what decoding counts; in bfloat16 the base's answers, said in batches,
may be others than those it gives alone, where rounding decides.
"""

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ctcdraft.data.sources import RowError
from ctcdraft.data.store import Journal
from ctcdraft.model.base.llm import Base
from ctcdraft.model.base.sampling import Sampling
from ctcdraft.model.decode.decoder import Decoder
from ctcdraft.model.decode.generate import continued, work_key
from ctcdraft.model.decode.text import TextStream
from ctcdraft.model.export import load_head
from ctcdraft.model.replay import Replayed, Transcript, replay

from .bench import Question
from .evaluate import Evaluated, Measurement, existing, latest, write_results
from .report import at_depths
from .results import LOOKUP_ALONE, accepted_by_source, by_category, calibration, shares_by_depth, tokens_per_step
from .run import Turn

ROWS = 16  # answers that the base gives together


def count(measurement: Measurement, head_folders: Mapping[str, Path], folder: Path, cache: Path) -> Evaluated:
    """Count each head as the draft settings say (with a fixed number of nodes), without prompt lookup, and as a chain
    without it; and prompt lookup alone. results.json, report.md and report.html go into `folder`; `cache` keeps the
    base's answers.

    Raises ValueError as loading heads and questions does, where a benchmark samples, and where no question fits the
    context; nothing is written then.
    """
    draft = replace(measurement.draft, budget="fixed")
    measurement = replace(measurement, draft=draft)
    base, bench, seed = measurement.base, measurement.bench, measurement.seed
    if len(bench.temperatures) > 1:
        raise ValueError(f"count=true counts at one temperature: give one, not {bench.temperatures}")
    if option := draft.needs_decoding:
        raise ValueError(f"count=true does not decode, and {option} goes by what was decoded: leave out one of the two")
    setting = {**measurement.setting(head_folders), "counted": True}
    if before := existing(folder, setting):
        return before
    drafts, bare = {"": draft}, replace(draft, prompt_lookup=0)
    if draft.prompt_lookup:
        drafts[", no lookup"] = bare
    if draft.kind == "tree":
        drafts[", no lookup, chain"] = replace(bare, kind="chain")
    heads = {name: load_head(head_folder, base) for name, head_folder in head_folders.items()}
    decoders = {f"{name}{way}": Decoder(base, heads[name], drafts[way]) for name in heads for way in drafts}
    decoders[LOOKUP_ALONE] = measurement.lookup_alone()
    questions = measurement.questions()
    answers = own_answers(base, questions, bench.max_new_tokens, cache, bench.temperatures[0], seed)
    if not any(answers):
        raise ValueError("no question could be counted: each fills the context before it is answered")
    replayed = replay(base, decoders, [answer for turns in answers for answer in turns])
    owners = [question for question, turns in zip(questions, answers, strict=True) for _ in turns]
    found = {label: figures_of(several, owners, seed) for label, several in replayed.items()}
    with latest(folder) as fresh:
        figures = {"questions": sum(map(bool, answers)), "drafts": found}
        results = write_results(fresh, setting, figures, {}, base.tokenizer)
    return Evaluated(results, folder)


def own_answers(
    base: Base, questions: Sequence[Question], most: int, cache: Path, temperature: float = 0.0, seed: int = 0
) -> list[list[Transcript]]:
    """The base's answers to all turns of each question, at most so many tokens each; what is in `cache` is not
    asked again. A turn that cannot be asked, and those behind it, have none."""
    seed = seed if temperature else 0  # greedy answers have no noise
    digest = hashlib.sha256(json.dumps([base.identity, base.weights, str(base.dtype), most]).encode()).hexdigest()[:12]
    cache.mkdir(parents=True, exist_ok=True)
    read: list[list[Transcript]] = [[] for _ in questions]
    work: deque[tuple[tuple[int, list[int]], list[int], float, str]] = deque()

    def ask(number: int) -> None:
        if len(read[number]) < questions[number].asks:
            answers = [known.tokens[known.answered].tolist() for known in read[number]]
            with suppress(RowError):
                prompt = questions[number].prompt_after(base, answers)
                work.append(((number, prompt), prompt, temperature, ""))

    with (
        closing(Journal(cache / f"answers-{digest}.jsonl")) as journal,
        tqdm(total=sum(q.asks for q in questions), desc="base answers", unit="turn", mininterval=1) as bar,
    ):
        for number in range(len(questions)):
            ask(number)
        sizes = {"max_new_tokens": most, "batch_size": ROWS, "seed": seed}
        for (number, prompt), answer in continued(base, work, 1.0, journal, **sizes):
            text = TextStream(base.tokenizer, questions[number].stop, prompt)
            end = next((n for n, token in enumerate(answer, 1) if text.push(token)), len(answer))  # as decoding stops
            tokens = np.array([*prompt, *answer[:end]], np.int64)
            answered, (_, noise) = np.arange(len(tokens)) >= len(prompt), work_key(prompt, "", temperature, seed)
            read[number].append(Transcript(tokens, answered, Sampling(temperature), noise))
            bar.update()
            ask(number)
    return read


def figures_of(replayed: Sequence[Sequence[Replayed]], owners: Sequence[Question], seed: int) -> dict[str, Any]:
    """Of one drafter along the answers of some sequences, each of which belongs to a question."""
    turns = [
        Turn(question, drafted=answer.generation())
        for question, answers in zip(owners, replayed, strict=True)
        for answer in answers
    ]
    accepted = np.array([len(found) for answers in replayed for answer in answers for found in answer.sources])
    beliefs = calibration(turns)
    return {
        **tokens_per_step(turns, seed),
        "steps": sum(turn.drafted.steps for turn in turns),
        "expected": beliefs["expected"],
        "accepted": beliefs["accepted"],
        "right_at_depth": at_depths(shares_by_depth(accepted)),
        "accepted_by_source": accepted_by_source(turns),
        "per_category": {name: tokens_per_step(group, seed) for name, group in by_category(turns).items()},
    }
