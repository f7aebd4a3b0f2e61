"""The names that markers may have: tables, and single figures."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.tables import (
    architectures,
    autocast_loss,
    headline,
    music_memory,
    processes,
    recipes,
    serving,
    steps,
    text_quality,
    validation,
)
from benchmarks.tables.markdown import number
from benchmarks.tables.runs import History

TABLES: dict[str, Callable[[History], list[str]]] = {
    "headline": headline.headline,
    "headline-sliding-window": headline.sliding_window,
    "sliding-window": headline.sliding_window_limits,
    "decode": steps.decode,
    "segment": steps.segment,
    "batch": steps.batch,
    "memory-forms": steps.memory_forms,
    "latency": steps.latency,
    "precision": steps.precision,
    "load": processes.load,
    "export": processes.export,
    "training": processes.training,
    "architectures": architectures.architectures,
    "autocast-loss": autocast_loss.autocast_loss,
    "validation": validation.validation,
    "recipes": recipes.recipes,
    "text-quality": text_quality.text_quality,
    "music-memory": music_memory.music_memory,
    "serve": serving.serve,
    "ray": processes.ray,
}


def _token(history: History, side: int) -> str:
    return f"{number(history.newest('latency', 'enwik8-base').rows[side]['token']['median'])} ms"


def _ratios(history: History, operators: str) -> str:
    """The ratios at the attention lengths of Table 9, ascending, such as `505, 999, 1,515 and 1,898`."""
    ratios = [f"{row['ratio']:,.0f}" for row in headline.sliding_window_run(history, operators).rows]
    return f"{', '.join(ratios[:-1])} and {ratios[-1]}"


FIGURES: dict[str, Callable[[History], str]] = {
    "token-fixed-memory": lambda history: _token(history, 0),
    "token-growing-cache": lambda history: _token(history, 1),
    "table-9-fused": lambda history: _ratios(history, "fused"),
    "table-9-standard": lambda history: _ratios(history, "standard"),
}
