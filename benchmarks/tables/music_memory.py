"""The table of what memory is worth to the model of the chorales."""

from __future__ import annotations

from benchmarks.tables.architectures import NOTHING
from benchmarks.tables.markdown import number, table
from benchmarks.tables.runs import History

CASE = "music-memory"


def music_memory(history: History) -> list[str]:
    """The newest run, and where it was measured."""
    runs = [run for run in history.runs if run.document["case"] == CASE and run.rows]
    if not runs:
        return [NOTHING]
    newest = max(runs, key=lambda run: str(run.document["time"]))
    body = []
    for row in newest.rows:
        timing = row["timing"]
        body.append(
            [
                row["name"],
                f"{row['events']:,}",
                f"{row['bits_per_event']:.3f}",
                "" if row["more"] is None else f"{round(row['more'], 3) + 0.0:+.3f} ± {row['error']:.3f}",
                "" if timing is None else number(timing["median"]),
                "" if timing is None else f"{number(timing['fastest'])} to {number(timing['slowest'])}",
            ]
        )
    header = [
        "read with",
        "events",
        "bits per event",
        "more than with memory",
        "ms for a new event",
        "from, to",
    ]
    row = newest.rows[0]
    hashes = ", ".join(f"{name} {digest[:12]}…" for name, digest in row["parts"].items())
    return [
        *table(header, body),
        "",
        f"Artefact {row['identity'][:12]}…, {row['precision']}, segments of {row['rule']['segment']:,}; "
        f"SHA-256 of the parts: {hashes}. Measured by {newest.source}. Machine: {newest.machine}.",
    ]
