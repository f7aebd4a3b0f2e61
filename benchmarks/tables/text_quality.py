"""The table of ways to predict the stories of the example."""

from __future__ import annotations

from benchmarks.tables.architectures import NOTHING
from benchmarks.tables.markdown import table
from benchmarks.tables.runs import History, Run

CASE = "text-quality"


def text_quality(history: History) -> list[str]:
    """The newest run, and where it was measured. How busy the machine was changes nothing but the seconds."""
    runs = [run for run in history.runs if run.document["case"] == CASE and run.rows]
    if not runs:
        return [NOTHING]
    newest = max(runs, key=lambda run: str(run.document["time"]))
    body = [
        [
            row["name"],
            f"{row['bits_per_byte']:.3f}",
            "" if row["bits_per_token"] is None else f"{row['bits_per_token']:.3f}",
            "" if row["size_bytes"] is None else f"{row['size_bytes'] / 1e6:,.1f} MB",
        ]
        for row in newest.rows
    ]
    header = ["what predicts the text", "bits per byte", "bits per token", "size"]
    return [
        *table(header, body),
        "",
        f"{_facts(newest)}Measured by {newest.source}. Machine: {newest.machine}.",
    ]


def _facts(run: Run) -> str:
    """The artefact and the texts, as far as the rows name them."""
    row = run.rows[0]
    if not row.get("identity"):
        return ""
    rule, texts = row["rule"], row["texts"]
    hashes = ", ".join(f"{name} {digest[:12]}…" for name, digest in texts.items())
    return (
        f"Artefact {row['identity'][:12]}…, memory of {rule['mem_len']:,} tokens, segments of "
        f"{rule['segment']:,}; SHA-256 of the texts: {hashes}. "
    )
