"""The table of what bf16 autocast costs in loss: the mean of pairs, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

from benchmarks.tables.architectures import NOTHING
from benchmarks.tables.markdown import table
from benchmarks.tables.runs import History, Row

CASE = "autocast-loss"
MARK = 0.005  # bits per byte: the largest difference with which bf16 is recommended
# The 97.5 % points of Student's t for 1 to 30 degrees of freedom. For more the last one is a little large.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def autocast_loss(history: History) -> list[str]:
    """All pairs that share the newest one's text and recipe. The machine's load changes no loss."""
    runs = [run for run in history.runs if run.document["case"] == CASE and run.rows]
    if not runs:
        return [NOTHING]
    runs.sort(key=lambda run: str(run.document["time"]))
    pairs = {run.rows[0]["seed"]: run for run in runs if _shared(run.rows[0]) == _shared(runs[-1].rows[0])}
    first, last = (pick(run.document["time"] for run in pairs.values())[:10] for pick in (min, max))
    days = first if first == last else f"{first} to {last}"
    text = runs[-1].rows[0]["text"]
    size = (
        "" if text["num_bytes"] is None else f" ({text['num_bytes']:,} bytes, SHA-256 {text['sha256'][:12]}…)"
    )
    commits = sorted({f"`{str(run.document.get('commit'))[:12]}`" for run in pairs.values()})
    machines = "; ".join(dict.fromkeys(run.machine for run in pairs.values()))
    return [
        *lines([pairs[seed].rows[0] for seed in sorted(pairs)]),
        "",
        f"Text: {text['name']}{size}. Measured by `python -m benchmarks run {CASE}` on {days} at commit "
        f"{', '.join(commits)}. Machine: {machines}.",
    ]


def _shared(row: Row) -> tuple[object, ...]:
    recipe = {name: value for name, value in row["recipe"].items() if name != "seed"}
    return row["text"], recipe


def lines(rows: Sequence[Row]) -> list[str]:
    """The means of both precisions, and their difference beside the mark."""
    columns = ["pairs", "steps", "fp32", "bf16", "bf16 less fp32", "smallest", "largest", f"within {MARK}"]
    differences = [row["bf16"] - row["fp32"] for row in rows]
    middle, half = mean(differences), half_interval(differences)
    shown = "yes" if abs(middle) + half <= MARK else "**not shown**"
    cells = [
        f"{len(rows):,}",
        f"{rows[0]['steps']:,}",
        *(f"{mean(row[side] for row in rows):.4f}" for side in ("fp32", "bf16")),
        f"{middle:+.4f}" + ("" if math.isinf(half) else f" ± {half:.4f}"),
        *(f"{pick(differences):+.4f}" for pick in (min, max)),
        shown,
    ]
    return table(columns, [cells])


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of some values, by Student's t; infinite for a single value."""
    free = len(values) - 1
    if not free:
        return math.inf
    return STUDENT[min(free, len(STUDENT)) - 1] * stdev(values) / math.sqrt(len(values))
