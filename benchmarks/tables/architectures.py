"""The table of small architectures: means of seeds, and beside each the public code at equal steps."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables.markdown import table
from benchmarks.tables.runs import History, Row, Run

CASE, HERE = "architectures", "xl-export"  # the side of a row that this project trained
NOTHING = "The history has no run yet: the table appears here with the first one."


def architectures(history: History) -> list[str]:
    """The table of the fullest set of rows that share text and budget, and what they were measured with."""
    runs = group(history)
    if not runs:
        return [NOTHING]
    rows = [run.rows[0] for run in runs]
    text, minutes = rows[0]["text"], rows[0]["budget_seconds"] / 60
    size = (
        "" if text["num_bytes"] is None else f" ({text['num_bytes']:,} bytes, SHA-256 {text['sha256'][:12]}…)"
    )
    machines = "; ".join(dict.fromkeys(run.machine for run in runs))
    commits = sorted({str(run.document.get("commit"))[:12] for run in runs})
    first, last = (pick(run.document["time"] for run in runs)[:10] for pick in (min, max))
    days = first if first == last else f"{first} to {last}"
    note = (
        f"{minutes:g} CPU minutes for each model; text: {text['name']}{size}. Measured by `python -m "
        f"benchmarks run {CASE}` on {days} at commit {', '.join(f'`{commit}`' for commit in commits)}. "
        f"Machine: {machines}."
    )
    return [*lines(rows), "", note]


def group(history: History) -> list[Run]:
    """The newest run of each row, of the protocol, text and budget with most pairs of model and side.

    Where several have as many, the newest protocol is taken, and then the largest budget; seeds do not count.
    An empty list where there is none. Rows of a model are left out whose number of steps is not that of its
    newest row of this project. CPU time stands in each row, so a busy machine is no reason to leave one out.
    """
    groups: dict[tuple[object, ...], dict[tuple[object, ...], Run]] = {}
    for run in sorted(history.runs, key=lambda run: str(run.document["time"])):
        if run.document["case"] != CASE or not run.rows or "protocol" not in run.rows[0]:
            continue
        row = run.rows[0]
        shared = (row["protocol"], row["budget_seconds"], row["text"]["sha256"])
        groups.setdefault(shared, {})[row["name"], row["side"], row["seed"]] = run
    if not groups:
        return []

    def fullness(shared: tuple[object, ...]) -> tuple[int, int, float]:
        found = groups[shared]
        return len({(name, side) for name, side, _ in found}), int(str(shared[0])), float(str(shared[1]))

    found = groups[max(groups, key=fullness)]
    own = sorted(
        (run for (_, side, _), run in found.items() if side == HERE),
        key=lambda run: str(run.document["time"]),
    )
    steps = {run.rows[0]["name"]: run.rows[0]["steps"] for run in own}  # the newest comes last
    return [run for (name, _, _), run in found.items() if run.rows[0]["steps"] == steps.get(name)]


def lines(rows: Sequence[Row]) -> list[str]:
    """The rows as a markdown table. Figures are means over the seeds, ± half of what the seeds differ by."""
    near, far = next((sorted(row["stream"], key=int) for row in rows if row["stream"]), ("near", "far"))
    header = ["model", "parameters", "steps", "million tokens", "CPU s", "seeds", "own rule", "public code"]
    header += [f"{way} {context}" for way in ("stream", "exact") for context in (near, far)]
    body = []
    for name in dict.fromkeys(row["name"] for row in rows):
        here = [row for row in rows if (row["name"], row["side"]) == (name, HERE)]
        public = [row for row in rows if row["name"] == name and row["side"] != HERE]
        if not here:
            continue
        spans = [row["mean_span"] for row in here if row["mean_span"] is not None]
        first = here[0]
        body.append(
            [
                name + (f" (mean span {sum(spans) / len(spans):.0f})" if spans else ""),
                f"{first['parameters']:,}",
                f"{first['steps']:,}",
                f"{first['tokens'] / 1e6:.2f}",
                f"{sum(row['cpu_seconds'] for row in here) / len(here):,.0f}",
                str(len(here)),
                mean([row["own"] for row in here]),
                mean([row["own"] for row in public]),
                *(
                    mean([row[way][context] for row in here])
                    for way in ("stream", "exact")
                    for context in (near, far)
                ),
            ]
        )
    return table(header, body)


def mean(values: Sequence[float]) -> str:
    """The mean of figures in bits with half of their range, which is left out for a single one."""
    if not values:
        return ""
    spread = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.4f}{spread}"
