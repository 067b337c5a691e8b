"""results.json -> report.md, and the tables that end a command on the terminal."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ctcdraft.model.draft.tree import SOURCES

from .results import Block, columns, figure_of, heads_at

DEPTHS = (1, 2, 3, 5, 8)
SETTING = ("decoder", "bench_options", "seed", "dtype", "device", "versions", "lossless")
BELIEFS = ("expected", "accepted")
FLIPS = ("positions", "near", "flips", "turns", "largest_gap")
DIVERGENCE = (
    *("question", "turn", "position", "seed"),
    *("top2_gap", "other_gap", "bound", "shape_change", "float32_gap"),
)

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # header and rows


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, columns padded so that it reads on a terminal too."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
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
        "speedup over plain decoding": _speedup(block),
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


def tables(results: dict[str, Any]) -> list[str]:
    """The figures of any evaluation, heads side by side: a table per temperature, or of counted drafts."""
    found = [count_table(results)] if "drafts" in results else []
    return found + [markdown_table(header, rows) for header, rows in figure_rows(results)]


def figure_rows(results: dict[str, Any]) -> Iterator[Table]:
    """The figures of a decoded evaluation by temperature, a column per head."""
    for temperature, heads in heads_at(results).items():
        several = [figures(block) for block in heads.values()]
        rows = [(name, *(one[name] for one in several)) for name in several[0]]
        yield (f"temperature {temperature:g}", *heads), [row for row in rows if {*row[1:]} != {"-"}]


def count_table(results: Mapping[str, Any]) -> str:
    """Counted drafts, one row each."""
    title = f"{results['questions']} questions, N={results['decoder']['nodes']}, on {results['base']['name']}"
    return f"{title}; depths are over all positions.\n\n{markdown_table(*draft_rows(results['drafts']))}"


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


def setting_rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured, and on what."""
    return [(key, _words(results[key])) for key in SETTING]


def report(results: dict[str, Any]) -> str:
    """report.md: what was measured, on what, and the tables."""
    blocks = columns(results)
    first = next(iter(blocks.values()))
    heads = ", ".join(f"`{label}`" for label in results.get("heads") or [results["head"]["kind"]])
    categories = [
        (_escaped(name), label, group["questions"], _tau(group), _speedup(group))
        for name in first["per_category"]
        for label, block in blocks.items()
        for group in [block["per_category"][name]]
    ]
    depths = zip_longest(*(block["accepted_by_depth"] for block in blocks.values()), fillvalue=0.0)
    beliefs = [(label, *(f"{b['calibration'][key]:.2f}" for key in BELIEFS)) for label, b in blocks.items()]
    timed = dict.fromkeys(part for block in blocks.values() for part in block["time_share"])
    shares = [(label, *(f"{b['time_share'].get(part, 0.0):.1%}" for part in timed)) for label, b in blocks.items()]
    parts = [
        f"# {results['bench']}: {heads} on {results['base']['name']}",
        *tables(results),
        "![heads](heads.png)",
        f"{first['questions']} questions at batch 1, plain and speculative interleaved in the same runner. "
        "transformers' own `generate` is greedy, on the first few questions. Brackets are 95% bootstrap intervals "
        "over questions; a difference is on the same resampled questions.",
        markdown_table(("measured", ""), setting_rows(results)),
        "## By category",
        markdown_table(("category", "", "questions", "tokens per step", "speedup"), categories),
        "![by category](by_category.png)",
        "## Acceptance by depth",
        "Share of steps that accept at least so many draft tokens.",
        markdown_table(("draft tokens", *blocks), [(d, *(f"{v:.3f}" for v in row)) for d, row in enumerate(depths, 1)]),
        "![accepted by depth](accepted_by_depth.png)",
        "## Expected and accepted",
        "Draft tokens per step; expected is the sum of calibrated psi.",
        markdown_table(("", *BELIEFS), beliefs),
        "![calibration](calibration.png)",
        "## Time",
        markdown_table(("", *timed), shares),
        *_divergences(blocks, results["rounding_bound"]),
    ]
    if first["skipped"]:
        cut = [(_escaped(s["question"]), _escaped(s["reason"])) for s in first["skipped"]]
        parts += ["## Cut short", markdown_table(("question", "reason"), cut)]
    return "\n\n".join(parts) + "\n"


def _tau(block: Block) -> str:
    value, interval = figure_of(block, "tokens_per_step")
    return f"{value:.2f} {_interval(interval)}"


def _speedup(block: Block) -> str:
    value, interval = figure_of(block, "speedup")
    return f"{value:.2f}x {_interval(interval)}"


def _interval(bounds: Sequence[float]) -> str:
    return f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _words(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _escaped(name: str) -> str:
    """A name of other people's as the cell of a Markdown table, where it is neither a border nor HTML."""
    return " ".join(name.replace("<", "&lt;").replace("|", "\\|").split())


def _divergences(blocks: Mapping[str, Block], bound: str) -> list[str]:
    """Where outputs differ from plain decoding's, and what the control makes of it."""
    divergences, flips = [], []
    for label, block in blocks.items():
        same = block["identical"]
        for found in same["divergences"]:
            beyond = "" if found["within_bound"] else "BEYOND"
            divergences.append((label, *(_escaped(_cell(found[key])) for key in DIVERGENCE), beyond))
        if same["same_shape"]:
            cells = (_cell(same["same_shape"][key]) for key in FLIPS)
            flips.append((label, *cells, len(same["divergences"]), same["compared"]))
    parts = []
    if divergences:
        parts += [
            "## Divergences from plain decoding",
            "Where an output first differs: the gap between the base's best two logits, and between its best one and "
            "what was put out instead, in the shape of plain decoding (one row per forward); how far a logit moves in "
            f"the shape of verification, without any draft; the gap in float32. Rounding may close a gap of {bound}.",
            markdown_table(("", *DIVERGENCE, ""), divergences),
        ]
    if flips:
        parts += [
            "## Control",
            "Plain decoding's own tokens in the shape of verification, without any draft: at how many positions the "
            "best two lie within the bound (elsewhere a wrong token cannot pass for rounding), at how many the base's "
            "choice changes, in how many answers, at what gap; and in how many of all answers speculative decoding "
            "differs.",
            markdown_table(("", *FLIPS, "differ", "answers"), flips),
        ]
    return parts
