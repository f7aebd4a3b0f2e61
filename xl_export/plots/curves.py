"""Pictures of curves: how the losses of several runs fell (`xl-export runs`), and what a longer context gains
(`xl-export recl`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xl_export.plots.canvas import new_figure, plain_axes, save_figure, set_title, short_names

if TYPE_CHECKING:
    from trainer.run.history import Curve, Record

# Colours that people with any kind of colour vision can distinguish (Okabe and Ito 2008), without the yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DASHES = ("-", "--", ":")  # the first seven runs have plain lines, the next seven broken ones
SMOOTHED_SHARE = 0.04  # share of the points that one point of a smoothed curve is the mean of
THRESHOLD_COLOUR = "#6b7280"
# Curves on top of each other, as of a run and its artefact, both remain visible.
STYLES: tuple[dict[str, Any], ...] = (
    {"marker": "o", "linestyle": "-", "markersize": 7},
    {"marker": "s", "linestyle": "--", "markersize": 4},
    {"marker": "^", "linestyle": ":", "markersize": 3},
)


def plot_curves(path: Path, records: Sequence[Record], *, against: str = "tokens") -> None:
    """Draws the curves of runs into a PNG file.

    Left: the loss of training, as recorded (pale) and as a mean of neighbouring points. Right: validations,
    with a ring around the best. against: `tokens` or `steps`, the horizontal axis.
    """
    figure = new_figure(13, 5)
    from matplotlib.ticker import EngFormatter

    units = {record.unit for record in records}
    unit = next(iter(units)) if len(units) == 1 else None  # otherwise tokens, whose text differs
    title = "Training of one run" if len(records) == 1 else f"Training of {len(records)} runs"
    if len(units) > 1:
        title += "; tokens of different vocabularies stand for different lengths of text"
    set_title(figure, title)
    training, validation = figure.subplots(1, 2)
    for i, (name, record) in enumerate(zip(short_names(r.path for r in records), records, strict=True)):
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
        }
        x, y = _points(record, record.training, unit, against)
        training.plot(x, y, color=style["color"], linewidth=0.8, alpha=0.2)
        only = "o" if len(y) == 1 else ""  # a line through one point shows nothing
        training.plot(x, _smoothed(y), linewidth=1.6, marker=only, markersize=3.5, **style, label=name)
        x, y = _points(record, record.validations, unit, against)
        score = f", best {min(y):.4f}" if y else ", never validated"
        validation.plot(x, y, linewidth=1.6, marker="o", markersize=3.5, **style, label=f"{name}{score}")
        if y:
            best = y.index(min(y))
            validation.plot(x[best], y[best], "o", markersize=9, fillstyle="none", color=style["color"])
    for axes, panel in ((training, "Training"), (validation, "Validation")):
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel("tokens trained" if against == "tokens" else "steps")
        axes.set_ylabel(f"bits per {unit or 'token'}")
        axes.set_xlim(left=0)
        _zoom(axes)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        plain_axes(axes)
    save_figure(figure, path)


def _points(record: Record, curve: Curve, unit: str | None, against: str) -> tuple[list[float], list[float]]:
    """The coordinates of a curve: tokens or steps, and bits for each `unit` of the text, or token."""
    each = 1.0
    if unit and record.bits_per_unit and record.best_bits:
        each = record.bits_per_unit / record.best_bits
    return [tokens if against == "tokens" else step for step, tokens, _ in curve], [
        bits * each for *_, bits in curve
    ]


def _smoothed(values: Sequence[float]) -> list[float]:
    """The mean of the points around each one, fewer of them at both ends."""
    reach = int(SMOOTHED_SHARE * len(values) / 2)
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _zoom(axes: Any) -> None:
    """Cuts the first steep part of the curves off at the top, if it would flatten all the rest."""
    curves = [line.get_ydata() for line in axes.get_lines()]
    values = [bits for curve in curves for bits in curve[len(curve) // 20 :]]
    if values:
        low = min(values)
        high = max(values)
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def plot_recl(path: Path, report: dict[str, Any]) -> None:
    """Draws a report of `xl-export recl` into a PNG file, a curve for each model, at the smallest r of the
    report.

    Left: the relative gain g_i(c, c') of each step, with the threshold that RECL is defined by. Middle: the
    same gain in perplexity (Figure 3 of Dai et al. 2019). Right: perplexity against context length (Figure
    4).
    """
    lengths = report["lengths"]
    models = report["models"]
    r = min(by["r"] for by in models[0]["by_r"])
    figure = new_figure(15, 5)
    set_title(
        figure,
        "Relative effective context length (RECL): what each longer context gains\n"
        f"{report['positions']:,} tokens of the text; hardest share of them r = {r:g}",
    )
    relative, gain, perplexity = figure.subplots(1, 3)
    names = short_names(model["name"] for model in models)
    for model, name, style in zip(models, names, itertools.cycle(STYLES), strict=False):
        by = next(by for by in model["by_r"] if by["r"] == r)
        relative.plot(lengths[1:], by["relative_gain"], **style, label=f"{name} (RECL {by['shown']})")
        gain.plot(lengths[1:], by["perplexity_gain"], **style, label=name)
        perplexity.plot(lengths, model["perplexity"], **style, label=name)
    threshold = report["threshold"]
    relative.axhline(
        threshold, color=THRESHOLD_COLOUR, linestyle="--", label=f"threshold of the RECL, {threshold:g}"
    )
    panels = (
        (relative, f"Gain over the best model of the group, r = {r:g}", "relative gain in perplexity"),
        (gain, f"The same gain in perplexity, r = {r:g}", "perplexity gained"),
        (perplexity, "Perplexity of all tokens", "perplexity"),
    )
    for axes, title, label in panels:
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel(label)
        plain_axes(axes)
    save_figure(figure, path)
