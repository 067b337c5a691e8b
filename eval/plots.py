"""The three pictures of an evaluation."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, ACCENT = "#30343b", "#2f6db5"


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write acceptance by depth, tokens per step by category, and predicted against accepted; their paths."""
    return [
        _by_depth(results, folder / "accepted_by_depth.png"),
        _by_category(results, folder / "by_category.png"),
        _calibration(results, folder / "calibration.png"),
    ]


def _save(figure: Any, axes: Any, path: Path) -> Path:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _by_depth(results: dict[str, Any], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(5, 3.2))
    shares = results["accepted_by_depth"]
    axes.bar(range(1, len(shares) + 1), shares, color=ACCENT)
    axes.set(xlabel="draft tokens", ylabel="share of steps", ylim=(0, 1))
    axes.set_title(f"steps that accept at least so many ({results['bench']})", fontsize=10, color=INK)
    return _save(figure, axes, path)


def _by_category(results: dict[str, Any], path: Path) -> Path:
    groups = results["per_category"]
    figure, axes = plt.subplots(figsize=(max(5, 0.8 * len(groups)), 3.2))
    values = [group["tokens_per_step"] for group in groups.values()]
    low = [v - g["tokens_per_step_ci95"][0] for v, g in zip(values, groups.values(), strict=True)]
    high = [g["tokens_per_step_ci95"][1] - v for v, g in zip(values, groups.values(), strict=True)]
    spread = [[max(0.0, x) for x in low], [max(0.0, x) for x in high]]
    axes.bar(range(len(groups)), values, yerr=spread, color=ACCENT, ecolor=INK, capsize=3)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_xticks(range(len(groups)), list(groups), rotation=30, ha="right")
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
