"""Draws the result of a case to a PNG or SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Document
from benchmarks.history import machine
from runtimes.base.files import atomic_file, refuse_unwritable
from xl_export.plots.canvas import new_figure

OURS, OTHER = "#3b82f6", "#ea580c"
TEXT = "#6b7280"  # readable on white and on dark pages
# The same numbers give the same bytes. Text stays text, which is sharp and can be searched.
SVG: Any = {"svg.hashsalt": "xl-export", "svg.fonttype": "none", "font.family": "sans-serif"}


def check_plot(path: Path) -> None:
    """Raises UserError if matplotlib is missing or the file cannot be written."""
    new_figure(1, 1)
    refuse_unwritable(path, option="--plot", suffixes=(".png", ".svg"))


def draw(path: Path, case: Any, document: Document) -> None:
    """Draws a result: the case's panels, with the model and the machine below them."""
    import matplotlib
    from matplotlib.text import Text

    m = document["model"]
    figure = new_figure(8, 3.6)
    figure.suptitle(case.draw(figure, document["rows"]), fontsize=12, fontweight="bold")
    caption = f"{document['config']}: {m['layers']} layers, D {m['d_model']}, fp32. {machine(document)}"
    figure.supxlabel(caption, fontsize=8, parse_math=False)
    for axes in figure.axes:
        axes.grid(True, color=TEXT, alpha=0.25)
        axes.margins(x=0.08, y=0.1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.4g}")
        axes.tick_params(color=TEXT)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(TEXT)
        axes.legend(frameon=False, fontsize=9)
    for text in figure.findobj(Text):
        text.set_color(TEXT)
    kind = path.suffix[1:]
    metadata = {"Date": None} if kind == "svg" else None
    with atomic_file(path) as temporary, matplotlib.rc_context(SVG):
        figure.savefig(temporary, format=kind, dpi=150, transparent=kind == "svg", metadata=metadata)


def line(axes: Any, x: Sequence[float], timings: Sequence[Any], label: str, *, ours: bool) -> None:
    """Draws medians as a line and, for timings, a band from the fastest to the slowest."""
    colour = OURS if ours else OTHER
    is_timing = isinstance(timings[0], dict)
    axes.plot(x, [t["median"] if is_timing else t for t in timings], "o-", ms=4, color=colour, label=label)
    if is_timing:
        band = [t["fastest"] for t in timings], [t["slowest"] for t in timings]
        axes.fill_between(x, *band, color=colour, alpha=0.15, lw=0)
