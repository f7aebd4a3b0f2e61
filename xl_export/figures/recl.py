"""The picture of `xl-export recl`: what a longer context gains, for each model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from xl_export.figures.canvas import new_figure, plain_axes, save_figure, set_title, short_names

THRESHOLD_COLOUR = "#6b7280"
# Curves on top of each other, as of a run and its artefact, both remain visible.
STYLES: tuple[dict[str, Any], ...] = (
    {"marker": "o", "linestyle": "-", "markersize": 7},
    {"marker": "s", "linestyle": "--", "markersize": 4},
    {"marker": "^", "linestyle": ":", "markersize": 3},
)


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
