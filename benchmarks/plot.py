"""Draws the results of the cases sliding-window, decode, latency and recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.output import refuse_other_file
from xl_export.figures.canvas import check_picture, new_figure, plain_axes, save_figure, set_title

if TYPE_CHECKING:
    from benchmarks.cases.latency import Row as LatencyRow
    from benchmarks.cases.learning.recipes import Row as RecipeRow
    from benchmarks.cases.sliding_window import Row
    from benchmarks.steps import Row as StepRow

SIDES = {"fixed memory": "memory of fixed length", "growing cache": "key/value cache that grows"}
WINDOW, SEGMENT, ARITHMETIC, PAPER = "#c2410c", "#1d4ed8", "#6b7280", "#111827"
SOFTWARE = "python -m benchmarks --plot"  # recorded in each picture, so that it may be replaced later


def check_plot(path: Path, *, force: bool = False) -> None:
    """Raises UserError, before anything is measured, where the picture cannot or must not be written."""
    check_picture(path, "--plot")
    refuse_other_file(path, is_own=_is_own_picture, option="--plot", force=force)


def plot(path: Path, case: str, rows: Sequence[Any], *, title: str) -> None:
    """Writes the picture of the rows of a case to a PNG file."""
    figure = new_figure(11, 4.8)
    set_title(figure, title)
    draw: dict[str, Callable[[Any, Sequence[Any]], None]] = {
        "sliding-window": _sliding_window,
        "decode": _decode,
        "latency": _latency,
        "recipes": _recipes,
    }
    draw[case](figure, rows)
    for axes in figure.axes:
        plain_axes(axes, markers=4 if case == "latency" else 1)
    save_figure(figure, path, software=SOFTWARE)


def _is_own_picture(path: Path) -> bool:
    """Whether the file is a PNG that `plot` wrote, by the text that PNG files carry before their pixels."""
    with open(path, "rb") as stream:
        head = stream.read(1024)
    return head.startswith(b"\x89PNG") and b"Software\x00" + SOFTWARE.encode() in head


def _sliding_window(figure: Any, rows: Sequence[Row]) -> None:
    """The time per token of both sides, and its ratio, against attention length."""
    latency, ratio = figure.subplots(1, 2)
    _draw_latency(latency, rows)
    _draw_ratio(ratio, rows)
    for axes in (latency, ratio):
        axes.set_xlabel("attention length (tokens)")
        _label_lengths(axes, [row.attention_length for row in rows])


def _decode(figure: Any, rows: Sequence[StepRow]) -> None:
    """The time per token of both sides against memory length."""
    axes, lengths = figure.subplots(), [row.mem_len for row in rows]
    for label, colour, timings in (
        ("PyTorch", WINDOW, [row.pytorch for row in rows]),
        ("ONNX Runtime", SEGMENT, [row.onnxruntime for row in rows]),
    ):
        axes.plot(lengths, [timing.median for timing in timings], "o-", color=colour, label=label)
    axes.set_xlabel("memory length M (tokens)")
    axes.set_ylabel("time per token (ms)")
    axes.set_ylim(bottom=0)
    axes.set_title("Time of one token with full memory (medians)", fontsize=10)
    _label_lengths(axes, lengths)


def _latency(figure: Any, rows: Sequence[LatencyRow]) -> None:
    """The time of every token, in order."""
    axes = figure.subplots()
    for row, colour in zip(rows, (SEGMENT, WINDOW), strict=True):
        axes.plot(
            row.milliseconds, ".", ms=2, color=colour, label=f"{SIDES[row.side]} (median {row.median:.3g} ms)"
        )
    axes.set_xlabel("number of the token")
    axes.set_ylabel("time (ms)")
    top = 4 * max(row.median for row in rows)
    beyond = sum(x > top for row in rows for x in row.milliseconds)
    axes.set_ylim(0, top)
    outside = f" (slower ones outside the picture: {beyond})" if beyond else ""
    axes.set_title(f"Time of each of {len(rows[0].milliseconds):,} consecutive tokens{outside}", fontsize=10)


def _recipes(figure: Any, rows: Sequence[RecipeRow]) -> None:
    """Training loss and validation of each recipe against the tokens that it was trained on."""
    across = len(rows) if len(rows) <= 3 else 2
    down = -(-len(rows) // across)
    figure.set_figheight(down * figure.get_figheight())
    places = figure.subplots(down, across, squeeze=False).ravel()
    for unused in places[len(rows) :]:
        unused.remove()
    for axes, row in zip(places, rows, strict=False):
        for label, colour, style, curve in (
            ("training", ARITHMETIC, "-", row.curve),
            ("validation", SEGMENT, "o-", row.validation),
        ):
            tokens = [step * row.step_tokens / 1e6 for step, _ in curve]
            axes.plot(tokens, [bits for _, bits in curve], style, ms=3, lw=1, color=colour, label=label)
        published = math.log2(row.published) if row.unit == "word" else row.published
        axes.axhline(
            published, color=PAPER, ls="--", lw=1, label=f"the paper, its size and data: {published:.3g}"
        )
        top = sorted(bits for _, bits in row.curve)[int(0.97 * len(row.curve))]
        axes.set_ylim(min(published, *(bits for _, bits in row.curve)) - 0.1, top + 0.2)
        axes.set_xlabel("million training tokens")
        axes.set_ylabel(f"bits per {row.unit}")
        size, minutes = f"{row.parameters / 1e6:.1f}M", f"{row.budget_seconds / 60:g}"
        axes.set_title(f"{row.name} ({size} parameters, {minutes} CPU minutes)", fontsize=10)


def _draw_latency(axes: Any, rows: Sequence[Row]) -> None:
    lengths = [row.attention_length for row in rows]
    for label, colour, timings in (
        ("vanilla Transformer, window recomputed for each token", WINDOW, [row.window for row in rows]),
        ("Transformer-XL, segments with memory", SEGMENT, [row.segment for row in rows]),
    ):
        axes.plot(lengths, [timing.median for timing in timings], "o-", color=colour, label=label)
        axes.fill_between(
            lengths,
            [t.fastest for t in timings],
            [t.slowest for t in timings],
            color=colour,
            alpha=0.15,
            lw=0,
        )
    _log_scale(axes)
    axes.set_ylabel("time per token (ms, log scale)")
    axes.set_title("Time per token (lines: medians; bands: fastest to slowest)", fontsize=10)


def _draw_ratio(axes: Any, rows: Sequence[Row]) -> None:
    from benchmarks.cases.sliding_window import TABLE_9

    lengths = [row.attention_length for row in rows]
    axes.plot(lengths, [row.ratio for row in rows], "o-", color=SEGMENT, label="measured here")
    axes.plot(
        lengths,
        [row.predicted_ratio for row in rows],
        "s--",
        color=ARITHMETIC,
        label="expected from multiply-adds alone",
    )
    paper = sorted(set(lengths) & set(TABLE_9))
    if paper:
        axes.plot(
            paper,
            [TABLE_9[length] for length in paper],
            "*",
            ms=11,
            color=PAPER,
            label="Dai et al. 2019, Table 9 (GPU)",
        )
    for row in rows:
        axes.annotate(  # below the point, where the marks of the other lines do not cover it
            f"{row.ratio:,.0f}×",
            (row.attention_length, row.ratio),
            textcoords="offset points",
            xytext=(8, -11),
            ha="left",
            fontsize=8,
            color=SEGMENT,
        )
    _log_scale(axes)
    axes.margins(x=0.12, y=0.12)
    axes.set_ylabel("window time / segment time (log scale)")
    axes.set_title("How many times slower the recomputed window is", fontsize=10)


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_lengths(axes: Any, lengths: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
