"""Tables of whole processes: opening and exporting a model, and a training step."""

from __future__ import annotations

from benchmarks.tables.markdown import megabytes, number, table
from benchmarks.tables.runs import History, sources

LARGE, SMALL = "enwik8-large", "small"


def load(history: History) -> list[str]:
    """From opening to the first token."""
    run = history.newest("load", LARGE)
    header = [
        "side",
        "imports, ms",
        "opening, ms",
        "first token, ms",
        "at least, ms",
        "resident MB",
        "weights and memory, MB",
    ]
    rows = [
        [
            row["side"],
            *(number(row[name]["median"]) for name in ("imports", "open", "token")),
            number(run.reading(row["needed_bytes"])),
            megabytes(row["resident_bytes"]),
            megabytes(row["needed_bytes"]),
        ]
        for row in run.rows
    ]
    return table(
        header, rows, "At least: reading weights and memory once, at the measured rate.", sources(run)
    )


def export(history: History) -> list[str]:
    """Seconds and memory of an export, with its comparison against PyTorch."""
    run = history.newest("export", LARGE)
    header = ["form of memory", "memory, tokens", "seconds", "peak memory, MB", "weights, MB"]
    rows = [
        [
            f"`{row['form']}`",
            f"{row['mem_len']:,}",
            number(row["export"]["median"] / 1e3),
            megabytes(row["peak_bytes"]),
            megabytes(row["weight_bytes"]),
        ]
        for row in run.rows
    ]
    return table(header, rows, sources(run))


def training(history: History) -> list[str]:
    """One trained token, with memory and without."""
    run = history.newest("training", SMALL)
    header = [
        "memory, tokens",
        "batch",
        "ms per trained token",
        "at least, ms",
        "times the cost without memory",
        "tokens/s",
    ]
    rows = [
        [
            str(row["mem_len"]),
            str(row["batch"]),
            number(row["token"]["median"]),
            number(run.computing(row["multiply_adds"])),
            f"{row['ratio']:.2f}",
            f"{1e3 / row['token']['median']:,.0f}",
        ]
        for row in run.rows
        if row.get("side") is None
    ]
    return table(header, rows, "At least: the multiply-adds at the measured rate.", sources(run))
