"""The three pictures of an evaluation, and the one of several heads."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .results import blocks_of

INK, ACCENT = "#30343b", "#2f6db5"
SERIES = (ACCENT, "#e08a3c", "#5a9e6f", "#a05195", "#8a8f98")
Bar = tuple[float, Sequence[float] | None]  # height and interval


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write acceptance by depth, tokens per step by category, and predicted against accepted."""
    blocks, groups = blocks_of(results), results["per_category"]
    with _picture(folder / "accepted_by_depth.png", 5) as (axes,):
        deepest = max(len(block["accepted_by_depth"]) for block in blocks)
        shares = {f"temperature {b['temperature']:g}": [(v, None) for v in b["accepted_by_depth"]] for b in blocks}
        _bars(axes, [str(depth) for depth in range(1, deepest + 1)], shares)
        axes.set(xlabel="draft tokens", ylabel="share of steps", ylim=(0, 1))
        axes.set_title(f"steps that accept at least so many ({results['bench']})", fontsize=10, color=INK)
    with _picture(folder / "by_category.png", max(5, 0.8 * len(groups))) as (axes,):
        _bars(axes, list(groups), {"": [_height(group, "tokens per step") for group in groups.values()]}, plain=1.0)
        axes.set(ylabel="tokens per step")
        axes.set_title("tokens per step by category, 95% interval (plain decoding = 1)", fontsize=10, color=INK)
    with _picture(folder / "calibration.png", 4.2, 3.8) as (axes,):
        bins = results["calibration"]["bins"]
        expected, accepted = [b["expected"] for b in bins], [b["accepted"] for b in bins]
        top = max([*expected, *accepted, 1.0])
        axes.plot([0, top], [0, top], color=INK, linewidth=1, linestyle=":")
        axes.plot(expected, accepted, "o-", color=ACCENT)
        axes.set(xlabel="predicted (sum of psi)", ylabel="accepted draft tokens")
        axes.set_title("draft tokens per step", fontsize=10, color=INK)


def draw_heads(comparison: dict[str, Any], folder: Path) -> None:
    """Write tokens per step and speedup of each head, one bar per temperature."""
    labels = list(comparison["temperatures"][0]["heads"])
    with _picture(folder / "heads.png", max(8, 1.6 * len(labels)), 3.4, columns=2) as both:
        for axes, name in zip(both, ("tokens per step", "speedup"), strict=True):
            bars = {
                f"temperature {block['temperature']:g}": [_height(head, name) for head in block["heads"].values()]
                for block in comparison["temperatures"]
            }
            _bars(axes, labels, bars, plain=1.0)
            axes.set_ylabel(name)
        title = f"{comparison['bench']}, 95% interval (plain decoding = 1)"
        both[0].figure.suptitle(title, fontsize=10, color=INK)


@contextmanager
def _picture(path: Path, width: float, height: float = 3.2, columns: int = 1) -> Iterator[Any]:
    """Axes to draw on, [columns]; the picture is written at the end."""
    figure, (axes,) = plt.subplots(1, columns, figsize=(width, height), squeeze=False)
    yield axes
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _height(figures: dict[str, Any], name: str) -> Bar:
    if name == "speedup":
        return figures["speedup"]["ratio_of_means"], figures["speedup"]["ci95"]
    return figures["tokens_per_step"], figures["tokens_per_step_ci95"]


def _bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[Bar]], plain: float | None = None) -> None:
    """Groups of bars, one group per name; a legend where there are several series, a line at `plain`."""
    width = 0.8 / len(series)
    for i, (label, bars) in enumerate(series.items()):
        places = [n + (i - (len(series) - 1) / 2) * width for n in range(len(bars))]
        spread = [[max(0.0, v - ci[0]), max(0.0, ci[1] - v)] for v, ci in bars if ci]
        errors = list(zip(*spread, strict=True)) or None
        colour = SERIES[i % len(SERIES)]
        axes.bar(places, [v for v, _ in bars], width, yerr=errors, label=label, color=colour, ecolor=INK, capsize=3)
    tilt = {"rotation": 30, "ha": "right"} if max(map(len, names), default=0) > 3 else {}
    axes.set_xticks(range(len(names)), names, **tilt)
    if len(series) > 1:
        axes.legend(fontsize=8, framealpha=0.9, edgecolor="none")
    if plain is not None:
        axes.axhline(plain, color=INK, linewidth=1, linestyle=":")
