"""Tables of whole processes: opening and exporting a model, a training step, and scoring with Ray."""

from __future__ import annotations

from benchmarks.tables.markdown import megabytes, number, table
from benchmarks.tables.runs import History, Row, Run, sources

LARGE, BASE, SMALL = "enwik8-large", "enwik8-base", "small"


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


TRAINED = {  # the sides of the case `training`
    None: "fp32",
    "bf16": "bf16",
    "spans": "learned spans of 100 tokens, 2 layers",
    "whole spans": "the same, with every key computed",
    "reference": "public code of Transformer-XL, fp32",
    "reference spans": "public code of adaptive spans, fp32",
}


def training(history: History) -> list[str]:
    """One trained token: with memory and without, in bf16, with spans, and of the papers' public code."""
    runs = [history.newest("training", size) for size in (SMALL, BASE)]
    header = [
        "model",
        "what is trained",
        "memory, tokens",
        "ms per trained token",
        "at least, ms",
        "times the cost without memory",
        "times as fast as the public code",
        "tokens/s",
    ]
    rows = [_trained(run, row) for run in runs for row in run.rows]
    note = "At least: the multiply-adds at the measured rate in fp32, for the whole memory."
    return table(header, rows, note, sources(*runs))


def _trained(run: Run, row: Row) -> list[str]:
    side = row.get("side")
    spans = "spans" in (side or "")
    public = "reference spans" if spans else "reference"
    compared = row.get("faster") is not None and any(other.get("side") == public for other in run.rows)
    return [
        run.document["config"],
        TRAINED[side],
        f"{row['mem_len']:,}",
        number(row["token"]["median"]),
        number(run.computing(row["multiply_adds"])),
        "" if side else f"{row['ratio']:.2f}",
        f"{row['faster']:.2f}" if compared else "",
        f"{1e3 / row['token']['median']:,.0f}",
    ]


def ray(history: History) -> list[str]:
    """A corpus scored by one process, by one actor and by two."""
    run = history.newest("ray", SMALL)
    header = [
        "side",
        "tokens/s",
        "from",
        "to",
        "times one actor",
        "seconds of the call",
        "differs at most by, nats",
    ]
    sides = {0: "one process, without Ray", 1: "one actor"}
    rows = [
        [
            sides.get(row["actors"], f"{row['actors']} actors"),
            *(f"{row[name]:,.0f}" for name in ("rate", "lowest", "highest")),
            f"{row['ratio']:.2f}",
            number(row["seconds"]),
            f"{row['difference']:.1e}" if row["actors"] else "",
        ]
        for row in run.rows
    ]
    first = run.rows[0]
    note = (
        f"{first['tokens']:,} tokens, Ray {first['ray']}, one thread for each actor. Two actors reach at "
        f"most twice the rate of one; {first['cores']} cores serve them and Ray's own processes."
    )
    return table(header, rows, note, sources(run))
