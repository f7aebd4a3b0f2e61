"""Short tables and single figures of the documents that take rows from several cases."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.case import number
from benchmarks.configs import CONFIGS
from benchmarks.render import markdown_table
from benchmarks.runs import History, Run

BASE = CONFIGS["enwik8-base"]


def headline(history: History) -> list[str]:
    """One token and one segment against PyTorch with the same memory, and against a recomputed window."""
    decode = history.newest("decode", BASE.name, operators="fused", rows=("mem_len", BASE.attention_lengths))
    segment = history.newest("segment", BASE.name, operators="fused")
    window = sliding_window(history, "fused")
    token = decode.rows[0]
    piece = segment.rows[-1]
    longest = window.rows[-1]
    tokens = piece["tokens"]
    rows = [
        (
            f"one token, memory {token['mem_len']:,}",
            token["onnxruntime"]["median"],
            token["pytorch"]["median"],
            "PyTorch, same model and memory",
        ),
        (
            f"{tokens} tokens in one step, memory {piece['mem_len']:,}",
            tokens * piece["onnxruntime"]["median"],
            tokens * piece["pytorch"]["median"],
            "PyTorch, same model and memory",
        ),
        (
            f"each token of a text read in segments, attention length {longest['attention_length']:,}",
            longest["segment"]["median"],
            longest["window"]["median"],
            "a sliding window, recomputed for each token (Dai et al., Table 9)",
        ),
    ]
    header = ["enwik8 base size, fp32", "xl-export, ms", "the alternative, ms", "the alternative is"]
    machines = {run.machine for run in (decode, segment, window)}
    table = [[what, number(ours), number(theirs), side] for what, ours, theirs, side in rows]
    return markdown_table(header, table, f"Machine: {'; '.join(sorted(machines))}.")


def sliding_window(history: History, operators: str) -> Run:
    """The newest run with all attention lengths of the paper's Table 9."""
    return history.newest(
        "sliding-window", BASE.name, operators=operators, rows=("attention_length", BASE.attention_lengths)
    )


def speed(history: History) -> list[str]:
    """Tokens per second of one model in the ways in which it is used."""
    decode = history.newest("decode", BASE.name, operators="fused", rows=("mem_len", BASE.attention_lengths))
    batch = history.newest("batch", BASE.name, operators="fused", rows=("batch", BASE.streams))
    segment = history.newest("segment", BASE.name, operators="fused")
    precision = history.newest("precision", BASE.name, operators="fused")
    rows = []
    for what, row in (
        ("one stream, fp32", decode.rows[0]),
        *((f"{row['batch']} streams at once, fp32", row) for row in batch.rows[1:]),
        (f"reading a prompt, {segment.rows[-1]['tokens']} tokens a step, fp32", segment.rows[-1]),
    ):
        rate = 1e3 / row["onnxruntime"]["median"]
        # In the published run of several streams PyTorch waited badly, so its ratio says nothing.
        times = f"{row['ratio']:.1f}" if row["batch"] == 1 else ""
        rows.append([what, f"{row['mem_len']:,}", f"{rate:,.0f}", times])
    (small,) = (
        row for row in precision.rows if (row["precision"], row["memory_precision"]) == ("int8", "int8")
    )
    rate = 1e3 / small["token"]["median"]
    rows.append(["one stream, int8 weights and memory", f"{small['mem_len']:,}", f"{rate:,.0f}", ""])
    header = ["what", "memory, tokens", "tokens/s", "times PyTorch with the same memory"]
    return markdown_table(header, rows)


def serve_rates(history: History) -> list[str]:
    """Tokens per second of the server and of others, for each size and number of streams."""
    rates = server_rates(history)
    sides = list(dict.fromkeys(side for found in rates.values() for side in found))
    rows = [
        [size, f"{streams}", *(f"{found[side]:,.0f}" if side in found else "" for side in sides)]
        for (size, streams), found in rates.items()
    ]
    return markdown_table(["model", "streams", *sides], rows)


def server_rates(history: History) -> dict[tuple[str, int], dict[str, float]]:
    """Tokens per second by size and number of streams, and by side."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for size in ("demo", BASE.name):
        for row in history.newest("serve", size, rows=("part", ("others",))).rows:
            if row["part"] == "others" and row["figure"]:
                found.setdefault((size, row["streams"]), {})[row["side"]] = row["figure"]["median"]
    return found


def growing_cache_ends(history: History) -> str:
    """One token with fixed memory (median of all lengths), and with the longest growing cache."""
    rows = history.of("growing-cache")[-1].rows
    fixed = median(row["fixed"]["median"] for row in rows)
    longest = max(rows, key=lambda row: int(row["position"]))
    return f"{number(fixed)} and {number(longest['growing']['median'])} ms"


def _token(history: History, side: int) -> str:
    return f"{number(history.newest('latency', BASE.name).rows[side]['token']['median'])} ms"


def _ratios(history: History, operators: str) -> str:
    """The ratios at the attention lengths of Table 9, ascending, such as `505, 999, 1,515 and 1,898`."""
    ratios = [f"{row['ratio']:,.0f}" for row in sliding_window(history, operators).rows]
    return f"{', '.join(ratios[:-1])} and {ratios[-1]}"


SUMMARIES: dict[str, Callable[[History], list[str]]] = {
    "headline": headline,
    "speed": speed,
    "serve-rates": serve_rates,
}
FIGURES: dict[str, Callable[[History], str]] = {
    "token-fixed-memory": lambda history: _token(history, 0),
    "token-growing-cache": lambda history: _token(history, 1),
    "growing-cache-ends": growing_cache_ends,
    "table-9-fused": lambda history: _ratios(history, "fused"),
    "table-9-standard": lambda history: _ratios(history, "standard"),
}
