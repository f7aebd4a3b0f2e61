"""The table of what validations cost beside training."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables.markdown import number, table
from benchmarks.tables.runs import History, Row, sources

CASE = "validation"
MARK = 0.02  # of the time of training: what all validations of a published recipe may cost


def validation(history: History) -> list[str]:
    """The newest measurement."""
    run = history.newest(CASE, "reduced recipes")
    return [*lines(run.rows), "", sources(run)]


def lines(rows: Sequence[Row]) -> list[str]:
    """The cost of a validated token over that of a trained one, and the share of a whole run."""
    columns = [
        "model",
        "ms per trained token",
        "ms per validated token",
        "ratio",
        "ratio by arithmetic",
        "share of training by arithmetic",
        "share with the measured cost",
    ]
    return table(columns, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    share = row["share"] * row["ratio"] / row["arithmetic"]
    return [
        str(row["name"]),
        *(number(row[side]["median"]) for side in ("trained", "validated")),
        f"{row['ratio']:.2f}",
        f"{row['arithmetic']:.2f}",
        f"{100 * row['share']:.2f} %",
        f"{100 * share:.2f} %" + ("" if share < MARK else f" (**above {100 * MARK:.0f} %**)"),
    ]
