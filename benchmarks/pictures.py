"""The pictures of the documents, which are drawn from the history for light and for dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.case import Line
from benchmarks.cases import CASES
from benchmarks.plot import THEMES, Theme, draw_growing_cache, themed
from benchmarks.runs import Figures, History
from benchmarks.summaries import server_rates, sliding_window
from runtimes.base.files import atomic_file
from xl_export.figures.canvas import new_figure

# The same figure gives the same bytes. Text stays text: it is sharp, can be found, and takes little space.
SVG: Any = {"svg.hashsalt": "xl-export", "svg.fonttype": "none", "font.family": "sans-serif"}
Draw = Callable[[Any, History, Theme], None]


def write_pictures(folder: Path, history: History) -> Iterator[Path]:
    """Draws each picture as an SVG file in both themes; yields their paths."""
    for name, (height, draw) in PICTURES.items():
        for theme in THEMES:
            figure = new_figure(8, height)
            draw(figure, history, theme)
            yield _save_svg(figure, folder / f"{name}{theme.suffix}.svg")


def draw_growing(figure: Any, history: History, theme: Theme) -> None:
    """Milliseconds and megabytes after 0 to 100,000 tokens, with fixed memory and with a growing cache."""
    result = history.of("growing-cache")[-1].document
    rows = result["rows"]
    model = result["model"]
    cpu = result["machine"]["cpu"].replace("(R)", "").replace(" Processor", "")
    draw_growing_cache(figure, rows, theme)
    _title(figure, f"What one more token costs, after 0 to {rows[-1]['position']:,} tokens", theme)
    _caption(
        figure,
        f"Sampled at {len(rows)} lengths by filling the memory. Same weights and kernel on both "
        f"sides: {model['layers']} layers, D {model['d_model']}, fp32,\none thread of {cpu}, CPU time, "
        f"medians. The fixed memory keeps {rows[0]['mem_len']} tokens, the cache keeps all.",
        theme,
    )


def draw_serving(figure: Any, history: History, theme: Theme) -> None:
    """Tokens per second of servers for each number of streams, at the larger size."""
    rates = server_rates(history)
    size = "enwik8-base"
    streams = [count for name, count in rates if name == size]
    sides = ("xl-export serve", "llama.cpp's server", "onnxruntime-genai")
    _title(figure, "Tokens per second: 41 million parameters, fp32, two CPU cores", theme)
    shown = figure.subplots(1, len(streams), sharey=True)
    for axes, count in zip(shown, streams, strict=True):
        found = rates[size, count]
        values = [found.get(side, 0) for side in sides]
        texts = [f"{found[side]:,.0f}" if side in found else "not measured" for side in sides]
        _bars(axes, sides, values, texts, (theme.first, theme.second, theme.third), theme)
        axes.set_title(
            "one stream" if count == 1 else f"{count} streams at once",
            loc="left",
            fontsize=10.5,
            color=theme.text,
        )


def draw_stories(figure: Any, history: History, theme: Theme) -> None:
    """Bits per byte of fairy tales that were held out."""
    names = {
        "artefact": "this model, 2.6 MB",
        "artefact, memory cut to zero": "the same, memory cleared at each segment",
        "5-grams, Kneser-Ney": "5-grams, 270 MB",
        "xz -9e, after the training text": "xz, which has seen the training text",
        "gzip -9, alone": "gzip",
    }
    found = {row["name"]: row["bits_per_byte"] for row in _rows("text-quality", history)}
    values = [found[name] for name in names]
    colours = [theme.first, theme.first, *[theme.third] * 3]
    _title(figure, "Bits per byte of four unseen books of fairy tales (fewer is better)", theme)
    axes = figure.subplots()
    _bars(axes, list(names.values()), values, [f"{value:.2f}" for value in values], colours, theme)


def draw_music(figure: Any, history: History, theme: Theme) -> None:
    """Bits per event against the time of an event: memory next to sliding windows."""
    rows = [row for row in _rows("music-memory", history) if row["timing"]]
    axes = figure.subplots()
    times = [row["timing"]["median"] for row in rows]
    bits = [row["bits_per_event"] for row in rows]
    _title(figure, "Memory is as good as the longest window, at a fraction of the time", theme)
    axes.plot(times[1:], bits[1:], "o-", color=theme.second, lw=2, ms=5)
    axes.plot(times[:1], bits[:1], "o", color=theme.first, ms=9)
    for row, time, bit in zip(rows[1:], times[1:], bits[1:], strict=True):
        words = str(row["name"]).replace("sliding window of ", "")
        _label(axes, words, (time, bit), (12, 4), theme.second)
    _label(axes, "memory of 256 events", (times[0], bits[0]), (10, -4), theme.first, ha="left", va="top")
    _label(axes, "sliding windows", (times[2], bits[2]), (60, 30), theme.second)
    axes.set_xlim(0, max(times) * 1.08)
    axes.set_ylim(1.5, max(bits) * 1.05)
    axes.set_xlabel("milliseconds for one more event", fontsize=9, color=theme.text)
    axes.set_ylabel("bits per event (fewer is better)", fontsize=9, color=theme.text)
    themed(axes, theme)


def draw_six_models(figure: Any, history: History, theme: Theme) -> None:
    """Bits per byte of six small models, and of the papers' own code."""
    lines = CASES["architectures"].summarized(_lines("architectures", history))
    rows = sorted((line.row for line in lines), key=lambda row: mean(row["own"]))
    axes = figure.subplots()
    _title(figure, "Bits per byte of six models after the same CPU time (fewer is better)", theme)
    for at, row in enumerate(rows):
        seeds = row["own"]
        axes.plot([min(seeds), max(seeds)], [-at, -at], color=theme.first, lw=3, alpha=0.4)
        axes.plot([mean(seeds)], [-at], "o", color=theme.first, ms=8)
        if row["public"]:
            axes.plot([mean(row["public"])], [-at], "D", color=theme.second, ms=6, mfc="none", mew=1.8)
    axes.set_yticks([-at for at in range(len(rows))], [row["name"] for row in rows])
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    lowest = rows[0]
    _label(
        axes, "this project, with the range of its seeds", (mean(lowest["own"]), 0), (12, 0), theme.first,
        ha="left", va="center",
    )  # fmt: skip
    last = rows[-1]
    _label(
        axes, "the papers' own code", (mean(last["public"]), 1 - len(rows)), (-10, 9), theme.second,
        ha="right", va="center",
    )  # fmt: skip
    themed(axes, theme)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color=theme.pale, alpha=0.25)


def draw_window(figure: Any, history: History, theme: Theme) -> None:
    """How many times slower a recomputed window is than segments with memory, here and in the paper."""
    rows = sliding_window(history, "fused").rows
    lengths = [row["attention_length"] for row in rows]
    axes = figure.subplots()
    _title(figure, "How many times slower a sliding window is than memory", theme)
    sides = (
        ("measured here, on a CPU", [row["ratio"] for row in rows], "o-", theme.first, (-10, 8), "right"),
        (
            "Dai et al., Table 9, on a GPU",
            [row["table_9"] for row in rows],
            "D--",
            theme.second,
            (10, -10),
            "left",
        ),
    )
    for words, ratios, style, colour, offset, side in sides:
        axes.plot(lengths, ratios, style, color=colour, lw=2, ms=6)
        for length, ratio in zip(lengths, ratios, strict=True):
            _label(axes, f"{ratio:,.0f}", (length, ratio), offset, colour, ha=side, va="center")
        place = (lengths[1], ratios[1])
        shift = (-14, 34) if side == "right" else (24, -32)
        _label(axes, words, place, shift, colour, ha=side, va="center")
    axes.set_ylim(0, 2200)
    axes.set_xlim(400, 4300)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("tokens that each token attends to", fontsize=9, color=theme.text)
    themed(axes, theme)


PICTURES: dict[str, tuple[float, Draw]] = {  # by file name: height in inches, and what draws it
    "growing-cache": (3.5, draw_growing),
    "serving": (2.2, draw_serving),
    "stories": (2.3, draw_stories),
    "music": (3.2, draw_music),
    "architectures": (2.9, draw_six_models),
    "sliding-window": (3.4, draw_window),
}


def _rows(case: str, history: History) -> list[Figures]:
    return [line.row for line in _lines(case, history)]


def _lines(case: str, history: History) -> list[Line]:
    return [Line(row, run) for run in CASES[case].published(history) for row in run.rows]


def _title(figure: Any, text: str, theme: Theme) -> None:
    figure.suptitle(text, fontsize=12.5, fontweight="bold", color=theme.text)


def _caption(figure: Any, text: str, theme: Theme) -> None:
    figure.supxlabel(text, fontsize=8, color=theme.pale)


def _label(
    axes: Any,
    text: str,
    place: tuple[float, float],
    offset: tuple[float, float],
    colour: str,
    *,
    ha: str = "center",
    va: str = "bottom",
) -> None:
    axes.annotate(
        text,
        place,
        xytext=offset,
        textcoords="offset points",
        ha=ha,
        va=va,
        color=colour,
        fontsize=9.5,
        fontweight="bold",
    )


def _bars(
    axes: Any,
    names: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    colours: Sequence[str],
    theme: Theme,
) -> None:
    """Horizontal bars from the top, each with its text at the end, and no axis of values."""
    places = [-at for at in range(len(names))]
    axes.barh(places, values, color=colours, height=0.6)
    for place, value, text in zip(places, values, texts, strict=True):
        _label(axes, text, (value, place), (5, 0), theme.text, ha="left", va="center")
    axes.set_yticks(places, names)
    axes.set_xlim(right=1.15 * max(values))
    axes.set_xticks([])
    themed(axes, theme)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)


def _save_svg(figure: Any, path: Path) -> Path:
    """Writes a figure with a transparent background."""
    import matplotlib

    with atomic_file(path) as temporary, matplotlib.rc_context(SVG):
        figure.savefig(temporary, format="svg", transparent=True, metadata={"Date": None})
    return path
