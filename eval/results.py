"""Answers -> results.json: the figures of DESIGN-stable names, with bootstrap intervals over questions."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctcdraft.eval.run import Answered

RESAMPLES = 2000
PARTS = ("verify", "draft", "tree")


def aggregate(answers: Sequence[Answered], seed: int) -> dict[str, Any]:
    """The measured fields of results.json; skipped questions are listed, and count in no figure."""
    used = [a for a in answers if a.turns]
    divergences = [d for a in used for d in a.divergences]
    return {
        "questions": len(used),
        "skipped": [{"question": a.question.id, "reason": a.skipped} for a in answers if a.skipped],
        "tokens": sum(a.tokens for a in used),
        "steps": sum(a.steps for a in used),
        **_tokens_per_step(used, seed),
        "tokens_per_second": {
            "speculative": _mean([a.tokens / a.speculative_seconds for a in used]),
            "vanilla": _mean([a.tokens / a.plain_seconds for a in used]),
        },
        "speedup": _speedup(used, seed),
        "identical": {
            "compared": sum(a.turns for a in used),
            "identical": sum(a.turns for a in used) - len(divergences),
            "ties": [asdict(d) for d in divergences if d.is_tie],
            "divergences": [asdict(d) for d in divergences if not d.is_tie],
        },
        "accepted_by_depth": _accepted_by_depth(used),
        "calibration": _calibration(used),
        "time_share": _time_share(used),
        "per_category": _per_category(used, seed),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _ratio(answers: Sequence[Answered]) -> float:
    steps = sum(a.steps for a in answers)
    return sum(a.grown for a in answers) / steps if steps else 1.0


def _tokens_per_step(used: Sequence[Answered], seed: int) -> dict[str, Any]:
    grown = np.array([a.grown for a in used], float)
    steps = np.array([a.steps for a in used], float)
    low, high = _bootstrap(lambda i: grown[i].sum() / max(1.0, steps[i].sum()), len(used), seed)
    return {
        "tokens_per_step": _ratio(used),
        "tokens_per_step_ci95": [low, high],
        "tokens_per_step_mean_over_questions": _mean([a.grown / a.steps for a in used if a.steps]),
    }


def _speedup(used: Sequence[Answered], seed: int) -> dict[str, Any]:
    fast = np.array([a.tokens / a.speculative_seconds for a in used])
    plain = np.array([a.tokens / a.plain_seconds for a in used])
    interval = _bootstrap(lambda i: fast[i].mean() / plain[i].mean(), len(used), seed)
    return {"ratio_of_means": float(fast.mean() / plain.mean()), "ci95": list(interval)}


def _bootstrap(figure: Callable[[NDArray[np.int64]], float], count: int, seed: int) -> tuple[float, float]:
    """95% percentile interval of a figure over resampled questions."""
    rng = np.random.default_rng(seed)
    values = [figure(rng.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _accepted_by_depth(used: Sequence[Answered]) -> list[float]:
    """Share of steps in which at least 1, 2, ... draft tokens were accepted."""
    accepted = np.array([n for a in used for n in a.accepted])
    return [float((accepted >= d).mean()) for d in range(1, int(accepted.max(initial=0)) + 1)]


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
