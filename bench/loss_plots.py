"""The three pictures of `fused_ctc.py`: memory against logits, time against vocabulary, gradient error."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"ctcdraft": "#2f6db5", "torch": "#c8553d", "bare GEMMs": "#30343b"}


def draw(results, folder):
    if results["memory"]:
        _memory(results, folder / "memory.png")
    if results["vocabulary"]:
        _time(results, folder / "time.png")
    if results["error"]:
        _error(results, folder / "error.png")


def _figure(xlabel, ylabel, title):
    figure, axes = plt.subplots(figsize=(5.2, 3.6))
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure, axes, path):
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _points(results, name, key):
    found = []
    for result in results:
        row = next(row for row in result["rows"] if row["path"] == name)
        if "skipped" not in row:
            found.append((result["shape"], row[key]))
    return found


def _memory(results, path):
    figure, axes = _figure("rows x vocabulary (logits)", "peak MB above the inputs", "memory of loss and gradient")
    for name, colour in COLOURS.items():
        points = sorted((s["N"] * s["T"] * s["V"], mb) for s, mb in _points(results["memory"], name, "megabytes"))
        axes.plot(*zip(*points, strict=True), "o", color=colour, label=name, markersize=4)
    _save(figure, axes, path)


def _time(results, path):
    shape = results["vocabulary"][0]["shape"]
    title = f"forward + backward, N={shape['N']} T={shape['T']} d={shape['D']} {shape['dtype']}"
    figure, axes = _figure("vocabulary", "ms, median", title)
    for name, colour in COLOURS.items():
        points = [(s["V"], seconds * 1e3) for s, seconds in _points(results["vocabulary"], name, "median")]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name, markersize=4)
    _save(figure, axes, path)


def _error(results, path):
    figure, axes = _figure("vocabulary", "relative L2 error", "gradient of the slot states against float64")
    for name in ("ctcdraft", "torch"):
        for dtype, style in (("float32", "o-"), ("bfloat16", "s--")):
            points = [(e["V"], e["error"]) for e in results["error"] if (e["path"], e["dtype"]) == (name, dtype)]
            axes.plot(*zip(*points, strict=True), style, color=COLOURS[name], label=f"{name}, {dtype}", markersize=4)
    _save(figure, axes, path)
