"""The three pictures of an evaluation, and the one of several heads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ctcdraft.eval.results import blocks_of

INK, ACCENT = "#30343b", "#2f6db5"
SERIES = (ACCENT, "#e08a3c", "#5a9e6f", "#a05195", "#8a8f98")


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write acceptance by depth, tokens per step by category, and predicted against accepted; their paths."""
    return [
        _by_depth(results, folder / "accepted_by_depth.png"),
        _by_category(results, folder / "by_category.png"),
        _calibration(results, folder / "calibration.png"),
    ]


def draw_heads(comparison: dict[str, Any], folder: Path) -> Path:
    """Write tokens per step and speedup of each head, one bar per temperature; the path."""
    figure, both = plt.subplots(1, 2, figsize=(max(8, 1.6 * len(comparison["temperatures"][0]["heads"])), 3.4))
    for axes, name in zip(both, ("tokens per step", "speedup"), strict=True):
        bars = {
            f"temperature {block['temperature']:g}": [_height(head, name) for head in block["heads"].values()]
            for block in comparison["temperatures"]
        }
        _bars(axes, list(comparison["temperatures"][0]["heads"]), bars)
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
        axes.set_ylabel(name)
    figure.suptitle(f"{comparison['bench']}, 95% interval (plain decoding = 1)", fontsize=10, color=INK)
    return _save(figure, both, folder / "heads.png")


def _height(figures: dict[str, Any], name: str) -> tuple[float, Sequence[float]]:
    if name == "speedup":
        return figures["speedup"]["ratio_of_means"], figures["speedup"]["ci95"]
    return figures["tokens_per_step"], figures["tokens_per_step_ci95"]


def _bars(
    axes: Any, names: Sequence[str], series: Mapping[str, Sequence[tuple[float, Sequence[float] | None]]]
) -> None:
    """Groups of bars, one group per name, (height, interval) each; a legend where there are several series."""
    width = 0.8 / len(series)
    for i, (label, bars) in enumerate(series.items()):
        places = [n + (i - (len(series) - 1) / 2) * width for n in range(len(bars))]
        spread = [[max(0.0, v - ci[0]) if ci else 0.0, max(0.0, ci[1] - v) if ci else 0.0] for v, ci in bars]
        errors = list(zip(*spread, strict=True)) if any(ci for _, ci in bars) else None
        colour = SERIES[i % len(SERIES)]
        axes.bar(places, [v for v, _ in bars], width, yerr=errors, label=label, color=colour, ecolor=INK, capsize=3)
    tilt = {"rotation": 30, "ha": "right"} if max(map(len, names), default=0) > 3 else {}
    axes.set_xticks(range(len(names)), names, **tilt)
    if len(series) > 1:
        axes.legend(fontsize=8, framealpha=0.9, edgecolor="none")


def _save(figure: Any, axes: Any, path: Path) -> Path:
    for one in axes if isinstance(axes, Sequence | np.ndarray) else [axes]:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _by_depth(results: dict[str, Any], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(5, 3.2))
    blocks = blocks_of(results)
    deepest = max(len(block["accepted_by_depth"]) for block in blocks)
    shares = {f"temperature {b['temperature']:g}": [(v, None) for v in b["accepted_by_depth"]] for b in blocks}
    _bars(axes, [str(depth) for depth in range(1, deepest + 1)], shares)
    axes.set(xlabel="draft tokens", ylabel="share of steps", ylim=(0, 1))
    axes.set_title(f"steps that accept at least so many ({results['bench']})", fontsize=10, color=INK)
    return _save(figure, axes, path)


def _by_category(results: dict[str, Any], path: Path) -> Path:
    groups = results["per_category"]
    figure, axes = plt.subplots(figsize=(max(5, 0.8 * len(groups)), 3.2))
    _bars(axes, list(groups), {"": [_height(group, "tokens per step") for group in groups.values()]})
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set(ylabel="tokens per step")
    axes.set_title("tokens per step by category, 95% interval (plain decoding = 1)", fontsize=10, color=INK)
    return _save(figure, axes, path)


def _calibration(results: dict[str, Any], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(4.2, 3.8))
    bins = results["calibration"]["bins"]
    expected, accepted = [b["expected"] for b in bins], [b["accepted"] for b in bins]
    top = max([*expected, *accepted, 1.0])
    axes.plot([0, top], [0, top], color=INK, linewidth=1, linestyle=":")
    axes.plot(expected, accepted, "o-", color=ACCENT)
    axes.set(xlabel="predicted (sum of psi)", ylabel="accepted draft tokens")
    axes.set_title("draft tokens per step", fontsize=10, color=INK)
    return _save(figure, axes, path)
