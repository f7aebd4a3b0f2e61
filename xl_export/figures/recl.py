"""Pictures of measurements, with matplotlib, which only these functions load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtimes.base.errors import needs
from runtimes.base.files import atomic_file, refuse_unwritable


def check_plot(path: Path) -> None:
    """Raises UserError, before anything is measured, when `path` cannot become a picture."""
    _figure_class()
    refuse_unwritable(path, option="--plot", suffixes=(".png",))


def plot_recl(path: Path, report: dict[str, Any]) -> None:
    """Draws a report of `xl-export recl` into a PNG file, a curve for each model, at the smallest r of the report.

    Left: the relative gain g_i(c, c') of each step and the threshold that RECL asks of it. Middle: the same gain
    in perplexity (Figure 3 of the paper). Right: perplexity against context length (Figure 4).
    """
    lengths, models = report["lengths"], report["models"]
    r = min(by["r"] for by in models[0]["by_r"])
    figure = _figure_class()(figsize=(14, 4.6), layout="constrained")
    relative, gain, perplexity = figure.subplots(1, 3)
    for model in models:
        by = next(by for by in model["by_r"] if by["r"] == r)
        relative.plot(lengths[1:], by["relative_gain"], "o-", label=f"{model['name']}, RECL {by['shown']}")
        gain.plot(lengths[1:], by["perplexity_gain"], "o-", label=model["name"])
        perplexity.plot(lengths, model["perplexity"], "o-", label=model["name"])
    relative.axhline(
        report["threshold"], color="#6b7280", linestyle="--", label=f"threshold {report['threshold']:g}"
    )
    relative.set_title(f"Relative gain of a longer context, r = {r:g}", fontsize=10)
    gain.set_title(f"Perplexity gained over the group's best, r = {r:g}", fontsize=10)
    perplexity.set_title("Perplexity, all positions", fontsize=10)
    for axes in (relative, gain, perplexity):
        axes.set_xlabel("context length (tokens)")
        axes.grid(True, color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _figure_class() -> Any:
    with needs("bench", "matplotlib"):
        from matplotlib.figure import Figure
    return Figure
