"""What all cases share: a job, its result, and the text of a table.

A case is a module in `benchmarks/cases` with

- `run(job)`, which compares all sides, measures them in turns and yields a row for each result: a flat
  dictionary whose names have units, such as `step_ms`, a number or a `Timing`;
- `KEYS`, the fields that distinguish the rows, and `COLUMNS`, the titles of its table and what they show;
- if needed `OPTIONS` (its own options), `NOTE` (a paragraph below the table), `draw` (for --plot),
  `unavailable` (why this machine cannot measure it) and `KEEPS_ROWS` (each row is a result of its own, so a
  crash loses none).
"""

from __future__ import annotations

import fnmatch
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from benchmarks.configs import BenchmarkConfig
from benchmarks.machine import commit, machine_facts, versions
from runtimes.base.errors import ConfigError
from runtimes.base.machine import available_cpus
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule

Row = dict[str, Any]
Document = dict[str, Any]  # one result: a line of the history
Column = str | Callable[[Row, Document], Any]  # the name of a field, or a function
Columns = Mapping[str, Column]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a case is asked to measure."""

    config: BenchmarkConfig
    folder: Path  # temporary
    threads: int  # CPU threads of every side
    given_threads: int | None = None  # None lets a session choose
    options: Mapping[str, Any] = field(default_factory=dict)  # only those that have a value
    say: Callable[[str], None] = lambda line: None

    def __getitem__(self, name: str) -> Any:
        """The value of an option, or None."""
        return self.options.get(name)

    @property
    def rule(self) -> MemoryRule:
        """The memory rule of the model."""
        return MemoryRule(mem_len=self.config.mem_len, segment=self.config.segment)

    @property
    def operators(self) -> Any:
        """What computes a step: `standard` operators, or the `fused` one."""
        return self["operators"] or "standard"

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths to compare."""
        return self["lengths"] or self.config.lengths

    def repeats(self, default: int) -> int:
        """The number of timed calls of each side."""
        return int(self["repeats"] or default)

    def with_memory(self, mem_len: int) -> Job:
        """The same job for another length of memory, in a folder of its own."""
        folder = self.folder / f"{mem_len}"
        folder.mkdir()
        return replace(self, config=replace(self.config, mem_len=mem_len), folder=folder)


def measure_case(
    name: str,
    case: Any,
    config: BenchmarkConfig,
    *,
    threads: int | None = None,
    options: Mapping[str, Any] | None = None,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
    keep: Callable[[Document], None] = lambda document: None,
) -> Document:
    """The result of a case. keep: is called with each result to append to the history."""
    from benchmarks.measure import measure_limits

    used = threads or available_cpus()
    document: Document = {
        "case": name,
        "config": config.name,
        "command": command,
        "model": to_json(config.model),
        "segment": config.segment,
        "threads": used,
        "limits": measure_limits(used),
        "machine": machine_facts(),
        "versions": versions(),
        "commit": commit(),
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            config=config,
            folder=Path(folder),
            threads=used,
            given_threads=threads,
            options=options or {},
            say=say,
        )
        for row in case.run(job):
            rows.append(row)
            if hasattr(case, "KEEPS_ROWS"):
                keep(document | {"time": _now(), "rows": [row]})
    again = measure_limits(used)  # a busy moment hides a limit
    limits = {limit: max(rate, again[limit]) for limit, rate in document["limits"].items()}
    document |= {"limits": limits, "time": _now(), "rows": rows}
    if not hasattr(case, "KEEPS_ROWS"):
        keep(document)
    return document


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def cell(column: Column, row: Row, document: Document) -> str:
    """The text of a cell: three significant digits, the median of a timing, empty without a value."""
    value = row.get(column) if isinstance(column, str) else column(row, document)
    if isinstance(value, dict):
        value = value["median"]
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,}" if isinstance(value, int) else number(value)


def cells(columns: Columns, lines: Iterable[tuple[Row, Document]]) -> tuple[list[str], list[list[str]]]:
    """The titles and the cells of a table without the columns that are empty in every row."""
    table = [[cell(column, *line) for column in columns.values()] for line in lines]
    shown = [at for at in range(len(columns)) if any(row[at] for row in table)]
    titles = list(columns)
    return [titles[at] for at in shown], [[row[at] for at in shown] for row in table]


def number(value: float) -> str:
    """Three significant digits; whole numbers with separators from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def ratio(row: Row, slower: str, faster: str) -> float:
    """The median of one timing divided by the median of another."""
    return float(row[slower]["median"] / row[faster]["median"])


def megabytes(name: str) -> Column:
    """A column with a number of bytes in millions."""
    return lambda row, _: None if row.get(name) is None else row[name] / 1e6


def microseconds(name: str) -> Column:
    """A column with the median of a timing in microseconds."""
    return lambda row, _: 1e3 * row[name]["median"]


def option(name: str, text: str, **settings: Any) -> click.Option:
    """An option; name: as on the command line, and after a blank its name in a job if that differs."""
    return click.Option(name.split(), help=text, **settings)


def only_option(names: Sequence[str], text: str) -> click.Option:
    """A choice of parts of a case, with `*` for any text. `job["only"]` has their names, or is None."""

    def chosen(ctx: click.Context, option: click.Parameter, patterns: Sequence[str]) -> list[str]:
        return matching(patterns, names)

    return option("--only", f"{text}, with * for any text; may be repeated.", multiple=True, callback=chosen)


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that match a pattern; raises ConfigError for a pattern that matches none."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"{pattern!r:.60} is not a name of a part; give one of {', '.join(names)}.")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def lengths_option(text: str, *, least: int = 1, most: int = 1 << 14) -> click.Option:
    """Lengths such as `64,128`, in ascending order."""

    def parse(ctx: click.Context, option: click.Parameter, given: str | None) -> tuple[int, ...] | None:
        parts = (given or "").split(",")
        if given is not None and not all(p.isdecimal() and least <= int(p) <= most for p in parts):
            raise ConfigError(
                f"--lengths is {given!r:.60}; give numbers from {least} to {most} with commas between, such "
                "as 64,128."
            )
        return None if given is None else tuple(sorted({int(part) for part in parts}))

    return option("--lengths", text, callback=parse)


OPERATORS = option(
    "--operators",
    "What computes a step: ONNX Runtime's standard operators (default), or the fused operator for the CPU, "
    "which is built first.",
    type=click.Choice(["standard", "fused"]),
)
