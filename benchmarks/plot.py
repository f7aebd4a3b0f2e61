"""Draws the result of one run as a PNG file. `benchmarks.pictures` draws the pictures of the documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runs import Figures
from xl_export.figures.canvas import new_figure, plain_axes, save_figure, set_title

WINDOW = "#c2410c"
SEGMENT = "#1d4ed8"
FIXED = "fixed memory"
GROWING = "growing cache"

Draw = Callable[[Any, Sequence[Figures]], None]  # draws rows into a figure of matplotlib


def plot(path: Path, draw: Draw, rows: Sequence[Figures], *, title: str) -> None:
    """Writes a picture of rows to a PNG file."""
    figure = new_figure(11, 4.8)
    set_title(figure, title)
    draw(figure, rows)
    for axes in figure.axes:
        plain_axes(axes, legend=bool(axes.get_legend_handles_labels()[0]))
    save_figure(figure, path)


def draw_lines(x: str, lines: Mapping[str, str], xlabel: str, *, log: bool = False) -> Draw:
    """Draws the medians of some timings against a length, with a band from the fastest to the slowest.

    x, lines: fields of the rows; lines: by label. log: whether times differ by orders of magnitude.
    """

    def draw(figure: Any, rows: Sequence[Figures]) -> None:
        axes = figure.subplots()
        lengths = [row[x] for row in rows]
        for (label, name), colour in zip(lines.items(), (WINDOW, SEGMENT), strict=True):
            timings = [row[name] for row in rows]
            axes.plot(lengths, [t["median"] for t in timings], "o-", color=colour, label=label)
            band = [t["fastest"] for t in timings], [t["slowest"] for t in timings]
            axes.fill_between(lengths, *band, color=colour, alpha=0.15, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        axes.minorticks_off()
        axes.set_yscale("log" if log else "linear")
        if not log:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("time per token (ms)")
        axes.set_title("Time per token (lines: medians; bands: fastest to slowest)", fontsize=10)

    return draw


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of a picture of the documents."""

    suffix: str  # of the file's name
    text: str
    pale: str  # grid, and what is less important
    first: str  # this project
    second: str  # what it is compared with
    third: str


THEMES = (
    Theme(suffix="", text="#1f2937", pale="#6b7280", first="#1d4ed8", second="#c2410c", third="#6b7280"),
    Theme(suffix="-dark", text="#e5e7eb", pale="#9ca3af", first="#7aa2ff", second="#fb923c", third="#9ca3af"),
)
LIGHT = THEMES[0]


def draw_growing_cache(figure: Any, rows: Sequence[Figures], theme: Theme = LIGHT) -> None:
    """Milliseconds and megabytes of both sides against the tokens so far."""
    lengths = [row["position"] / 1000 for row in rows]
    panels = {
        "time per token (ms)": {side: [row[side]["median"] for row in rows] for side in ("growing", "fixed")},
        "memory of one stream (MB)": {
            side: [row[f"{side}_bytes"] / 1e6 for row in rows] for side in ("growing", "fixed")
        },
    }
    for axes, (title, sides) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for side, values in sides.items():
            grows = side == "growing"
            label, colour = (GROWING, theme.second) if grows else (FIXED, theme.first)
            unit = title[-3:-1]
            # The fixed side is flat, so all its lengths measure the same thing.
            figure_shown = values[-1] if grows else median(values)
            axes.plot(lengths, values, "o-", ms=4, lw=2, color=colour)
            axes.annotate(
                f"{label}: {figure_shown:,.3g} {unit}",
                (lengths[-1], values[-1]),
                xytext=(-14, 0) if grows else (0, 8),
                textcoords="offset points",
                ha="right",
                va="center" if grows else "bottom",
                color=colour,
                fontsize=10,
                fontweight="bold",
            )
        axes.set_title(title, loc="left", fontsize=10.5, color=theme.text)
        axes.set_ylim(bottom=0)
        axes.set_xlim(-1, lengths[-1] * 1.02)
        axes.set_xlabel("thousand tokens read so far", fontsize=9, color=theme.text)
        themed(axes, theme)


def themed(axes: Any, theme: Theme) -> None:
    """Gives axes the colours of a theme and a pale grid."""
    axes.grid(True, axis="y", color=theme.pale, alpha=0.25)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.text, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(theme.pale)
