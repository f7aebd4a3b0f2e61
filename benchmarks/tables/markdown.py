"""Cells and lines of Markdown tables, and how many digits a figure has."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *notes: str) -> list[str]:
    """A Markdown table, and after it each note as a paragraph."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for note in notes:
        lines += ["", note]
    return lines


def number(value: float) -> str:
    """Three significant digits; whole numbers with separators from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def megabytes(num_bytes: float | None) -> str:
    """Millions of bytes."""
    return (
        "unknown"
        if num_bytes is None
        else f"{num_bytes / 1e6:,.4g}"
        if num_bytes < 1e9
        else f"{num_bytes / 1e6:,.0f}"
    )
