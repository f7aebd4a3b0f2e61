"""The table of the case `serve`: for each part and size the newest run that may be published."""

from __future__ import annotations

from benchmarks.tables.architectures import NOTHING
from benchmarks.tables.markdown import number, table
from benchmarks.tables.runs import History, Row, Run, sources
from runtimes.base.errors import ArtefactError

PARTS = ("overhead", "throughput", "between", "long", "resident", "stall", "others")
SIZES = ("demo", "small", "enwik8-base")


def serve(history: History) -> list[str]:
    """All figures, with the mark beside each that has one."""
    header = ["part", "model", "what", "streams", "median", "from", "to", "unit", "mark", ""]
    found: dict[tuple[str, str], Run] = {}
    for part in PARTS:
        for size in SIZES:
            try:
                found[part, size] = history.newest("serve", size, rows=("part", (part,)))
            except ArtefactError:  # this part was not measured yet at this size
                continue
    if not found:
        return [NOTHING]
    rows = [
        _cells(part, size, row)
        for (part, size), run in found.items()
        for row in run.rows
        if row["part"] == part
    ]
    runs = list({id(run.document): run for run in found.values()}.values())
    return table(header, rows, sources(*runs))


def _cells(part: str, size: str, row: Row) -> list[str]:
    figure, most, least = row["figure"], row["most"], row["least"]
    cells = [part, size, row["side"], f"{row['streams']:,}"]
    if figure is None:
        return [*cells, "", "", "", row["unit"], "", f"skipped: {row['note']}"]
    mark = ""
    if most is not None:
        mark = f"at most {number(most)}: {'holds' if figure['median'] <= most else '**MISSED**'}"
    elif least is not None:
        mark = f"at least {number(least)}: {'holds' if figure['median'] >= least else '**MISSED**'}"
    numbers = [number(figure[name]) for name in ("median", "fastest", "slowest")]
    return [*cells, *numbers, row["unit"], mark, note_of(row)]


def note_of(row: Row) -> str:
    """What belongs to a figure, with its threads."""
    notes = [row["note"]] if row["note"] else []
    if threads := row.get("threads"):  # rows of earlier versions do not say it
        notes.append(f"{threads} thread{'s' * (threads > 1)}")
    return "; ".join(notes)
