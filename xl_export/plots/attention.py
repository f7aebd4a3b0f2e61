"""Pictures of attention as PNG files: the figures of Dai et al. 2019, Appendix D, and learned spans
(Sukhbaatar et al. 2019a).

Each function writes a file from arrays that `trainer/model/inspection.py` computes. Heads are rows,
layer after layer, and are counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.errors import needs
from xl_export.plots.canvas import new_figure, plain_axes, save_figure, set_title

INK = "#111827"
SPAN = "#1d4ed8"
SOFT_EDGE = "#9ca3af"
LINE = "#6b7280"
NO_WEIGHT = "#fde68a"  # yellow, which no palette of weights has
MEAN_WEIGHT = "mean attention weight (log scale);\nyellow: no weight at all"
LABELLED_ROWS = 40  # the most heads that have a label each
STRIP = 96  # context tokens in a row of Figure 6, each with its label
STRIPS = 8  # rows of context tokens in Figure 6
FONT = "DejaVu Sans Mono"  # of tokens
CHARACTERS = 12  # of a token that are shown, at most
DECADES = 4  # how many decades of weights have a colour of their own
NAMES = {
    "a": "(a) only content: q · k",
    "b": "(b) content and position: q · W_kR R",
    "d": "(d) only position: v · W_kR R",
}


def draw_average(path: Path, average: np.ndarray, persistent: np.ndarray | None, *, title: str) -> None:
    """Draws Figure 5: the mean weight of every distance [L, H, R], and the share of persistent vectors [L, H]
    or None.
    """
    figure = new_figure(11, _height(*average.shape[:2]))
    set_title(figure, f"How much attention every head gives to each distance, on average\n{title}")
    widths = [9] if persistent is None else [9, 1]
    panels = figure.subplots(1, len(widths), width_ratios=widths, sharey=True, squeeze=False)[0]
    image = _heads(panels[0], average, _log_colours([average]), _palette("Blues"))
    _label_heads(panels[0], *average.shape[:2])
    if persistent is not None:
        panels[1].barh(np.arange(persistent.size), persistent.ravel(), height=0.8, color=LINE)
        panels[1].set(xlim=(0, 1), xlabel="share of\npersistent vectors")
        _separate_layers(panels[1], *average.shape[:2])
    _colour_bar(figure, image, panels, MEAN_WEIGHT)
    save_figure(figure, path)


def draw_terms(path: Path, terms: dict[str, np.ndarray], *, title: str) -> None:
    """Draws Figure 7: the mean softmax of each term by itself, [L, H, R] each, in the same colours."""
    figure = new_figure(15, _height(*terms["a"].shape[:2]))
    set_title(
        figure,
        "How much attention each term of the score would give to each distance by itself, on "
        f"average\n{title}",
    )
    panels = np.atleast_1d(figure.subplots(1, len(terms), sharey=True))
    colours = _log_colours(list(terms.values()))
    for axes, (name, values) in zip(panels, terms.items(), strict=True):
        image = _heads(axes, values, colours, _palette("Blues"))
        axes.set_title(NAMES[name], fontsize=10)
    _label_heads(panels[0], *terms["a"].shape[:2])
    _colour_bar(figure, image, panels, MEAN_WEIGHT)
    save_figure(figure, path)


def draw_stretch(
    path: Path,
    weights: np.ndarray,
    seen: np.ndarray,
    marked: np.ndarray,
    symbols: Sequence[str],
    *,
    first: int,
    title: str,
) -> None:
    """Draws Figure 6: the weights of one head over a text, [targets, R] by distance, the marked ones in red.

    seen, marked: bool [targets, R], which keys are visible and which are marked. symbols: the texts of the R
    - 1 + targets tokens that end with the last target. first: the position of the first target. If the memory
    is too long to label, the nearest tokens are shown, and the title says so.
    """
    targets, R = weights.shape
    total = R - 1 + targets
    shown = min(total, STRIP * STRIPS)
    every, highlights = (
        by_column(np.where(seen, x, np.nan)) for x in (weights, np.where(marked, weights, np.nan))
    )
    strips = [range(max(total - shown, stop - STRIP), stop) for stop in range(total, total - shown, -STRIP)][
        ::-1
    ]
    long = max(map(len, symbols)) > 1
    figure = new_figure(16, 1.4 + len(strips) * (0.17 * targets + (1.2 if long else 0.55)))
    if shown < total:
        title += f"; only the nearest {shown:,} of {total:,} context tokens are shown"
    set_title(
        figure,
        "Attention of one head over a text: each row is a target token, each column a token before it; "
        f"red: the fifth of the memory with the highest weights\n{title}",
    )
    colours = _log_colours([weights])
    grey = _palette("Greys", 0, 0.75)
    red = _palette("Reds", 0.3, 1, bad="none")
    panels = np.atleast_1d(figure.subplots(len(strips), 1))
    for axes, strip in zip(panels, strips, strict=True):
        image = _strip(axes, every, strip, colours, grey)
        _strip(axes, highlights, strip, colours, red)
        _write_symbols(axes, strip, symbols, targets, upright=not long)
        begin = first - (R - 1) + strip.start  # it is negative if zeros precede the text
        axes.set_title(
            f"context tokens {begin:,} to {begin + len(strip) - 1:,} of the text",
            fontsize=8,
            loc="left",
            color=LINE,
        )
    figure.supylabel("target token", fontsize=9)
    figure.supxlabel("context token", fontsize=9)
    _colour_bar(figure, image, panels, "attention weight (log scale);\nyellow: not visible to the target")
    save_figure(figure, path, dpi=100)


def _strip(axes: Any, grid: np.ndarray, strip: range, colours: Any, palette: Any) -> Any:
    part = np.ma.maximum(np.ma.masked_invalid(grid[:, strip.start : strip.stop]), colours.vmin)
    where = (strip.start - 0.5, strip.stop - 0.5, len(grid) - 0.5, -0.5)
    return axes.imshow(part, cmap=palette, norm=colours, extent=where, aspect="auto")


def by_column(weights: np.ndarray) -> np.ndarray:
    """Weights [targets, R] by distance as [targets, R - 1 + targets] with a column for each token, NaN
    elsewhere.
    """
    targets, R = weights.shape
    grid = np.full((targets, R - 1 + targets), np.nan)
    for row in range(targets):
        grid[row, row : row + R] = weights[row, ::-1]
    return grid


def draw_spans(
    path: Path,
    spans: Sequence[Sequence[float]],
    reaches: Sequence[Sequence[int]],
    *,
    maximum: int,
    title: str,
) -> None:
    """Draws the span of every head in tokens, and the largest distance at which its soft edge has weight;
    log scale.
    """
    from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

    L = len(spans)
    H = len(spans[0])
    figure = new_figure(min(16, max(9, 0.16 * L * H + 2)), 4.8)
    set_title(figure, f"How many tokens back every head attends: its learned span\n{title}")
    axes = figure.subplots()
    x = np.arange(L * H)
    z = np.ravel(spans)
    ends = np.ravel(reaches)
    axes.vlines(x, z, ends, color=SOFT_EDGE, lw=1.5)
    axes.plot(
        x, ends, "_", color=SOFT_EDGE, ms=5, label="largest distance with any weight (end of the soft edge)"
    )
    axes.plot(x, z, "o", color=SPAN, ms=4.5, label="span of a head")
    for layer in range(L):
        mean = float(np.mean(spans[layer]))
        edges = (layer * H - 0.4, layer * H + H - 0.6)
        axes.hlines(
            mean, *edges, color=SPAN, lw=1, alpha=0.5, label="mean span of a layer" if layer == 0 else None
        )
        if layer:
            axes.axvline(layer * H - 0.5, color=SOFT_EDGE, lw=0.6)
    axes.axhline(maximum, color=INK, lw=0.8, ls="--", label=f"largest span possible, {maximum:,}")
    axes.set_yscale("symlog", linthresh=1, linscale=0.4)
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(-0.1, maximum * 1.5)
    axes.set_xlim(-0.5, L * H - 0.5)
    every = max(1, L // 24)
    axes.set_xticks(
        [layer * H + (H - 1) / 2 for layer in range(0, L, every)],
        [str(layer) for layer in range(0, L, every)],
    )
    axes.set_xlabel(f"layer (each has {H} {'head' if H == 1 else 'heads, one dot for each'})")
    axes.set_ylabel("distance (tokens, log scale)")
    plain_axes(axes, lines="y", legend=False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    save_figure(figure, path)


def legible(text: str) -> str:
    """A token's text for a picture: signs for white space, code points for what the font lacks, long words
    cut.
    """
    signs = {" ": "␣", "\n": "↵", "\t": "→", "\r": "←"}
    known = _characters()
    shown = "".join(
        signs.get(c, c if c.isprintable() and ord(c) in known else f"{ord(c):X}") for c in text[:CHARACTERS]
    )
    return shown if len(shown) <= CHARACTERS and len(text) <= CHARACTERS else shown[: CHARACTERS - 1] + "…"


@lru_cache(maxsize=1)
def _characters() -> frozenset[int]:
    """The code points that the font of tokens can show."""
    with needs("bench", "matplotlib"):
        from matplotlib.font_manager import findfont
        from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(findfont(FONT)).get_charmap())


def _heads(axes: Any, values: np.ndarray, colours: Any, palette: Any) -> Any:
    """Weights [L, H, R] as an image with a row for each head."""
    L, H, R = values.shape
    rows = np.ma.masked_less_equal(values.reshape(L * H, R), 0)
    image = axes.imshow(
        np.ma.maximum(rows, colours.vmin), cmap=palette, norm=colours, aspect="auto", interpolation="nearest"
    )
    _separate_layers(axes, L, H)
    axes.set_xlabel("distance to the attended token (tokens)")
    return image


def _separate_layers(axes: Any, L: int, H: int) -> None:
    for layer in range(1, L):
        axes.axhline(layer * H - 0.5, color=INK, lw=0.8)


def _label_heads(axes: Any, L: int, H: int) -> None:
    if L * H <= LABELLED_ROWS:
        axes.set_yticks(
            range(L * H), [f"layer {row // H}, head {row % H}" for row in range(L * H)], fontsize=8
        )
        return
    every = -(-L // LABELLED_ROWS)
    layers = range(0, L, every)
    axes.set_yticks(
        [layer * H + (H - 1) / 2 for layer in layers], [f"layer {layer}" for layer in layers], fontsize=8
    )
    axes.set_ylabel(f"the {H} heads of each layer")


def _write_symbols(axes: Any, strip: range, symbols: Sequence[str], targets: int, *, upright: bool) -> None:
    style = {"fontsize": 8, "family": FONT, "parse_math": False}
    axes.set_xticks(
        list(strip), [symbols[column] for column in strip], rotation=0 if upright else 90, **style
    )
    axes.set_yticks(range(targets), list(symbols[-targets:]), **style)
    axes.tick_params(length=0, pad=2)
    axes.set_xlim(strip.start - 0.5, strip.start + STRIP - 0.5 if len(symbols) > STRIP else strip.stop - 0.5)


def _log_colours(values: list[np.ndarray]) -> Any:
    """A scale of colours over the DECADES below the highest value; lower values have the colour of the
    lowest.
    """
    from matplotlib.colors import LogNorm

    highest = max(float(array.max()) for array in values) or 1.0
    lowest = min(float(array[array > 0].min(initial=highest)) for array in values)
    return LogNorm(min(max(lowest, highest / 10**DECADES), highest / 10), highest)


def _palette(name: str, start: float = 0.0, end: float = 1.0, *, bad: str = NO_WEIGHT) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps[name](np.linspace(start, end, 256))).with_extremes(bad=bad)


def _colour_bar(figure: Any, image: Any, panels: Sequence[Any], label: str) -> None:
    height = figure.get_figheight()
    figure.colorbar(
        image,
        ax=list(panels),
        label=label,
        pad=0.01,
        aspect=6 * min(height, 10.0),
        shrink=min(1.0, 10 / height),
    )


def _height(L: int, H: int) -> float:
    return min(14.0, max(3.6, 1.8 + 0.2 * L * H))
