"""results.json -> report.md, and the tables that end a command on the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ctcdraft.model.draft.tree import SOURCES

from .results import Block, figure_of, heads_at

DEPTHS = (1, 2, 3, 5, 8)
DIVERGENCE = (
    *("question", "turn", "position", "temperature", "seed"),
    *("top2_gap", "other_gap", "bound", "shape_change", "float32_gap"),
)


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
        "draft nodes per step": f"{block['nodes_per_step']:.1f}",
        "accepted from head / lookup / both": " / ".join(f"{s:.0%}" for s in block["accepted_by_source"].values()),
        "tokens per second": f"{rate['speculative']:.0f} (plain {rate['vanilla']:.0f})",
        "identical to plain decoding": verdict,
    }


def tables(results: dict[str, Any]) -> list[str]:
    """The figures of any decoded evaluation, heads side by side: a table per temperature."""
    found = []
    for temperature, heads in heads_at(results).items():
        columns = [figures(block) for block in heads.values()]
        rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
        shown = [row for row in rows if {*row[1:]} != {"-"}]
        found.append(markdown_table((f"temperature {temperature:g}", *heads), shown))
    return found


def count_table(results: Mapping[str, Any]) -> str:
    """Counted drafts, one row each."""
    title = f"{results['questions']} questions, N={results['decoder']['nodes']}, on {results['base']['name']}"
    return f"{title}; depths are over all positions.\n\n{drafts_table(results['drafts'])}"


def drafts_table(drafts: Mapping[str, Block]) -> str:
    """What `figures_of` gives of each draft."""
    rows = []
    for label, one in drafts.items():
        right = " ".join(f"{share:.2f}" for share in one["right_at_depth"])
        sources = " / ".join(f"{share:.0%}" for share in one["accepted_by_source"].values())
        rows.append((label, _tau(one), f"{one['expected']:.2f} / {one['accepted']:.2f}", right, sources))
    depths = ", ".join(map(str, DEPTHS))
    header = ("draft", "tokens per step", "psi / accepted", f"right at depth {depths}", " / ".join(SOURCES.values()))
    return markdown_table(header, rows)


def report(results: dict[str, Any]) -> str:
    """report.md: what was measured, on what, and the tables."""
    blocks = {
        f"temperature {temperature:g}": next(iter(heads.values())) for temperature, heads in heads_at(results).items()
    }
    categories = [
        (name, label.split()[1], group["questions"], _tau(group), _speedup(group))
        for name in results["per_category"]
        for label, block in blocks.items()
        for group in [block["per_category"][name]]
    ]
    shares = [(label, *(f"{v:.1%}" for v in block["time_share"].values())) for label, block in blocks.items()]
    parts = [
        f"# {results['bench']}: `{results['head']['kind']}` on {results['base']['name']}",
        *tables(results),
        f"{results['tokens']} tokens in {results['steps']} steps after each prompt's own forward. {_how(results)} "
        f"transformers' own `generate` made {results['tokens_per_second']['generate']:.0f} tokens/s, greedy, on the "
        "first few questions.",
        "## By category",
        markdown_table(("category", "temperature", "questions", "tokens per step", "speedup"), categories),
        "![by category](by_category.png)",
        "## Acceptance by depth",
        "Share of steps that accept at least so many draft tokens.",
        _depths(blocks),
        "![accepted by depth](accepted_by_depth.png)",
        "## Predicted and accepted",
        f"Draft tokens per step: predicted (sum of calibrated psi) {results['calibration']['expected']:.2f}, "
        f"accepted {results['calibration']['accepted']:.2f}.",
        "![calibration](calibration.png)",
        "## Time",
        markdown_table(("", *results["time_share"]), shares),
        *_divergences(blocks, results["rounding_bound"]),
    ]
    if results["skipped"]:
        cut = [(s["question"], s["reason"]) for s in results["skipped"]]
        parts += ["## Cut short", markdown_table(("question", "reason"), cut)]
    return "\n\n".join(parts) + "\n"


def heads_report(results: dict[str, Any]) -> str:
    """report.md of several heads: their figures side by side, and what sets them apart from the first."""
    labels = [f"`{label}`" for label in results["heads"]]
    parts = [
        f"# {results['bench']}: {', '.join(labels)} on {results['base']['name']}",
        *tables(results),
        "![heads](heads.png)",
        "Share of steps that accept at least so many draft tokens, at each temperature:",
        *map(_depths, heads_at(results).values()),
        f"{_how(results)} A difference is that from {labels[0]}, on the same resampled questions. Each head's own "
        "report: " + ", ".join(f"[{label}]({label}/report.md)" for label in results["heads"]) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _tau(block: Block) -> str:
    value, interval = figure_of(block, "tokens_per_step")
    return f"{value:.2f} {_interval(interval)}"


def _speedup(block: Block) -> str:
    value, interval = figure_of(block, "speedup")
    return f"{value:.2f}x {_interval(interval)}"


def _interval(bounds: Sequence[float]) -> str:
    return f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _depths(blocks: Mapping[str, Block]) -> str:
    columns = zip_longest(*(block["accepted_by_depth"] for block in blocks.values()), fillvalue=0.0)
    rows = [(d, *(f"{value:.3f}" for value in values)) for d, values in enumerate(columns, 1)]
    return markdown_table(("draft tokens", *blocks), rows)


def _how(results: dict[str, Any]) -> str:
    decoder, bench = results["decoder"], results["bench_options"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{results['questions']} questions; {decoder['kind']} of at most {decoder['nodes']} nodes "
        f"(draft.budget={decoder['budget']}), temperatures {bench['temperatures']}, first seed {results['seed']}, at "
        f"most {bench['max_new_tokens']} new tokens. Measured at batch 1 in {results['dtype']} on {results['device']}, "
        "plain and speculative interleaved in the same runner; brackets are 95% bootstrap intervals over questions. "
        f"Lossless: {str(results['lossless']).lower()}. Versions: {versions}."
    )


def _divergences(blocks: Mapping[str, Block], bound: str) -> list[str]:
    """Where outputs differ from plain decoding's, and what the control makes of it."""
    rows, controls = [], []
    for label, block in blocks.items():
        same, flips = block["identical"], block["identical"]["same_shape"]
        for found in same["divergences"]:
            cells = [f"{v:.3g}" if isinstance(v, float) else v for v in map(found.get, DIVERGENCE)]
            rows.append((*cells, "" if found["within_bound"] else "BEYOND"))
        if flips:
            controls.append(
                f"Control at {label}: over plain decoding's own {flips['positions']} tokens the shape alone changes "
                f"the base's choice {flips['flips']} times, in {flips['turns']} of {same['compared']} answers, at gaps "
                f"up to {flips['largest_gap']:.2e}; speculative decoding differs in {len(same['divergences'])}. The "
                f"best two lie within the bound at {flips['near']} of the positions: elsewhere a wrong token cannot "
                "pass for rounding."
            )
    if not rows and not controls:
        return []
    return [
        "## Divergences from plain decoding",
        "Where an output first differs from plain decoding's: the gap between the base's best two logits, and between "
        "its best one and what was put out instead, in the shape of plain decoding (one row per forward); how far a "
        "logit moves when plain decoding's own tokens go through the base in the shape of verification, without any "
        f"draft; the gap in float32. Rounding may close a gap of {bound}.",
        *([markdown_table((*DIVERGENCE, ""), rows)] if rows else []),
        *controls,
    ]
