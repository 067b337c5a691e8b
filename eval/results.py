"""Answers -> results.json: the figures of DESIGN-stable names, with bootstrap intervals over questions."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctcdraft.eval.control import Flips
from ctcdraft.eval.run import Answered
from ctcdraft.model.tree import SOURCES

RESAMPLES = 2000
PARTS = ("verify", "draft", "tree")
Figure = Callable[[NDArray[np.int64]], float]  # of questions, by index


class Counts(Protocol):
    """Of a question: tokens behind the first of each answer, and steps."""

    @property
    def grown(self) -> int: ...
    @property
    def steps(self) -> int: ...


def measured(answers: Sequence[Answered], seed: int) -> dict[str, Any]:
    """The measured fields of results.json: those of the first temperature, and under `other_temperatures` the same
    fields of each other one."""
    blocks = [
        {"temperature": temperature, "seed": group[0].setting.seed, **aggregate(group, seed)}
        for temperature, group in by_temperature(answers).items()
    ]
    return {**blocks[0], "other_temperatures": blocks[1:]}


def blocks_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of each temperature, the first one first."""
    return [results, *results["other_temperatures"]]


def by_temperature(answers: Sequence[Answered]) -> dict[float, list[Answered]]:
    groups: dict[float, list[Answered]] = defaultdict(list)
    for answer in answers:
        groups[answer.setting.temperature].append(answer)
    return dict(groups)


def aggregate(answers: Sequence[Answered], seed: int) -> dict[str, Any]:
    """The figures of one temperature, its seeds taken together; skipped questions are listed and count in none."""
    whole = pooled(answers)
    used = [a for a in whole if a.turns]
    divergences = [d for a in used for d in a.divergences]
    return {
        "questions": len(used),
        "skipped": [{"question": a.question.id, "reason": a.skipped} for a in whole if a.skipped],
        "tokens": sum(a.tokens for a in used),
        "steps": sum(a.steps for a in used),
        **_tokens_per_step(used, seed),
        "nodes_per_step": _mean([n for a in used for n in a.nodes]),
        "tokens_per_second": {
            "speculative": _mean([a.tokens / a.speculative_seconds for a in used]),
            "vanilla": _mean([a.tokens / a.plain_seconds for a in used]),
        },
        "speedup": _speedup(used, seed),
        "seeds": _by_seed(answers),
        "identical": {
            "compared": sum(a.turns for a in used),
            "identical": sum(a.turns for a in used) - len(divergences),
            "divergences": [{**asdict(d), "within_bound": d.within_bound} for d in divergences],
            "same_shape": _same_shape(used),
        },
        "accepted_by_depth": _accepted_by_depth(used),
        "accepted_by_source": _accepted_by_source(used),
        "calibration": _calibration(used),
        "time_share": _time_share(used),
        "per_category": _per_category(used, seed),
    }


def pooled(answers: Sequence[Answered]) -> list[Answered]:
    """One Answered per question, its seeds added up: the bootstrap draws questions, and takes all their seeds."""
    groups: dict[int, Answered] = {}
    for a in answers:
        out = groups.setdefault(id(a.question), Answered(a.question, setting=a.setting))
        for key in ("turns", "tokens", "grown", "steps", "speculative_seconds", "plain_seconds"):
            setattr(out, key, getattr(out, key) + getattr(a, key))
        for key in ("nodes", "accepted", "expected", "texts", "divergences"):
            getattr(out, key).extend(getattr(a, key))
        out.accepted_from += a.accepted_from
        for part, seconds in a.seconds.items():
            out.seconds[part] += seconds
        out.skipped = out.skipped or a.skipped
        if a.flips:
            out.flips = out.flips or Flips()
            out.flips.add(a.flips)
    return list(groups.values())


def tokens_per_step_of(used: Sequence[Counts]) -> Figure:
    grown = np.array([a.grown for a in used], float)
    steps = np.array([a.steps for a in used], float)
    return lambda i: float(grown[i].sum() / steps[i].sum()) if steps[i].any() else 1.0


def speedup_of(used: Sequence[Answered]) -> Figure:
    """Mean over questions of tokens per second, divided by the same of plain decoding."""
    fast = np.array([a.tokens / a.speculative_seconds for a in used])
    plain = np.array([a.tokens / a.plain_seconds for a in used])
    return lambda i: float(fast[i].mean() / plain[i].mean())


def bootstrap(figure: Figure, count: int, seed: int) -> list[float]:
    """95% percentile interval of a figure over resampled questions."""
    rng = np.random.default_rng(seed)
    values = [figure(rng.integers(0, count, count)) for _ in range(RESAMPLES)]
    return [float(value) for value in np.percentile(values, [2.5, 97.5])]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _tokens_per_step(used: Sequence[Answered], seed: int) -> dict[str, Any]:
    figure = tokens_per_step_of(used)
    return {
        "tokens_per_step": figure(np.arange(len(used))),
        "tokens_per_step_ci95": bootstrap(figure, len(used), seed),
        "tokens_per_step_mean_over_questions": _mean([a.grown / a.steps for a in used if a.steps]),
    }


def _speedup(used: Sequence[Answered], seed: int) -> dict[str, Any]:
    figure = speedup_of(used)
    return {"ratio_of_means": figure(np.arange(len(used))), "ci95": bootstrap(figure, len(used), seed)}


def _by_seed(answers: Sequence[Answered]) -> dict[str, Any]:
    """Each seed by itself, and the standard deviation over seeds (None of one seed)."""
    rows: list[dict[str, Any]] = []
    for seed in dict.fromkeys(a.setting.seed for a in answers):
        used = [a for a in answers if a.setting.seed == seed and a.turns]
        if used:
            every = np.arange(len(used))
            rows.append(
                {
                    "seed": seed,
                    "tokens_per_step": tokens_per_step_of(used)(every),
                    "speedup": speedup_of(used)(every),
                }
            )
    keys = ("tokens_per_step", "speedup")
    std = {key: float(np.std([row[key] for row in rows], ddof=1)) for key in keys} if len(rows) > 1 else None
    return {"each": rows, "std": std}


def _same_shape(used: Sequence[Answered]) -> dict[str, Any] | None:
    whole = [a.flips for a in used if a.flips]
    found = Flips()
    for flips in whole:
        found.add(flips)
    return asdict(found) if whole else None


def _accepted_by_depth(used: Sequence[Answered]) -> list[float]:
    """Share of steps in which at least 1, 2, ... draft tokens were accepted."""
    accepted = np.array([n for a in used for n in a.accepted])
    return [float((accepted >= d).mean()) for d in range(1, int(accepted.max(initial=0)) + 1)]


def _accepted_by_source(used: Sequence[Answered]) -> dict[str, float]:
    """Shares of the accepted draft tokens that the head alone, prompt lookup alone, and both proposed."""
    found = sum((a.accepted_from for a in used), Counter[str]())
    return {source: found[source] / max(1, found.total()) for source in SOURCES.values()}


def _calibration(used: Sequence[Answered], bins: int = 10) -> dict[str, Any]:
    """Sum of psi over the tree (what the head expects) against accepted tokens, in bins of equal count."""
    expected = np.array([e for a in used for e in a.expected])
    accepted = np.array([n for a in used for n in a.accepted], float)
    if len(expected) < 2:
        return {"expected": 0.0, "accepted": 0.0, "correlation": None, "bins": []}
    chunks = np.array_split(np.argsort(expected), min(bins, len(expected)))
    varied = expected.std() > 0 and accepted.std() > 0
    return {
        "expected": float(expected.mean()),
        "accepted": float(accepted.mean()),
        "correlation": float(np.corrcoef(expected, accepted)[0, 1]) if varied else None,
        "bins": [
            {"expected": float(expected[c].mean()), "accepted": float(accepted[c].mean()), "steps": len(c)}
            for c in chunks
        ],
    }


def _time_share(used: Sequence[Answered]) -> dict[str, float]:
    whole = sum(a.seconds["whole"] for a in used)
    shares = {part: sum(a.seconds[part] for a in used) / whole for part in PARTS}
    return {**shares, "other": 1 - sum(shares.values())}


def _per_category(used: Sequence[Answered], seed: int) -> dict[str, Any]:
    groups: dict[str, list[Answered]] = defaultdict(list)
    for answer in used:
        groups[answer.question.category].append(answer)
    return {
        name: {
            "questions": len(group),
            **_tokens_per_step(group, seed),
            "speedup": _speedup(group, seed),
        }
        for name, group in sorted(groups.items())
    }
