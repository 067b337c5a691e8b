"""results.json -> report.md, and the short table that ends a run on the terminal."""

from collections.abc import Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, columns padded so that it reads on a terminal too."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def verdict(results: dict[str, Any]) -> str:
    """How many answers equal plain decoding's, ties and divergences apart."""
    same = results["identical"]
    text = f"{same['identical']} of {same['compared']}"
    if same["ties"]:
        text += f", {len(same['ties'])} differ at a tie"
    if same["divergences"]:
        text += f", {len(same['divergences'])} DIFFER"
    return text


def headline(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of a run in a few rows (name, value)."""
    low, high = results["speedup"]["ci95"]
    tau_low, tau_high = results["tokens_per_step_ci95"]
    rate = results["tokens_per_second"]
    return [
        (
            "tokens per step",
            f"{results['tokens_per_step']:.2f} [{tau_low:.2f}, {tau_high:.2f}] (plain = 1.00)",
        ),
        (
            "speedup",
            f"{results['speedup']['ratio_of_means']:.2f}x [{low:.2f}, {high:.2f}] over plain decoding",
        ),
        ("tokens per second", f"{rate['speculative']:.0f} (plain {rate['vanilla']:.0f})"),
        ("identical to plain greedy", verdict(results)),
    ]


def report(results: dict[str, Any]) -> str:
    """report.md: what was measured, on what, and the tables."""
    head, decoder, versions = results["head"], results["decoder"], results["versions"]
    share = results["time_share"]
    rate = results["tokens_per_second"]
    categories = [
        (
            name,
            group["questions"],
            f"{group['tokens_per_step']:.2f}",
            f"[{group['tokens_per_step_ci95'][0]:.2f}, {group['tokens_per_step_ci95'][1]:.2f}]",
            f"{group['speedup']['ratio_of_means']:.2f}",
        )
        for name, group in results["per_category"].items()
    ]
    depth = [(d, f"{value:.3f}") for d, value in enumerate(results["accepted_by_depth"], 1)]
    lines = [
        f"# {results['bench']}: `{head['kind']}` on {results['base']['name']}",
        "",
        markdown_table(("figure", "value"), headline(results)),
        "",
        f"{results['questions']} questions, {results['tokens']} tokens in {results['steps']} steps after each "
        f"prompt's own forward; {decoder['kind']} of {decoder['nodes']} nodes, temperature "
        f"{results['temperature']}, seed {results['seed']}, at most {results['max_new_tokens']} new tokens. "
        f"Measured at batch 1 on {results['device']}, plain and speculative interleaved in the same runner; "
        f"brackets are 95% bootstrap intervals over questions. transformers' own `generate` made "
        f"{rate['generate']:.0f} tokens/s on the first few of them.",
        "",
        f"Lossless: {str(results['lossless']).lower()}. Versions: "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "",
        "## By category",
        "",
        markdown_table(("category", "questions", "tokens per step", "95%", "speedup"), categories),
        "",
        "![by category](by_category.png)",
        "",
        "## Acceptance by depth",
        "",
        markdown_table(("draft tokens", "share of steps that accept at least so many"), depth),
        "",
        "![accepted by depth](accepted_by_depth.png)",
        "",
        "## Predicted and accepted",
        "",
        f"Draft tokens per step: predicted (sum of psi) {results['calibration']['expected']:.2f}, "
        f"accepted {results['calibration']['accepted']:.2f}.",
        "",
        "![calibration](calibration.png)",
        "",
        "## Time",
        "",
        markdown_table(tuple(share), [[f"{value:.1%}" for value in share.values()]]),
        "",
    ]
    return "\n".join(lines + _exceptions(results))


def _exceptions(results: dict[str, Any]) -> list[str]:
    lines = []
    for kind, title in (("divergences", "Divergences from plain decoding"), ("ties", "Ties")):
        found = results["identical"][kind]
        if found:
            rows = [(d["question"], d["turn"], d["position"], f"{d['top2_gap']:.2e}") for d in found]
            lines += [
                f"## {title}",
                "",
                markdown_table(("question", "turn", "position", "top-2 gap"), rows),
                "",
            ]
    if results["skipped"]:
        cut = [(s["question"], s["reason"]) for s in results["skipped"]]
        lines += ["## Cut short", "", markdown_table(("question", "reason"), cut), ""]
    return lines
