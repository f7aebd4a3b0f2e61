"""Tables of single steps at the enwik8 base size: one token, one segment, several streams, and precisions."""

from __future__ import annotations

from benchmarks.configs import CONFIGS
from benchmarks.tables.markdown import megabytes, number, table
from benchmarks.tables.runs import History, Row, Run, operators, sources

BASE = CONFIGS["enwik8-base"]
LEAST = (
    "At least: what the step must read and multiply, at the machine's rates, measured before and after. A "
    "step that took less fell into a moment in which the memory was faster."
)
PAIRED = "times as long as reading just before and after"


def decode(history: History) -> list[str]:
    """One token against memory length, on ONNX Runtime and in PyTorch."""
    run = history.newest("decode", BASE.name, operators="fused", rows=("mem_len", BASE.attention_lengths))
    header = [
        "memory, tokens",
        "MB to read",
        "at least, ms",
        "ONNX Runtime, ms",
        "PyTorch, ms",
        "PyTorch / ONNX Runtime",
    ]
    rows = [
        [
            f"{row['mem_len']:,}",
            megabytes(row["num_bytes"]),
            number(_least(run, row)),
            number(row["onnxruntime"]["median"]),
            number(row["pytorch"]["median"]),
            f"{row['ratio']:.2f}",
        ]
        for row in run.rows
    ]
    return table(*_with_pairs(header, rows, run), LEAST, sources(run))


def segment(history: History) -> list[str]:
    """One whole segment, in milliseconds per segment and per token."""
    run = history.newest("segment", BASE.name, operators="fused")
    header = [
        "memory, tokens",
        "tokens in the segment",
        "at least, ms",
        "ONNX Runtime, ms",
        "PyTorch, ms",
        "ONNX Runtime, tokens/s",
        "share of the limit",
    ]
    rows = []
    for row in run.rows:
        tokens, time = row["tokens"], row["onnxruntime"]["median"]
        rows.append(
            [
                f"{row['mem_len']:,}",
                str(tokens),
                number(_least(run, row) * tokens),
                number(time * tokens),
                number(row["pytorch"]["median"] * tokens),
                f"{1e3 / time:,.0f}",
                f"{_least(run, row) / time:.0%}",
            ]
        )
    return table(header, rows, LEAST, sources(run))


def batch(history: History) -> list[str]:
    """One token of each of several independent streams."""
    run = history.newest("batch", BASE.name, operators="fused", rows=("batch", BASE.streams))
    header = [
        "streams",
        "MB to read",
        "at least, ms",
        "ONNX Runtime, ms",
        "PyTorch, ms",
        "ONNX Runtime, tokens/s",
    ]
    rows = []
    for row in run.rows:
        streams = row["batch"]
        times = [row[side]["median"] * streams for side in ("onnxruntime", "pytorch")]
        rows.append(
            [
                str(streams),
                megabytes(row["num_bytes"]),
                number(_least(run, row) * streams),
                *map(number, times),
                f"{1e3 * streams / times[0]:,.0f}",
            ]
        )
    lengths = sorted({row["mem_len"] for row in run.rows})
    memory = " or ".join(f"{length:,}" for length in lengths)
    note = f"Each stream remembers {memory} tokens; times are of one step of all streams."
    return table(*_with_pairs(header, rows, run), f"{note} {LEAST}", sources(run))


def memory_forms(history: History) -> list[str]:
    """One token in each form of memory, and whether the claim about `hidden` holds."""
    run = history.newest("memory-forms", BASE.name, operators="fused")
    header = [
        "form",
        "operators",
        "ms per token",
        "times the ring",
        "at least by reading, ms",
        "at least by computing, ms",
    ]
    rows = [
        [
            f"`{row['form']}`",
            operators(row),
            number(row["token"]["median"]),
            f"{row['ring_ratio']:.2f}",
            number(run.reading(row["num_bytes"])),
            number(run.computing(row["multiply_adds"])),
        ]
        for row in run.rows
    ]
    hidden = next(row["ring_ratio"] for row in run.rows if row["form"] == "hidden")
    claim = BASE.ring_claim or 0.0
    verdict = "Holds" if hidden >= claim else "**MISSED**"
    return table(
        header,
        rows,
        f"Memory of {run.rows[0]['mem_len']:,} tokens. Claim: `hidden` takes at least {claim:g} times as "
        f"long as `ring`. {verdict}: it took {hidden:.1f} times as long.",
        sources(run),
    )


def latency(history: History) -> list[str]:
    """Consecutive tokens with fixed memory and with a growing cache, and the claim about the slowest."""
    run = history.newest("latency", BASE.name)
    header = [
        "side",
        "median, ms",
        "90 % within, ms",
        "99 % within, ms",
        "slowest, ms",
        "median of the first 100",
        "median of the last 100",
        "at least, ms",
    ]
    rows = []
    for row in run.rows:
        token = row["token"]
        times = (
            token["median"],
            row["p90"],
            row["p99"],
            token["slowest"],
            row["medians"][0],
            row["medians"][-1],
        )
        rows.append([row["side"], *map(number, times), number(run.reading(row["num_bytes"]))])
    token, claim = run.rows[0]["token"], BASE.latency_claim or 0.0
    slowest = token["slowest"] / token["median"]
    verdict = "Holds" if slowest <= claim else "**MISSED**"
    return table(
        header,
        rows,
        f"{token['repeats']:,} consecutive tokens on each side, after {run.rows[0]['mem_len']:,} tokens of "
        f"memory. Claim: with fixed memory no token takes more than {claim:g} times the median. {verdict}: "
        f"the slowest took {slowest:.2f} times the median.",
        sources(run),
    )


def precision(history: History) -> list[str]:
    """One token with weights and memory of each precision: its time, and its size on disk and in memory."""
    run = history.newest("precision", BASE.name, operators="fused")
    header = [
        "weights",
        "memory",
        "ms per token",
        "at least, ms",
        "times faster than fp32",
        "MB on disk",
        "MB per stream",
    ]
    rows = [
        [
            row["precision"],
            row["memory_precision"],
            number(row["token"]["median"]),
            number(run.reading(row["read_bytes"])),
            f"{row['speed_up']:.2f}",
            megabytes(row["num_bytes"]),
            megabytes(row["bytes_per_stream"]),
        ]
        for row in run.rows
    ]
    return table(
        header, rows, f"Memory of {run.rows[0]['mem_len']:,} tokens, random weights. {LEAST}", sources(run)
    )


def _least(run: Run, row: Row) -> float:
    """Milliseconds per token below which the machine's limits allow no step of this row."""
    step = max(run.reading(row["num_bytes"]), run.computing(row["multiply_adds"]))
    return float(step / (row["batch"] * row["tokens"]))


def _with_pairs(header: list[str], rows: list[list[str]], run: Run) -> tuple[list[str], list[list[str]]]:
    """The table with how many times as long as reading each step took, where the run has measured that.

    Each timed step stands between two readings of the same moment. The figures are the median of these ratios
    and the range of the middle 80 %.
    """
    pairs = [row["onnxruntime"].get("reading") for row in run.rows]
    if None in pairs:
        return header, rows
    cells = [f"{pair['middle']:.2f} ({pair['low']:.2f} to {pair['high']:.2f})" for pair in pairs]
    return [*header, PAIRED], [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
