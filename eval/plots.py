"""The three pictures of an evaluation, and the one of several heads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .results import Block, figure_of, heads_at


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write acceptance by depth, tokens per step by category, and predicted against accepted."""
    with _picture(folder / "accepted_by_depth.png") as (axes,):
        for temperature, heads in heads_at(results).items():
            shares = next(iter(heads.values()))["accepted_by_depth"]
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=f"temperature {temperature:g}")
        title = f"steps that accept at least so many ({results['bench']})"
        axes.set(xlabel="draft tokens", ylabel="share of steps", ylim=(0, 1), title=title)
        axes.legend()
    with _picture(folder / "by_category.png") as (axes,):
        _intervals(axes, results["per_category"], "tokens_per_step", "")
        axes.set_title("tokens per step by category, 95% interval (plain decoding = 1)")
    with _picture(folder / "calibration.png") as (axes,):
        bins = results["calibration"]["bins"]
        axes.axline((0, 0), slope=1, color="grey", linestyle=":")
        axes.plot([b["expected"] for b in bins], [b["accepted"] for b in bins], "o-")
        axes.set(xlabel="predicted (sum of psi)", ylabel="accepted draft tokens", title="draft tokens per step")


def draw_heads(results: dict[str, Any], folder: Path) -> None:
    """Write tokens per step and speedup of each head, at each temperature."""
    with _picture(folder / "heads.png", columns=2) as both:
        for axes, name in zip(both, ("tokens_per_step", "speedup"), strict=True):
            for temperature, heads in heads_at(results).items():
                _intervals(axes, heads, name, f"temperature {temperature:g}")
            axes.legend()
        both[0].figure.suptitle(f"{results['bench']}, 95% interval (plain decoding = 1)", fontsize=10)


@contextmanager
def _picture(path: Path, columns: int = 1) -> Iterator[Any]:
    """Axes to draw on, [columns]; the picture is written at the end."""
    with plt.style.context("seaborn-v0_8-whitegrid"):
        figure, (axes,) = plt.subplots(1, columns, figsize=(6.4 * columns, 3.6), squeeze=False, layout="constrained")
        yield axes
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _intervals(axes: Any, blocks: Mapping[str, Block], name: str, label: str) -> None:
    """A figure of each block with its interval, beside a line at plain decoding's."""
    values, intervals = zip(*(figure_of(block, name) for block in blocks.values()), strict=True)
    axes.errorbar([*blocks], values, np.abs(np.transpose(intervals) - values), fmt="o", capsize=3, label=label)
    axes.axhline(1.0, color="grey", linestyle=":")
    axes.tick_params("x", rotation=30)
    axes.set_ylabel(name.replace("_", " "))
