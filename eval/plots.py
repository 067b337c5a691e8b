"""The pictures of an evaluation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .results import Block, columns, figure_of, heads_at


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write acceptance by depth, tokens per step by category, expected against accepted, and heads side by side."""
    blocks = columns(results)
    with _picture(folder / "accepted_by_depth.png") as (axes,):
        for label, block in blocks.items():
            axes.plot(range(1, len(block["accepted_by_depth"]) + 1), block["accepted_by_depth"], "o-", label=label)
        title = f"steps that accept at least so many ({results['bench']})"
        axes.set(xlabel="draft tokens", ylabel="share of steps", ylim=(0, 1), title=title)
    with _picture(folder / "by_category.png") as (axes,):
        for label, block in blocks.items():
            _intervals(axes, block["per_category"], "tokens_per_step", label)
        axes.set_title("by category, 95% interval (plain decoding = 1)")
    with _picture(folder / "calibration.png") as (axes,):
        axes.axline((0, 0), slope=1, color="grey", linestyle=":")
        for label, block in blocks.items():
            bins = block["calibration"]["bins"]
            axes.plot([b["expected"] for b in bins], [b["accepted"] for b in bins], "o-", label=label)
        axes.set(xlabel="expected (sum of psi)", ylabel="accepted draft tokens", title="draft tokens per step")
    with _picture(folder / "heads.png", columns=2) as both:
        for axes, name in zip(both, ("tokens_per_step", "speedup"), strict=True):
            for temperature, heads in heads_at(results).items():
                _intervals(axes, heads, name, f"temperature {temperature:g}")
            axes.set_title("95% interval (plain decoding = 1)")


@contextmanager
def _picture(path: Path, columns: int = 1) -> Iterator[Any]:
    """Axes to draw on, [columns]; the picture is written at the end."""
    with plt.style.context("seaborn-v0_8-whitegrid"):
        figure, (axes,) = plt.subplots(1, columns, figsize=(6.4 * columns, 3.6), squeeze=False, layout="constrained")
        yield axes
        for one in axes:
            one.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _intervals(axes: Any, blocks: Mapping[str, Block], name: str, label: str) -> None:
    """A figure of each block with its interval, beside a line at plain decoding's."""
    values, intervals = zip(*(figure_of(block, name) for block in blocks.values()), strict=True)
    axes.errorbar([*blocks], values, np.abs(np.transpose(intervals) - values), fmt="o", capsize=3, label=label)
    axes.axhline(1.0, color="grey", linestyle=":")
    axes.tick_params("x", rotation=30)
    axes.set_ylabel(name.replace("_", " "))
