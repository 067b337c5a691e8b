"""Turns -> the figures of results.json, with bootstrap intervals over questions.

Shape suffixes: Q questions, R resamples.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctcdraft.model.draft.tree import SOURCES

from .run import Turn

LOOKUP_ALONE = "prompt lookup alone"  # stands beside every head: it costs no training
RESAMPLES = 2000
BINS = 10
PARTS = ("verify", "draft", "tree")
Array = NDArray[np.float64]
Block = Mapping[str, Any]  # the figures of a head at one temperature


def measured(turns: Mapping[str, Sequence[Turn]], seed: int) -> dict[float, dict[str, Block]]:
    """By temperature: each head's figures, and its `difference` from the first head, with an interval over the same
    resampled questions for both (all heads answered the same ones)."""
    groups = {label: grouped(several, lambda turn: turn.setting.temperature) for label, several in turns.items()}
    first = next(iter(groups))
    found: dict[float, dict[str, Block]] = defaultdict(dict)
    for label, by_temperature in groups.items():
        for temperature, group in by_temperature.items():
            apart = difference(groups[first][temperature], group, seed) if label != first else None
            where = {"temperature": temperature, "seed": group[0].setting.seed}
            found[temperature][label] = {**where, **aggregate(group, seed), "difference": apart}
    return found


def of_one_head(found: Mapping[float, Mapping[str, Block]]) -> dict[str, Any]:
    """The measured fields of results.json: those of the first temperature, and under `other_temperatures` the same
    fields of each other one."""
    first, *others = [{**heads[""], "prompt_lookup_alone": heads[LOOKUP_ALONE]} for heads in found.values()]
    return {**first, "other_temperatures": others}


def heads_at(results: dict[str, Any]) -> dict[float, dict[str, Block]]:
    """Of any decoded results.json, by temperature: the figures of each head, or of one beside prompt lookup alone."""
    if "drafts" in results:  # counted
        return {}
    if "temperatures" in results:
        return {block["temperature"]: block["heads"] for block in results["temperatures"]}
    kind = results["head"]["kind"]
    blocks = [results, *results["other_temperatures"]]
    return {block["temperature"]: {kind: block, LOOKUP_ALONE: block["prompt_lookup_alone"]} for block in blocks}


def columns(results: dict[str, Any]) -> dict[str, Block]:
    """The figures of each head at each temperature, by what tells them apart."""
    found = heads_at(results).items()
    return {f"{label}, temperature {t:g}": block for t, heads in found for label, block in heads.items()}


def figure_of(block: Block, name: str) -> tuple[float, Sequence[float]]:
    """`tokens_per_step` or `speedup`, and its interval."""
    if name == "speedup":
        return block["speedup"]["ratio_of_means"], block["speedup"]["ci95"]
    return block["tokens_per_step"], block["tokens_per_step_ci95"]


def aggregate(turns: Sequence[Turn], seed: int) -> dict[str, Any]:
    """The figures of one temperature, its seeds taken together, and under `seeds` each by itself (std: None of one);
    skipped turns are listed and count in none."""
    skipped = {turn.question: turn.skipped for turn in turns if turn.skipped}
    turns = [turn for turn in turns if not turn.skipped]
    each = [
        {"seed": own, **{name: float(ratio(per_question(group, name))) for name in FIGURES}}
        for own, group in grouped(turns, lambda turn: turn.setting.seed).items()
    ]
    std = {name: float(np.std([row[name] for row in each], ddof=1)) for name in FIGURES} if len(each) > 1 else None
    divergences = [
        {"question": turn.question.id, "turn": turn.number, **asdict(turn.setting), **asdict(turn.divergence)}
        for turn in turns
        if turn.divergence
    ]
    flips = [asdict(turn.flips) for turn in turns if turn.flips]
    same_shape = None
    if flips:
        same_shape = {key: (max if key == "largest_gap" else sum)(one[key] for one in flips) for key in flips[0]}
    seconds = sum(turn.seconds for turn in turns)
    parts = [*PARTS, *(["learn"] if any("learn" in turn.drafted.seconds for turn in turns) else [])]
    shares = {part: sum(turn.drafted.seconds.get(part, 0.0) for turn in turns) / seconds for part in parts}
    steps = sum(turn.drafted.steps for turn in turns)
    return {
        "skipped": [{"question": question.id, "reason": reason} for question, reason in skipped.items()],
        "tokens": sum(len(turn.drafted.tokens) for turn in turns),
        "steps": steps,
        **rates(turns, seed),
        "nodes_per_step": float(of_steps(turns, "nodes").sum()) / max(1, steps),
        "seeds": {"each": each, "std": std},
        "identical": {
            "compared": sum(turn.compared for turn in turns),
            "identical": sum(turn.compared for turn in turns) - len(divergences),
            "beyond_bound": sum(not found["within_bound"] for found in divergences),
            "divergences": divergences,
            "same_shape": same_shape,
        },
        "accepted_by_depth": shares_by_depth(of_steps(turns, "accepted")),
        "accepted_by_source": accepted_by_source(turns),
        "calibration": calibration(turns),
        "time_share": {**shares, "other": 1 - sum(shares.values())},
        "per_category": {
            name: {**rates(group, seed), "accepted_by_depth": shares_by_depth(of_steps(group, "accepted"))}
            for name, group in by_category(turns).items()
        },
    }


def grouped(turns: Sequence[Turn], key: Callable[[Turn], Any]) -> dict[Any, list[Turn]]:
    groups = defaultdict(list)
    for turn in turns:
        groups[key(turn)].append(turn)
    return dict(groups)


def by_category(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    return dict(sorted(grouped(turns, lambda turn: turn.question.category).items()))


def growth(turns: Sequence[Turn]) -> tuple[int, int]:
    """Tokens behind the first of each answer, which the prompt gives, and the steps that they took."""
    return sum(len(turn.drafted.tokens) - 1 for turn in turns), sum(turn.drafted.steps for turn in turns)


def speeds(turns: Sequence[Turn]) -> tuple[float, float]:
    """Tokens per second, and plain decoding's."""
    tokens = sum(len(turn.drafted.tokens) for turn in turns)
    plain_tokens = sum(len(turn.plain.tokens) for turn in turns)
    return tokens / sum(turn.seconds for turn in turns), plain_tokens / sum(turn.plain_seconds for turn in turns)


FIGURES = {"tokens_per_step": growth, "speedup": speeds}


def per_question(turns: Sequence[Turn], name: str) -> Array:
    """[2, Q]: what the figure of that name is the `ratio` of; a question counts with the turns of all its seeds."""
    decoded = [turn for turn in turns if not turn.skipped]
    found = [FIGURES[name](group) for group in grouped(decoded, lambda turn: id(turn.question)).values()]
    return np.array(found, float).reshape(-1, 2).T


def ratio(figure_2Q: Array) -> Array:
    """The sum of the one over questions, by that of the other; 1 where there is none of that. Of [2, ..., Q]."""
    over, under = figure_2Q.sum(-1)
    return np.divide(over, under, out=np.ones_like(over), where=under != 0)


def estimate(seed: int, figure_2Q: Array, less_2Q: Array | None = None) -> tuple[float, list[float]]:
    """A figure of all questions, and its 95% percentile interval over resampled ones; or how far it is from that of
    another head, `less`, on the same questions."""
    count = figure_2Q.shape[-1]
    drawn_RQ = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    rows_RQ = np.vstack([np.arange(count), drawn_RQ])
    values_R = ratio(figure_2Q[:, rows_RQ])
    if less_2Q is not None:
        values_R -= ratio(less_2Q[:, rows_RQ])
    return float(values_R[0]), np.percentile(values_R[1:], [2.5, 97.5]).tolist()


def tokens_per_step(turns: Sequence[Turn], seed: int) -> dict[str, Any]:
    value, interval = estimate(seed, per_question(turns, "tokens_per_step"))
    return {"tokens_per_step": value, "tokens_per_step_ci95": interval}


def rates(turns: Sequence[Turn], seed: int) -> dict[str, Any]:
    """Tokens per step, and speedup: the mean over questions of tokens per second, by the same of plain decoding."""
    speeds_2Q = per_question(turns, "speedup")
    value, interval = estimate(seed, speeds_2Q)
    return {
        "questions": speeds_2Q.shape[1],
        **tokens_per_step(turns, seed),
        "tokens_per_second": {"speculative": float(speeds_2Q[0].mean()), "vanilla": float(speeds_2Q[1].mean())},
        "speedup": {"ratio_of_means": value, "ci95": interval},
    }


def difference(first: Sequence[Turn], other: Sequence[Turn], seed: int) -> dict[str, Any]:
    """other - first, with a paired bootstrap interval over questions."""
    found = {name: estimate(seed, per_question(other, name), per_question(first, name)) for name in FIGURES}
    return {name: {"value": value, "ci95": interval} for name, (value, interval) in found.items()}


def of_steps(turns: Sequence[Turn], name: str) -> Array:
    """`nodes`, `accepted` or `expected` of every step."""
    return np.array([value for turn in turns for value in getattr(turn.drafted, name)], float)


def shares_by_depth(accepted: Array) -> list[float]:
    """Share of drafts of which at least 1, 2, ... tokens were accepted."""
    return [float((accepted >= depth).mean()) for depth in range(1, int(accepted.max(initial=0)) + 1)]


def accepted_by_source(turns: Sequence[Turn]) -> dict[str, float]:
    """Shares of the accepted draft tokens that the head alone, prompt lookup alone, and both proposed."""
    found = sum((turn.drafted.accepted_from for turn in turns), Counter[str]())
    return {source: found[source] / max(1, found.total()) for source in SOURCES.values()}


def calibration(turns: Sequence[Turn]) -> dict[str, Any]:
    """Sum of psi over the tree (what the head expects) against accepted tokens, in bins of equal count."""
    expected, accepted = of_steps(turns, "expected"), of_steps(turns, "accepted")
    if not len(expected):
        return {"expected": 0.0, "accepted": 0.0, "bins": []}
    chunks = np.array_split(np.argsort(expected), min(BINS, len(expected)))
    return {
        "expected": float(expected.mean()),
        "accepted": float(accepted.mean()),
        "bins": [
            {"expected": float(expected[chunk].mean()), "accepted": float(accepted[chunk].mean()), "steps": len(chunk)}
            for chunk in chunks
        ],
    }
