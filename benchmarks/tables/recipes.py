"""The table of published recipes that were trained for a stated time."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables.architectures import NOTHING
from benchmarks.tables.markdown import table
from benchmarks.tables.runs import History, Row, Run

CASE = "recipes"


def recipes(history: History) -> list[str]:
    """The newest run of each recipe with its largest budget, and what it was measured with."""
    runs = newest(history)
    if not runs:
        return [NOTHING]
    machines = "; ".join(dict.fromkeys(run.machine for run in runs))
    commits = sorted({str(run.document.get("commit"))[:12] for run in runs})
    days = sorted({run.document["time"][:10] for run in runs})
    files = dict.fromkeys(
        f"{corpus['name']} ({', '.join(f'{count:,}' for count in corpus['tokens'].values())} tokens, SHA-256 "
        f"{corpus['sha256'][:12]}…)"
        for corpus in (run.rows[0]["corpus"] for run in runs)
    )
    note = (
        f"Texts, with the tokens of training, validation and test: {'; '.join(files)}. Measured by `python "
        f"-m benchmarks run {CASE}` on {' and '.join(days)} at commit "
        f"{', '.join(f'`{commit}`' for commit in commits)}. Machine: {machines}."
    )
    return [*lines([run.rows[0] for run in runs]), "", note]


def newest(history: History) -> list[Run]:
    """The run of each recipe that tables and pictures show; an empty list where there is none."""
    found: dict[str, Run] = {}
    for run in sorted(history.runs, key=lambda run: str(run.document["time"])):
        if run.document["case"] == CASE and run.rows:
            row = run.rows[0]
            earlier = found.get(row["name"])
            if earlier is None or row["budget_seconds"] >= earlier.rows[0]["budget_seconds"]:
                found[row["name"]] = run
    return list(found.values())


def lines(rows: Sequence[Row]) -> list[str]:
    """The rows as a markdown table."""
    header = [
        "recipe",
        "parameters",
        "steps",
        "million tokens",
        "passes over the text",
        "CPU minutes, with validations",
        "best validation",
        "test",
        "the paper's recipe, to the end",
    ]
    body = []
    for row in rows:
        tokens = row["steps"] * row["step_tokens"]
        minutes = "stopped and resumed" if row["cpu_seconds"] is None else f"{row['cpu_seconds'] / 60:.1f}"
        scores = [bits for _, bits in row["validation"]]
        body.append(
            [
                row["name"],
                f"{row['parameters'] / 1e6:.1f}M",
                f"{row['steps']:,}",
                f"{tokens / 1e6:.2f}",
                f"{tokens / row['corpus']['tokens']['train']:.2f}",
                minutes,
                score(min(scores), row["unit"]) if scores else "",
                score(row["test"], row["unit"]),
                f"{row['published']:g}",
            ]
        )
    return table(header, body)


def score(bits: float, unit: str) -> str:
    """Bits per byte or character, and the perplexity of a word."""
    return f"perplexity {2**bits:,.1f}" if unit == "word" else f"{bits:.3f} bits"
