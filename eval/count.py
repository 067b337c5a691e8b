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

from ctcdraft.data.store import Journal
from ctcdraft.eval.bench import Question
from ctcdraft.eval.evaluate import LOOKUP_ALONE, Measurement, heads_setting_of
from ctcdraft.eval.place import digest_of, put
from ctcdraft.eval.replay import Known, Replayed, replay
from ctcdraft.eval.report import markdown_table
from ctcdraft.eval.results import accepted_by_source, by_category, calibration, pooled, tokens_per_step
from ctcdraft.eval.run import Answered, Turn
from ctcdraft.model.base import Base
from ctcdraft.model.decoder import Decoder
from ctcdraft.model.generate import continued
from ctcdraft.model.tree import SOURCES

ROWS = 16  # answers that the base gives together
DEPTHS = (1, 2, 3, 5, 8)


def count_heads(
    measurement: Measurement, head_folders: Mapping[str, Path], folder: Path, cache: Path
) -> dict[str, Any]:
    """Count each head as the draft settings say (with a fixed number of nodes), without prompt lookup, and as a chain
    without it; and prompt lookup alone. results.json and report.md go into `folder`; `cache` keeps the base's answers.

    Raises ValueError as loading heads and questions does, and where a benchmark samples; nothing is written then.
    """
    base, bench, seed = measurement.base, measurement.bench, measurement.seed
    if bench.temperatures != [0.0]:
        raise ValueError(f"count=true counts greedy tokens: leave out bench.temperatures={bench.temperatures}")
    decoders = _decoders(_with_draft(measurement, budget="fixed"), head_folders)
    questions = measurement.questions()
    answers = own_answers(base, questions, bench.max_new_tokens, cache)
    found = replay(base, decoders, [known for turns in answers for known in turns])
    owners = [question for question, turns in zip(questions, answers, strict=True) for _ in turns]
    drafts = {label: figures_of(replayed, owners, seed) for label, replayed in found.items()}
    setting = counted_setting_of(measurement, head_folders)
    results = {"setting": digest_of(setting), **setting, "questions": len(questions), "drafts": drafts}

    def fill(fresh: Path) -> None:
        (fresh / "report.md").write_text(f"# Counted, not decoded\n\n{count_table(results)}\n")
        (fresh / "results.json").write_text(json.dumps(results, indent=2) + "\n")

    put(folder, fill)
    return results


def counted_setting_of(measurement: Measurement, head_folders: Mapping[str, Path]) -> dict[str, Any]:
    """The fields of results.json that say what is counted, and on what."""
    return {**heads_setting_of(_with_draft(measurement, budget="fixed"), head_folders), "counted": True}


def own_answers(base: Base, questions: Sequence[Question], most: int, cache: Path) -> list[list[Known]]:
    """The base's greedy answers to all turns of each question, at most so many tokens each; what is in `cache` is not
    asked again. A turn whose prompt fills the context, and those behind it, have none."""
    digest = hashlib.sha256(json.dumps([base.identity, str(base.dtype), most]).encode()).hexdigest()[:12]
    cache.mkdir(parents=True, exist_ok=True)
    answers: list[list[Known]] = [[] for _ in questions]
    dialogues = [question.prompts(base) for question in questions]
    work: deque[tuple[tuple[int, list[int]], list[int], float, str]] = deque()

    def ask(number: int, prompt: list[int]) -> None:
        if len(prompt) < base.context_length:
            work.append(((number, prompt), prompt, 0.0, ""))

    with (
        closing(Journal(cache / f"answers-{digest}.jsonl")) as journal,
        tqdm(total=sum(len(q.turns) or 1 for q in questions), desc="base answers", unit="turn", mininterval=1) as bar,
    ):
        for number, dialogue in enumerate(dialogues):
            ask(number, next(dialogue))
        sizes = {"max_new_tokens": most, "batch_size": ROWS, "seed": 0}
        for (number, prompt), answer in continued(base, work, 1.0, journal, **sizes):
            tokens = np.array([*prompt, *answer], np.int64)
            answers[number].append(Known(tokens, np.arange(len(tokens)) >= len(prompt)))
            bar.update()
            with suppress(StopIteration):
                ask(number, dialogues[number].send(answer))
    return answers


def count_table(results: Mapping[str, Any]) -> str:
    """What a terminal and report.md show."""
    rows = []
    for label, one in results["drafts"].items():
        low, high = one["tokens_per_step_ci95"]
        right = " ".join(f"{share:.2f}" for share in one["right_at_depth"])
        sources = " / ".join(f"{share:.0%}" for share in one["accepted_by_source"].values())
        calibration = f"{one['expected']:.2f} / {one['accepted']:.2f}"
        rows.append((label, f"{one['tokens_per_step']:.2f} [{low:.2f}, {high:.2f}]", calibration, right, sources))
    depths = ", ".join(map(str, DEPTHS))
    header = ("draft", "tokens per step", "psi / accepted", f"right at depth {depths}", " / ".join(SOURCES.values()))
    title = f"{results['questions']} questions, N={results['decoder']['nodes']}, on {results['base']['name']}"
    return f"{title}; depths are over all positions.\n\n{markdown_table(header, rows)}"


def _decoders(measurement: Measurement, head_folders: Mapping[str, Path]) -> dict[str, Decoder]:
    decoders: dict[str, Decoder] = {}
    bare = _with_draft(measurement, prompt_lookup=0).draft
    for name, folder in head_folders.items():
        decoders[name] = decoder = measurement.decoder(folder)
        if decoder.draft.prompt_lookup:
            decoders[f"{name}, no lookup"] = Decoder(decoder.base, decoder.head, bare)
        if decoder.draft.kind == "tree":
            decoders[f"{name}, no lookup, chain"] = Decoder(decoder.base, decoder.head, replace(bare, kind="chain"))
    return {**decoders, LOOKUP_ALONE: measurement.lookup_alone()}


def _with_draft(measurement: Measurement, **changes: Any) -> Measurement:
    return replace(measurement, draft=replace(measurement.draft, **changes))


def figures_of(replayed: Sequence[Replayed], owners: Sequence[Question], seed: int) -> dict[str, Any]:
    """Of one drafter along some sequences, each of which belongs to a question."""
    drafted = [[Turn(generation) for generation in one.generations] for one in replayed]
    used = pooled([Answered(question, turns=turns) for question, turns in zip(owners, drafted, strict=True)])
    accepted = np.array([draft.accepted for one in replayed for draft in one.drafts])
    beliefs = calibration(used)
    return {
        **tokens_per_step(used, seed),
        "steps": sum(answered.steps for answered in used),
        "expected": beliefs["expected"],
        "accepted": beliefs["accepted"],
        "right_at_depth": [float((accepted >= depth).mean()) if len(accepted) else 0.0 for depth in DEPTHS],
        "accepted_by_source": accepted_by_source(used),
        "per_category": {name: tokens_per_step(group, seed) for name, group in by_category(used).items()},
    }
