"""results.json -> the tables of report.md and report.html, and those that end a command on the terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ctcdraft.model.draft.tree import SOURCES

from .results import Block, columns, figure_of, heads_at

DEPTHS = (1, 2, 3, 5, 8)
SETTING = ("decoder", "bench_options", "seed", "dtype", "device", "versions", "lossless")
BELIEFS = ("expected", "accepted")
FLIPS = ("positions", "near", "flips", "turns", "largest_gap")
DIVERGENCE = ("question", "turn", "position", "seed", "top2_gap", "other_gap", "bound", "shape_change")
PICTURES = ("By category", "Accepted by depth", "Calibration")  # sections with one, of that name
TEXTS = {  # before the table of a section
    "By category": "The last columns: share of steps that accept at least so many draft tokens.",
    "Accepted by depth": "Share of steps that accept at least so many draft tokens.",
    "Calibration": "Draft tokens per step; expected is the sum of psi.",
    "Divergences from plain decoding": "Where an output first differs: the gap between the base's best two logits, and "
    "between its best one and what was put out instead, in the shape of plain decoding (one row per forward); how far "
    "a logit moves in the shape of verification, without any draft. Rounding may close a gap of {rounding_bound}.",
    "Control": "Plain decoding's own tokens in the shape of verification, without any draft: at how many positions the "
    "best two lie within the bound (elsewhere a wrong token cannot pass for rounding), at how many the base's choice "
    "changes, in how many answers, at what gap; and in how many of all answers speculative decoding differs.",
}

Table = tuple[Sequence[Any], Sequence[Sequence[Any]]]  # header and rows; a float is a share


def markdown_table(header: Sequence[Any], rows: Iterable[Sequence[Any]], written: Callable[[Any], str] = str) -> str:
    """A Markdown table, columns padded so that it reads on a terminal too."""
    cells = [[written(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def figures(block: Block) -> dict[str, str]:
    """What every table and log says of a head at one temperature."""
    rate, same = block["tokens_per_second"], block["identical"]
    kept = block["speedup"]["ratio_of_means"] / block["tokens_per_step"]
    within = same["compared"] - same["identical"] - same["beyond_bound"]
    verdict = f"{same['identical']} of {same['compared']}"
    verdict += f", {within} differ within rounding" if within else ""
    verdict += f", {same['beyond_bound']} DIFFER" if same["beyond_bound"] else ""
    std = block["seeds"]["std"]
    apart = [f"{d['value']:+.2f} {_interval(d['ci95'])}" for d in (block["difference"] or {}).values()]
    return {
        "tokens per step (plain = 1.00)": _tau(block),
        "speedup over plain decoding": speedup_of(block),
        "std of both over seeds": f"{std['tokens_per_step']:.3f}, {std['speedup']:.3f}" if std else "-",
        "difference of both from the first": "; ".join(apart) or "-",
        "speedup / tokens per step": f"{kept:.2f}",
        "tokens in steps": f"{block['tokens']} in {block['steps']}",
        "draft nodes per step": f"{block['nodes_per_step']:.1f}",
        "accepted from head / lookup / both": " / ".join(f"{s:.0%}" for s in block["accepted_by_source"].values()),
        "tokens per second": f"{rate['speculative']:.0f} (plain {rate['vanilla']:.0f})",
        "transformers' generate": f"{rate['generate']:.0f}",
        "identical to plain decoding": verdict,
    }


def at_depths(shares: Sequence[float]) -> list[float]:
    """Those of `DEPTHS`, of shares by depth; 0 where no draft was accepted so far."""
    return [shares[depth - 1] if depth <= len(shares) else 0.0 for depth in DEPTHS]


def figure_rows(results: dict[str, Any]) -> list[Table]:
    """The figures: a table per temperature with a column per head, or one with a row per counted draft."""
    if "drafts" in results:
        return [draft_rows(results["drafts"])]
    found: list[Table] = []
    for temperature, heads in heads_at(results).items():
        several = [figures(block) for block in heads.values()]
        rows = [(name, *(one[name] for one in several)) for name in several[0]]
        found.append(((f"temperature {temperature:g}", *heads), [row for row in rows if {*row[1:]} != {"-"}]))
    return found


def draft_rows(drafts: Mapping[str, Block]) -> Table:
    """A row for each draft, of what `figures_of` gives of it."""
    rows = []
    for label, one in drafts.items():
        right = " ".join(f"{share:.2f}" for share in one["right_at_depth"])
        sources = " / ".join(f"{share:.0%}" for share in one["accepted_by_source"].values())
        rows.append((label, _tau(one), f"{one['expected']:.2f} / {one['accepted']:.2f}", right, sources))
    depths = ", ".join(map(str, DEPTHS))
    header = ("draft", "tokens per step", "psi / accepted", f"right at depth {depths}", " / ".join(SOURCES.values()))
    return header, rows


def heading(results: Mapping[str, Any]) -> str:
    """The benchmark, the heads and the base."""
    bench = f"{results['bench']}, counted" if "drafts" in results else results["bench"]
    return f"{bench}: {', '.join(results.get('heads') or [results['head']['kind']])} on {results['base']['name']}"


def summary(results: dict[str, Any]) -> str:
    """What the figures are of."""
    if "drafts" in results:
        return (
            f"{results['questions']} questions, N={results['decoder']['nodes']}, on {results['base']['name']}: drafts "
            "replayed along the base's own answers. Depths are over all positions, brackets 95% bootstrap intervals "
            "over questions."
        )
    first = next(iter(columns(results).values()))
    return (
        f"{first['questions']} questions at batch 1, plain and speculative interleaved in the same runner. "
        "transformers' own `generate` is greedy, on the first few questions. Brackets are 95% bootstrap intervals "
        "over questions; a difference is on the same resampled questions."
    )


def report(results: dict[str, Any]) -> str:
    """report.md: what was measured, on what, and the tables."""
    parts = [f"# {_escaped(heading(results))}", summary(results)]
    parts += [markdown_table(*table, _escaped) for table in figure_rows(results)]
    if "drafts" not in results:
        parts.append("![heads](heads.png)")
    for name, table in sections(results).items():
        parts += [f"## {name}", TEXTS.get(name, "").format_map(results), markdown_table(*table, _escaped)]
        if name in PICTURES:
            parts.append(f"![{name.lower()}]({name.lower().replace(' ', '_')}.png)")
    return "\n\n".join(filter(None, parts)) + "\n"


def sections(results: dict[str, Any]) -> dict[str, Table]:
    """The tables behind the figures, by what they show."""
    measured = ("measured", ""), [(key, _words(results[key])) for key in SETTING]
    if "drafts" in results:
        return {"Measured": measured}
    blocks = columns(results)
    first = next(iter(blocks.values()))
    categories = [
        (name, label, group["questions"], _tau(group), speedup_of(group), *at_depths(group["accepted_by_depth"]))
        for name in first["per_category"]
        for label, block in blocks.items()
        for group in [block["per_category"][name]]
    ]
    shares = zip_longest(*(block["accepted_by_depth"] for block in blocks.values()), fillvalue=0.0)
    beliefs = [(label, *(f"{b['calibration'][key]:.2f}" for key in BELIEFS)) for label, b in blocks.items()]
    timed = dict.fromkeys(part for block in blocks.values() for part in block["time_share"])
    times = [(label, *(f"{b['time_share'].get(part, 0.0):.1%}" for part in timed)) for label, b in blocks.items()]
    divergences, flips = [], []
    for label, block in blocks.items():
        same = block["identical"]
        for one in same["divergences"]:
            beyond = "" if one["within_bound"] else "BEYOND"
            divergences.append((label, *(_rounded(one[key]) for key in DIVERGENCE), beyond))
        if same["same_shape"]:
            counts = (_rounded(same["same_shape"][key]) for key in FLIPS)
            flips.append((label, *counts, len(same["divergences"]), same["compared"]))
    found: dict[str, Table] = {
        "Measured": measured,
        "By category": (("category", "", "questions", "tokens per step", "speedup", *DEPTHS), categories),
        "Accepted by depth": (("draft tokens", *blocks), [(depth, *row) for depth, row in enumerate(shares, 1)]),
        "Calibration": (("", *BELIEFS), beliefs),
        "Time": (("", *timed), times),
    }
    exceptions: dict[str, Table] = {
        "Divergences from plain decoding": (("", *DIVERGENCE, ""), divergences),
        "Control": (("", *FLIPS, "differ", "answers"), flips),
        "Cut short": (("question", "reason"), [(cut["question"], cut["reason"]) for cut in first["skipped"]]),
    }
    return found | {name: (header, rows) for name, (header, rows) in exceptions.items() if rows}


def _tau(block: Block) -> str:
    value, interval = figure_of(block, "tokens_per_step")
    return f"{value:.2f} {_interval(interval)}"


def speedup_of(block: Block) -> str:
    """With its interval, as tables have it."""
    value, interval = figure_of(block, "speedup")
    return f"{value:.2f}x {_interval(interval)}"


def _interval(bounds: Sequence[float]) -> str:
    return f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _words(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _rounded(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _escaped(value: Any) -> str:
    """A cell of report.md, where other people's names are neither a border nor HTML."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("<", "&lt;").replace("|", "\\|").split())
