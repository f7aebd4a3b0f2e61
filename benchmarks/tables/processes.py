"""Tables of whole processes: opening and exporting a model, a training step, and the six small models."""

from __future__ import annotations

from benchmarks.tables.markdown import megabytes, number, table
from benchmarks.tables.runs import History, sources

LARGE, SMALL, ARCHITECTURES = "enwik8-large", "small", "six small models"


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
    ]
    return table(header, rows, "At least: the multiply-adds at the measured rate.", sources(run))


def architectures(history: History) -> list[str]:
    """Bits per character of six small models after the same CPU time."""
    run = history.newest("architectures", ARCHITECTURES)
    near, far = sorted(run.rows[0]["exact"], key=int)
    header = [
        "model",
        "parameters",
        "steps",
        "million tokens",
        "CPU s",
        f"exact {near}",
        f"exact {far}",
        f"stream {near}",
        f"stream {far}",
    ]
    rows = [
        [
            row["name"] + ("" if row["mean_span"] is None else f" (mean span {row['mean_span']:.0f})"),
            f"{row['parameters']:,}",
            f"{row['steps']:,}",
            f"{row['tokens'] / 1e6:.2f}",
            f"{row['cpu_seconds']:.0f}",
            *(f"{row[way][context]:.4f}" for way in ("exact", "stream") for context in (near, far)),
        ]
        for row in run.rows
    ]
    return table(header, rows, sources(run))
