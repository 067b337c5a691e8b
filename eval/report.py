"""results.json -> report.md, and the short table that ends a run on the terminal."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ctcdraft.eval.results import blocks_of


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, columns padded so that it reads on a terminal too."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def verdict(block: dict[str, Any]) -> str:
    """How many answers equal plain decoding's; the others as rounding may explain them, or not."""
    same = block["identical"]
    beyond = sum(not d["within_bound"] for d in same["divergences"])
    within = len(same["divergences"]) - beyond
    text = f"{same['identical']} of {same['compared']}"
    if within:
        text += f", {within} differ within rounding"
    if beyond:
        text += f", {beyond} DIFFER"
    return text


def headline(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of a run in a few rows (name, value)."""
    rate = results["tokens_per_second"]
    kept = results["speedup"]["ratio_of_means"] / results["tokens_per_step"]
    rows = [
        ("tokens per step", f"{_tau(results)} (plain = 1.00)"),
        ("draft nodes per step", f"{results['nodes_per_step']:.1f}"),
        ("speedup", f"{_speedup(results)} over plain decoding; {kept:.2f} of the tokens per step"),
        ("tokens per second", f"{rate['speculative']:.0f} (plain {rate['vanilla']:.0f})"),
        (_identity(results["temperature"]), verdict(results)),
    ]
    if sum(results["accepted_by_source"].values()):
        rows.append(("accepted tokens are from", _sources(results)))
    if "prompt_lookup_alone" in results:
        alone = results["prompt_lookup_alone"]
        value = f"{_tau(alone)} tokens per step, {_speedup(alone)}, identical: {verdict(alone)}"
        rows.append(("prompt lookup alone", value))
    for block in results["other_temperatures"]:
        value = f"{_tau(block)} tokens per step, {_speedup(block)}, identical: {verdict(block)}"
        rows.append((f"temperature {block['temperature']:g}", value))
    return rows


def _tau(block: dict[str, Any]) -> str:
    return f"{block['tokens_per_step']:.2f} {_interval(block['tokens_per_step_ci95'])}"


def _speedup(block: dict[str, Any]) -> str:
    return f"{block['speedup']['ratio_of_means']:.2f}x {_interval(block['speedup']['ci95'])}"


def _sources(block: dict[str, Any]) -> str:
    shares = {name: f"{share:.0%}" for name, share in block["accepted_by_source"].items()}
    return f"the head {shares['head']}, prompt lookup {shares['lookup']}, both {shares['both']}"


def _interval(bounds: Sequence[float]) -> str:
    return f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _identity(temperature: float) -> str:
    return f"identical to plain {'sampling' if temperature else 'greedy'}"


def report(results: dict[str, Any]) -> str:
    """report.md: what was measured, on what, and the tables."""
    head = results["head"]
    blocks = {f"temperature {block['temperature']:g}": block for block in blocks_of(results)}
    categories = [
        (name, label.split()[1], group["questions"], _tau(group), _speedup(group))
        for name in results["per_category"]
        for label, block in blocks.items()
        for group in [block["per_category"][name]]
    ]
    shares = [(label, *(f"{v:.1%}" for v in block["time_share"].values())) for label, block in blocks.items()]
    parts = [
        f"# {results['bench']}: `{head['kind']}` on {results['base']['name']}",
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
        *_exceptions(results),
    ]
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


def heads_table(block: dict[str, Any]) -> str:
    """The figures of each head at one temperature."""
    rows = head_rows(block)
    return markdown_table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def head_rows(block: dict[str, Any]) -> list[dict[str, str]]:
    """A row per head; differences are those from the first."""
    rows = []
    for label, head in block["heads"].items():
        same, apart = head["identical"], head["difference"]
        change = {k: f"{d['value']:+.2f} {_interval(d['ci95'])}" for k, d in apart.items()} if apart else {}
        row = {
            "head": label,
            "tokens per step": _tau(head),
            "tokens per step, difference": change.get("tokens_per_step", ""),
            "draft nodes per step": f"{head['nodes_per_step']:.1f}",
            "speedup": _speedup(head),
            "speedup, difference": change.get("speedup", ""),
            "identical to plain": f"{same['identical']} of {same['compared']}",
        }
        if same["beyond_bound"]:
            row["identical to plain"] += f", {same['beyond_bound']} DIFFER"
        rows.append(row)
    return rows


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


def _depths(blocks: dict[str, dict[str, Any]]) -> str:
    columns = zip_longest(*(block["accepted_by_depth"] for block in blocks.values()), fillvalue=0.0)
    rows = [(d, *(f"{value:.3f}" for value in values)) for d, values in enumerate(columns, 1)]
    return markdown_table(("draft tokens", *blocks), rows)


def _exceptions(results: dict[str, Any]) -> list[str]:
    parts = []
    found = [d for block in blocks_of(results) for d in block["identical"]["divergences"]]
    controls = [(block, flips) for block in blocks_of(results) if (flips := block["identical"]["same_shape"])]
    if found or controls:
        parts += [
            "## Divergences from plain decoding",
            "Where an output first differs from plain decoding's: the base's best two logits, its best one and what "
            "was put out instead, in the shape of plain decoding (one row per forward); how far a logit moves when "
            "plain decoding's own tokens go through the base in the shape of verification, without any draft; the gap "
            f"in float32. Rounding may close a gap of {results['rounding_bound']}.",
        ]
    if found:
        parts.append(markdown_table(DIVERGENCE, [_divergence(d) for d in found]))
    parts += [_control(block, flips) for block, flips in controls]
    if results["skipped"]:
        cut = [(s["question"], s["reason"]) for s in results["skipped"]]
        parts += ["## Cut short", markdown_table(("question", "reason"), cut)]
    return parts


DIVERGENCE = (
    *("question", "turn", "position", "temperature", "seed"),
    *("top-2 gap", "gap to the other", "bound", "", "moved by the shape", "gap in float32"),
)


def _divergence(d: dict[str, Any]) -> tuple[Any, ...]:
    numbers = [_gap(d[key]) for key in ("top2_gap", "other_gap", "bound")]
    mark = "" if d["within_bound"] else "BEYOND"
    where = (d["question"], d["turn"], d["position"], f"{d['temperature']:g}", d["seed"])
    return (*where, *numbers, mark, _gap(d["shape_change"]), _gap(d["float32_gap"]))


def _gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _control(block: dict[str, Any], flips: dict[str, Any]) -> str:
    same = block["identical"]
    return (
        f"Control at temperature {block['temperature']:g}: over plain decoding's own {flips['positions']} tokens the "
        f"shape alone changes the base's choice {flips['flips']} times, in {flips['turns']} of {same['compared']} "
        f"answers, at gaps up to {flips['largest_gap']:.2e}; speculative decoding differs in "
        f"{len(same['divergences'])}. The best two lie within the bound at {flips['near']} of the positions: elsewhere "
        "a wrong token cannot pass for rounding."
    )
