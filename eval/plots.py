"""The pictures of an evaluation: PNG files beside report.md, and SVG within its page, in the page's own colours."""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from cycler import cycler

from .results import Block, columns, figure_of, heads_at

STYLE = {"text.parse_math": False}  # names are other people's: a dollar is a dollar
SERIES = [f"#00000{i}" for i in range(1, 9)]  # of which each stands for a colour that the page knows as --series-i
PAGE = {"#262626": "currentColor", "#cccccc": "var(--line)", "#808080": "var(--muted)"} | {
    colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, 1)
}
PAGE_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "axes.prop_cycle": cycler(color=SERIES),
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": "#262626",
}
INCHES = 5.0  # across, in the page
TALLEST = 60.0  # inches: of thousands of categories no PNG could be written, and not each has its name beside it
LONGEST_NAME = 32


@dataclass(frozen=True)
class Panel:
    """What paints one picture onto axes, and how many inches high it is."""

    title: str
    paint: Callable[[Any], None]
    height: float = 3.6


def panels_of(results: dict[str, Any]) -> dict[str, list[Panel]]:
    """The panels of each picture of an evaluation, by the picture's name."""
    blocks = results.get("drafts") or columns(results)
    by_temperature = {f"temperature {t:g}": heads for t, heads in heads_at(results).items()}
    by_category = {label: block["per_category"] for label, block in blocks.items()}
    categories = intervals(by_category, "tokens_per_step", ", by category")
    if "drafts" in results:
        return {"drafts": [intervals({"": blocks}, "tokens_per_step"), categories]}

    def depths(axes: Any) -> None:
        for label, block in blocks.items():
            axes.plot(range(1, len(block["accepted_by_depth"]) + 1), block["accepted_by_depth"], "o-", label=label)
        axes.set(xlabel="draft tokens", ylabel="share of steps", ylim=(0, 1))

    def beliefs(axes: Any) -> None:
        axes.axline((0, 0), slope=1, color="#808080", linestyle=":")
        for label, block in blocks.items():
            bins = block["calibration"]["bins"]
            axes.plot([b["expected"] for b in bins], [b["accepted"] for b in bins], "o-", label=label)
        axes.set(xlabel="expected (sum of psi)", ylabel="accepted draft tokens")

    return {
        "heads": [intervals(by_temperature, "tokens_per_step"), intervals(by_temperature, "speedup")],
        "by_category": [categories],
        "accepted_by_depth": [Panel("steps that accept at least so many", depths)],
        "calibration": [Panel("draft tokens per step, expected and accepted", beliefs)],
    }


def intervals(series: Mapping[str, Mapping[str, Block]], figure: str, behind: str = "") -> Panel:
    """Of each series, a figure of each named block with its interval, beside a line at plain decoding's."""
    names = list(dict.fromkeys(name for blocks in series.values() for name in blocks))
    height = 1.2 + len(names) * (0.2 + 0.1 * len(series))
    every = ceil(height / TALLEST)
    named = range((len(names) - 1) % every, len(names), every)
    short = [f"{names[i][:LONGEST_NAME]}..." if names[i][LONGEST_NAME:] else names[i] for i in named]

    def paint(axes: Any) -> None:
        axes.axvline(1.0, color="#808080", linestyle=":")
        for i, (label, blocks) in enumerate(series.items()):
            values, bounds = zip(*(figure_of(block, figure) for block in blocks.values()), strict=True)
            places = np.array([names.index(name) for name in blocks]) + (i - (len(series) - 1) / 2) * 0.6 / len(series)
            axes.errorbar(values, places, xerr=np.abs(np.transpose(bounds) - values), fmt="o", capsize=3, label=label)
        axes.set_yticks(named, short)
        axes.set_ylim(len(names) - 0.4, -0.6)

    title = f"{figure.replace('_', ' ')}{behind}, 95% interval (plain decoding = 1)"
    return Panel(title, paint, min(TALLEST, height))


def draw(pictures: Mapping[str, Sequence[Panel]], folder: Path) -> None:
    """Write each picture as <name>.png, its panels side by side."""
    for name, panels in pictures.items():
        size = 6.4 * len(panels), max(3.6, *(panel.height for panel in panels))
        with _figure(size) as figure:
            for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                panel.paint(axes)
                axes.set_title(panel.title)
                axes.legend()
            figure.savefig(folder / f"{name}.png", dpi=120)


def svgs(panels: Iterable[Panel]) -> list[tuple[str, str]]:
    """(title, SVG element) of each panel: text stays text, colours are the page's, nothing is loaded or run."""
    found = []
    for panel in panels:
        with _figure((INCHES, panel.height), PAGE_STYLE) as figure:
            axes = figure.subplots()
            panel.paint(axes)
            count = len(axes.get_legend_handles_labels()[1])
            if count > 1:
                figure.set_figheight(panel.height + 0.22 * count)
                figure.legend(loc="outside lower left", frameon=False)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        found.append((panel.title, _themed(text.getvalue())))
    return found


@contextmanager
def _figure(inches: tuple[float, float], *styles: dict[str, Any]) -> Iterator[Any]:
    """A figure in these styles; matplotlib is imported here, since it is half a second of every command's start."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["seaborn-v0_8-whitegrid", STYLE, *styles]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # report.html has such names as text
        yield Figure(figsize=inches, layout="constrained")


def _themed(svg: str) -> str:
    """Without prologue and ids that another picture has too, and in the page's colours."""
    svg = re.sub(r' id="[a-z0-9]+_\d+"', "", svg[svg.index("<svg") :])
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return re.sub(r"(?<=: )#[0-9a-f]{6}", lambda colour: PAGE.get(colour[0], colour[0]), svg)
