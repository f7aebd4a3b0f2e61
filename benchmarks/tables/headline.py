"""Tables of the README: a growing key/value cache first, and the sliding window of the paper second."""

from __future__ import annotations

from benchmarks.configs import CONFIGS
from benchmarks.tables.markdown import number, table
from benchmarks.tables.runs import History, Run, sources

BASE = CONFIGS["enwik8-base"]


def headline(history: History) -> list[str]:
    """One token against a growing key/value cache, and one segment against PyTorch with the same memory."""
    latency, segment = (
        history.newest("latency", BASE.name),
        history.newest("segment", BASE.name, operators="fused"),
    )
    fixed, growing = latency.rows
    longest = growing["mem_len"] + growing["token"]["repeats"]
    row = segment.rows[-1]
    scale = row["tokens"]
    header = [
        "enwik8 base size, fp32, CPU",
        "fixed memory (xl-export)",
        "the alternative",
        "the alternative is",
    ]
    growing_name = (
        f"a key/value cache that grows from {growing['mem_len']:,} to {longest:,} tokens (ONNX Runtime)"
    )
    rows = [
        [
            f"one token, median of {fixed['token']['repeats']:,}",
            f"{number(fixed['token']['median'])} ms",
            f"{number(growing['token']['median'])} ms",
            growing_name,
        ],
        [
            "one token, the slowest",
            f"{number(fixed['token']['slowest'])} ms",
            f"{number(growing['token']['slowest'])} ms",
            "the same",
        ],
        [
            f"one segment of {scale} tokens, memory of {row['mem_len']:,}",
            f"{number(row['onnxruntime']['median'] * scale)} ms",
            f"{number(row['pytorch']['median'] * scale)} ms",
            "the same model and memory in PyTorch",
        ],
    ]
    return table(header, rows, sources(latency, segment))


def sliding_window(history: History) -> list[str]:
    """A token in segments with memory against a window that is recomputed; Table 9 of Dai et al. (2019)."""
    run = sliding_window_run(history, "fused")
    header = [
        "attention length",
        "window, ms per token",
        "segments, ms per token",
        "times slower",
        "by arithmetic alone",
        "share",
        "Table 9 of Dai et al. (GPU)",
    ]
    rows = [
        [
            f"{row['attention_length']:,}",
            number(row["window"]["median"]),
            number(row["segment"]["median"]),
            f"{row['ratio']:,.0f}",
            f"{row['predicted_ratio']:,.0f}",
            f"{row['ratio'] / row['predicted_ratio']:.0%}",
            f"{row['table_9']:,}" if row["table_9"] else "",
        ]
        for row in run.rows
    ]
    return table(header, rows, sources(run))


def sliding_window_limits(history: History) -> list[str]:
    """The sliding window with each kind of operators, and what the machine's rate of multiply-adds allows."""
    runs = {kind: sliding_window_run(history, kind) for kind in ("standard", "fused")}
    header = [
        "attention length",
        "operators",
        "window, ms per token",
        "at least",
        "segments, ms per token",
        "at least",
        "times slower",
        "by arithmetic alone",
        "Table 9 (GPU)",
    ]
    rows = [
        [
            f"{row['attention_length']:,}",
            kind,
            number(row["window"]["median"]),
            number(run.computing(row["window_multiply_adds"])),
            number(row["segment"]["median"]),
            number(run.computing(row.get("needed_multiply_adds") or row["segment_multiply_adds"])),
            f"{row['ratio']:,.0f}",
            f"{row['predicted_ratio']:,.0f}",
            f"{row['table_9']:,}" + ("" if row["ratio"] >= row["table_9"] else " **MISSED**"),
        ]
        for kind, run in runs.items()
        for row in run.rows
    ]
    note = (
        "MISSED: measured below the ratio of the paper's Table 9. At least: the multiply-adds at the "
        "measured rate; for segments those that the mask lets through, and all of them where the run did not "
        "record that."
    )
    return table(header, rows, note, sources(*runs.values()))


def sliding_window_run(history: History, operators: str) -> Run:
    """The newest run with all attention lengths of the paper's Table 9."""
    return history.newest(
        "sliding-window", BASE.name, operators=operators, rows=("attention_length", BASE.attention_lengths)
    )
