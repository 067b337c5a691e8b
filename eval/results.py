"""Answers -> results.json: the figures of DESIGN-stable names, with bootstrap intervals over questions."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctcdraft.model.draft.tree import SOURCES

from .run import Answered

LOOKUP_ALONE = "prompt lookup alone"  # stands beside every head: it costs no training
RESAMPLES = 2000
BINS = 10
PARTS = ("verify", "draft", "tree")
TEMPERATURE, SEED, CATEGORY = (
    attrgetter(name) for name in ("setting.temperature", "setting.seed", "question.category")
)
COMPARED = (
    *("tokens_per_step", "tokens_per_step_ci95", "nodes_per_step", "tokens_per_second", "speedup", "seeds"),
    *("accepted_by_depth", "accepted_by_source"),
)
FIGURES: dict[str, Callable[[Answered], tuple[float, float]]] = {  # the sum of the one over questions, by the other's
    "tokens_per_step": lambda answered: (answered.grown, answered.steps),
    "speedup": lambda answered: (answered.tokens / answered.seconds, answered.tokens / answered.plain_seconds),
}


def measured(answers: Sequence[Answered], seed: int) -> dict[str, Any]:
    """The measured fields of results.json: those of the first temperature, and under `other_temperatures` the same
    fields of each other one."""
    blocks = [
        {"temperature": temperature, "seed": group[0].setting.seed, **aggregate(group, seed)}
        for temperature, group in grouped(answers, TEMPERATURE).items()
    ]
    return {**blocks[0], "other_temperatures": blocks[1:]}


def blocks_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of each temperature, the first one first."""
    return [results, *results["other_temperatures"]]


def heads_at(results: dict[str, Any]) -> dict[float, dict[str, Any]]:
    """Of any decoded results.json, by temperature: the figures of each head, or of one beside prompt lookup alone."""
    if "temperatures" in results:
        return {block["temperature"]: block["heads"] for block in results["temperatures"]}
    kind = results["head"]["kind"]
    return {
        block["temperature"]: {kind: block, LOOKUP_ALONE: block["prompt_lookup_alone"]} for block in blocks_of(results)
    }


def grouped(answers: Sequence[Answered], key: Callable[[Answered], Any]) -> dict[Any, list[Answered]]:
    groups = defaultdict(list)
    for answer in answers:
        groups[key(answer)].append(answer)
    return dict(groups)


def pooled(answers: Sequence[Answered]) -> list[Answered]:
    """One Answered per question, the turns of all its seeds: the bootstrap draws questions, and takes all their
    seeds."""
    return [
        replace(some[0], turns=[turn for a in some for turn in a.turns], skipped=max(a.skipped for a in some))
        for some in grouped(answers, lambda answer: id(answer.question)).values()
    ]


def aggregate(answers: Sequence[Answered], seed: int) -> dict[str, Any]:
    """The figures of one temperature, its seeds taken together, and under `seeds` each by itself (std: None of one);
    skipped questions are listed and count in none."""
    whole = pooled(answers)
    used = [a for a in whole if a.turns]
    turns = [turn for a in used for turn in a.turns]
    divergences = [turn.divergence for turn in turns if turn.divergence]
    flips = [asdict(turn.flips) for turn in turns if turn.flips]
    same_shape = None
    if flips:
        same_shape = {key: (max if key == "largest_gap" else sum)(one[key] for one in flips) for key in flips[0]}
    each: list[dict[str, Any]] = []
    for one, group in grouped([a for a in answers if a.turns], attrgetter("setting.seed")).items():
        each.append({"seed": one, **{name: float(ratio(figure(name, group))) for name in FIGURES}})
    std = {name: float(np.std([row[name] for row in each], ddof=1)) for name in FIGURES} if len(each) > 1 else None
    seconds = sum(turn.seconds for turn in turns)
    shares = {part: sum(turn.drafted.seconds.get(part, 0.0) for turn in turns) / seconds for part in PARTS}
    return {
        "questions": len(used),
        "skipped": [{"question": a.question.id, "reason": a.skipped} for a in whole if a.skipped],
        "tokens": sum(a.tokens for a in used),
        "steps": sum(a.steps for a in used),
        **rates(used, seed),
        "nodes_per_step": _mean(_per_step(used, "nodes")),
        "tokens_per_second": {
            "speculative": _mean([a.tokens / a.seconds for a in used]),
            "vanilla": _mean([a.tokens / a.plain_seconds for a in used]),
        },
        "seeds": {"each": each, "std": std},
        "identical": {
            "compared": len(turns),
            "identical": len(turns) - len(divergences),
            "beyond_bound": sum(not d.within_bound for d in divergences),
            "divergences": [{**asdict(d), "within_bound": d.within_bound} for d in divergences],
            "same_shape": same_shape,
        },
        "accepted_by_depth": shares_by_depth(_per_step(used, "accepted")),
        "accepted_by_source": accepted_by_source(used),
        "calibration": calibration(used),
        "time_share": {**shares, "other": 1 - sum(shares.values())},
        "per_category": {
            name: {"questions": len(group), **rates(group, seed)}
            for name, group in sorted(grouped(used, CATEGORY).items())
        },
    }


def figure(name: str, used: Sequence[Answered]) -> NDArray[np.float64]:
    """[2, question]: what `ratio` makes the figure of that name."""
    return np.array([FIGURES[name](answered) for answered in used], float).reshape(-1, 2).T


def ratio(figure_2Q: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of the one over questions, by that of the other; 1 where there is none of that. Of [2, ..., question]."""
    over, under = figure_2Q.sum(-1)
    return np.divide(over, under, out=np.ones_like(over), where=under != 0)


def estimate(seed: int, figure_2Q: NDArray[np.float64], less_2Q: NDArray[np.float64] | None = None) -> Any:
    """A figure of all questions, and its 95% percentile interval over resampled ones; or how far it is from that of
    another head, `less`, on the same questions."""
    count = figure_2Q.shape[-1]
    drawn_RQ = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    rows_RQ = np.vstack([np.arange(count), drawn_RQ])
    values_R = ratio(figure_2Q[:, rows_RQ])
    if less_2Q is not None:
        values_R -= ratio(less_2Q[:, rows_RQ])
    return float(values_R[0]), np.percentile(values_R[1:], [2.5, 97.5]).tolist()


def tokens_per_step(used: Sequence[Answered], seed: int) -> dict[str, Any]:
    value, interval = estimate(seed, figure("tokens_per_step", used))
    means = [a.grown / a.steps for a in used if a.steps]
    return {
        "tokens_per_step": value,
        "tokens_per_step_ci95": interval,
        "tokens_per_step_mean_over_questions": _mean(means),
    }


def rates(used: Sequence[Answered], seed: int) -> dict[str, Any]:
    """Tokens per step, and speedup: the mean over questions of tokens per second, by the same of plain decoding."""
    value, interval = estimate(seed, figure("speedup", used))
    return {**tokens_per_step(used, seed), "speedup": {"ratio_of_means": value, "ci95": interval}}


def difference(first: Sequence[Answered], other: Sequence[Answered], seed: int) -> dict[str, Any]:
    """other - first, with a paired bootstrap interval over questions."""
    a, b = ([answer for answer in pooled(side) if answer.turns] for side in (first, other))
    found = {name: estimate(seed, figure(name, b), figure(name, a)) for name in FIGURES}
    return {name: {"value": value, "ci95": interval} for name, (value, interval) in found.items()}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _per_step(used: Sequence[Answered], key: str) -> list[Any]:
    """`nodes`, `accepted` or `expected` of every step."""
    return [value for a in used for turn in a.turns for value in getattr(turn.drafted, key)]


def shares_by_depth(accepted: Sequence[int]) -> list[float]:
    """Share of drafts of which at least 1, 2, ... tokens were accepted."""
    counts = np.array(accepted, int)
    return [float((counts >= depth).mean()) for depth in range(1, counts.max(initial=0) + 1)]


def accepted_by_source(used: Sequence[Answered]) -> dict[str, float]:
    """Shares of the accepted draft tokens that the head alone, prompt lookup alone, and both proposed."""
    found = sum((turn.drafted.accepted_from for a in used for turn in a.turns), Counter[str]())
    return {source: found[source] / max(1, found.total()) for source in SOURCES.values()}


def calibration(used: Sequence[Answered]) -> dict[str, Any]:
    """Sum of psi over the tree (what the head expects) against accepted tokens, in bins of equal count."""
    expected, accepted = (np.array(_per_step(used, key), float) for key in ("expected", "accepted"))
    if len(expected) < 2:
        return {"expected": 0.0, "accepted": 0.0, "correlation": None, "bins": []}
    varied = expected.std() > 0 and accepted.std() > 0
    return {
        "expected": float(expected.mean()),
        "accepted": float(accepted.mean()),
        "correlation": float(np.corrcoef(expected, accepted)[0, 1]) if varied else None,
        "bins": [
            {"expected": float(expected[chunk].mean()), "accepted": float(accepted[chunk].mean()), "steps": len(chunk)}
            for chunk in np.array_split(np.argsort(expected), min(BINS, len(expected)))
        ],
    }


def compared(
    figures: Mapping[str, dict[str, Any]], answers: Mapping[str, Sequence[Answered]], seed: int
) -> list[dict[str, Any]]:
    """Per temperature: each head's figures, and its `difference` from the first head, with an interval over the same
    resampled questions for both (all heads answered the same ones)."""
    sides = {label: grouped(several, TEMPERATURE) for label, several in answers.items()}
    first, *others = figures
    found = []
    for place, (temperature, group) in enumerate(sides[first].items()):
        heads = {label: compact(blocks_of(results)[place]) for label, results in figures.items()}
        heads[first]["difference"] = None
        for label in others:
            heads[label]["difference"] = difference(group, sides[label][temperature], seed)
        found.append({"temperature": temperature, "heads": heads})
    return found


def compact(block: Mapping[str, Any]) -> dict[str, Any]:
    """What stands of one head beside others."""
    same = {key: block["identical"][key] for key in ("compared", "identical", "beyond_bound")}
    return {key: block[key] for key in COMPARED} | {"identical": same}
