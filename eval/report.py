"""results.json -> report.md, and the short table that ends a command on the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ctcdraft.eval.results import beyond_bound, blocks_of
from ctcdraft.model.tree import SOURCES

Block = Mapping[str, Any]  # the figures of a head at one temperature
DEPTHS = (1, 2, 3, 5, 8)
DIVERGENCE = (
    *("question", "turn", "position", "temperature", "seed"),
    *("top-2 gap", "gap to the other", "bound", "", "moved by the shape", "gap in float32"),
)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, columns padded so that it reads on a terminal too."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


# -- figures as text ----------------------------------------------------------------------------------------


def verdict(block: Block) -> str:
    """How many answers equal plain decoding's; the others as rounding may explain them, or not."""
    same, beyond = block["identical"], beyond_bound(block)
    within = same["compared"] - same["identical"] - beyond
    text = f"{same['identical']} of {same['compared']}"
    return text + f", {within} differ within rounding" * (within > 0) + f", {beyond} DIFFER" * (beyond > 0)


def _tau(block: Block) -> str:
    return f"{block['tokens_per_step']:.2f} {_interval(block['tokens_per_step_ci95'])}"


def _speedup(block: Block) -> str:
    return f"{block['speedup']['ratio_of_means']:.2f}x {_interval(block['speedup']['ci95'])}"


def _interval(bounds: Sequence[float]) -> str:
    return f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _brief(block: Block) -> str:
    return f"{_tau(block)} tokens per step, {_speedup(block)}, identical: {verdict(block)}"


# -- tables -------------------------------------------------------------------------------------------------


def short_table(results: dict[str, Any], place: str) -> str:
    """What ends a command: the figures of any results.json, which lies in `place`."""
    title = f"on {results['base']['name']}, bench={results['bench']}"
    if "head" in results:
        header = f"{results['head']['kind']} {title}", ""
        return f"\n{markdown_table(header, [*headline(results), ('lies in', place)])}\n"
    tables = [count_table(results)] if "drafts" in results else []
    for block in results.get("temperatures", ()):
        tables.append(f"{title}, temperature {block['temperature']:g}:\n{heads_table(block)}")
    return "\n" + "\n\n".join([*tables, f"lies in {place}"]) + "\n"


def headline(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of a run in a few rows (name, value)."""
    rate, shares = results["tokens_per_second"], results["accepted_by_source"]
    kept = results["speedup"]["ratio_of_means"] / results["tokens_per_step"]
    rows = [
        ("tokens per step", f"{_tau(results)} (plain = 1.00)"),
        ("draft nodes per step", f"{results['nodes_per_step']:.1f}"),
        ("speedup", f"{_speedup(results)} over plain decoding; {kept:.2f} of the tokens per step"),
        ("tokens per second", f"{rate['speculative']:.0f} (plain {rate['vanilla']:.0f})"),
        (f"identical to plain {'sampling' if results['temperature'] else 'greedy'}", verdict(results)),
    ]
    if any(shares.values()):
        parts = f"the head {shares['head']:.0%}, prompt lookup {shares['lookup']:.0%}, both {shares['both']:.0%}"
        rows.append(("accepted tokens are from", parts))
    if "prompt_lookup_alone" in results:
        rows.append(("prompt lookup alone", _brief(results["prompt_lookup_alone"])))
    return rows + [(f"temperature {block['temperature']:g}", _brief(block)) for block in results["other_temperatures"]]


def heads_table(block: Block) -> str:
    """The figures of each head at one temperature."""
    rows = head_rows(block)
    return markdown_table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def head_rows(block: Block) -> list[dict[str, str]]:
    """A row per head; differences are those from the first."""
    rows = []
    for label, head in block["heads"].items():
        apart = (head["difference"] or {}).items()
        change = {name: f"{found['value']:+.2f} {_interval(found['ci95'])}" for name, found in apart}
        rows.append({
            "head": label,
            "tokens per step": _tau(head),
            "tokens per step, difference": change.get("tokens_per_step", ""),
            "draft nodes per step": f"{head['nodes_per_step']:.1f}",
            "speedup": _speedup(head),
            "speedup, difference": change.get("speedup", ""),
            "identical to plain": verdict(head),
        })  # fmt: skip
    return rows


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


def _depths(blocks: Mapping[str, Block]) -> str:
    columns = zip_longest(*(block["accepted_by_depth"] for block in blocks.values()), fillvalue=0.0)
    rows = [(d, *(f"{value:.3f}" for value in values)) for d, values in enumerate(columns, 1)]
    return markdown_table(("draft tokens", *blocks), rows)


# -- reports ------------------------------------------------------------------------------------------------


def report(results: dict[str, Any]) -> str:
    """report.md: what was measured, on what, and the tables."""
    blocks = {f"temperature {block['temperature']:g}": block for block in blocks_of(results)}
    categories = [
        (name, label.split()[1], group["questions"], _tau(group), _speedup(group))
        for name in results["per_category"]
        for label, block in blocks.items()
        for group in [block["per_category"][name]]
    ]
    shares = [(label, *(f"{v:.1%}" for v in block["time_share"].values())) for label, block in blocks.items()]
    parts = [
        f"# {results['bench']}: `{results['head']['kind']}` on {results['base']['name']}",
        markdown_table(("figure", "value"), headline(results)),
        f"{results['tokens']} tokens in {results['steps']} steps after each prompt's own forward. {_how(results)} "
        f"transformers' own `generate` made {results['tokens_per_second']['generate']:.0f} tokens/s, greedy, on the "
        "first few questions.",
        *_temperatures(results),
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
        *_divergences(results),
    ]
    if results["skipped"]:
        cut = [(s["question"], s["reason"]) for s in results["skipped"]]
        parts += ["## Cut short", markdown_table(("question", "reason"), cut)]
    return "\n\n".join(parts) + "\n"


def heads_report(comparison: dict[str, Any]) -> str:
    """report.md of several heads: their figures side by side, and what sets them apart from the first."""
    labels = list(comparison["heads"])
    parts = [f"# {comparison['bench']}: {', '.join(f'`{label}`' for label in labels)} on {comparison['base']['name']}"]
    for block in comparison["temperatures"]:
        parts += [f"## Temperature {block['temperature']:g}", heads_table(block)]
        parts += ["Share of steps that accept at least so many draft tokens:", _depths(block["heads"])]
    parts += [
        "![heads](heads.png)",
        f"{_how(comparison)} A difference is that from `{labels[0]}`, on the same resampled questions. Each head's own "
        "report: " + ", ".join(f"[{label}]({label}/report.md)" for label in labels) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _how(results: dict[str, Any]) -> str:
    decoder = results["decoder"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{results['questions']} questions; {decoder['kind']} of at most {decoder['nodes']} nodes "
        f"(draft.budget={decoder['budget']}), temperatures "
        f"{results['bench_options']['temperatures']}, first seed {results['seed']}, at most "
        f"{results['max_new_tokens']} new tokens. Measured at batch 1 in {results['dtype']} on {results['device']}, "
        "plain and speculative interleaved in the same runner; brackets are 95% bootstrap intervals over questions. "
        f"Lossless: {str(results['lossless']).lower()}. Versions: {versions}."
    )


def _temperatures(results: dict[str, Any]) -> list[str]:
    """A table of all temperatures, where there is more than a greedy one."""
    blocks = blocks_of(results)
    if len(blocks) == 1 and not results["seeds"]["std"]:
        return []
    rows = []
    for block in blocks:
        each, std = block["seeds"]["each"], block["seeds"]["std"]
        spread = f"{std['tokens_per_step']:.3f}, {std['speedup']:.3f}" if std else "-"
        seeds = ", ".join(str(row["seed"]) for row in each) if block["temperature"] else "-"
        rows.append((f"{block['temperature']:g}", seeds, _tau(block), _speedup(block), spread, verdict(block)))
    header = ("temperature", "seeds", "tokens per step", "speedup", "std of both over seeds", "identical to plain")
    return ["## By temperature", markdown_table(header, rows)]


def _divergences(results: dict[str, Any]) -> list[str]:
    """Where outputs differ from plain decoding's, and what the control makes of it."""
    blocks = blocks_of(results)
    found = [_divergence(d) for block in blocks for d in block["identical"]["divergences"]]
    controls = [_control(block) for block in blocks if block["identical"]["same_shape"]]
    if not found and not controls:
        return []
    return [
        "## Divergences from plain decoding",
        "Where an output first differs from plain decoding's: the base's best two logits, its best one and what "
        "was put out instead, in the shape of plain decoding (one row per forward); how far a logit moves when "
        "plain decoding's own tokens go through the base in the shape of verification, without any draft; the gap "
        f"in float32. Rounding may close a gap of {results['rounding_bound']}.",
        *([markdown_table(DIVERGENCE, found)] if found else []),
        *controls,
    ]


def _divergence(d: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("top2_gap", "other_gap", "bound", "shape_change", "float32_gap")
    gaps = ["-" if d[key] is None else f"{d[key]:.2e}" for key in keys]
    where = (d["question"], d["turn"], d["position"], f"{d['temperature']:g}", d["seed"])
    return (*where, *gaps[:3], "" if d["within_bound"] else "BEYOND", *gaps[3:])


def _control(block: Block) -> str:
    same, flips = block["identical"], block["identical"]["same_shape"]
    return (
        f"Control at temperature {block['temperature']:g}: over plain decoding's own {flips['positions']} tokens the "
        f"shape alone changes the base's choice {flips['flips']} times, in {flips['turns']} of {same['compared']} "
        f"answers, at gaps up to {flips['largest_gap']:.2e}; speculative decoding differs in "
        f"{len(same['divergences'])}. The best two lie within the bound at {flips['near']} of the positions: elsewhere "
        "a wrong token cannot pass for rounding."
    )
