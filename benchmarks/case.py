"""What a benchmark case declares, once: how it is run, its options, its columns and its claims.

The command of the case, its table on the terminal and its table in the documents follow from the declaration.
Cells are computed from rows as the history holds them, so a new run and an old one are shown in the same way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.configs import CONFIGS, LONGEST, BenchmarkConfig
from benchmarks.runs import Figures, History, Run
from runtimes.base.errors import ConfigError
from runtimes.base.machine import available_cpus
from runtimes.base.ranges import Range
from runtimes.cli.options import Number
from runtimes.contract.rule import MemoryRule

FILE = click.Path(path_type=Path)
SMALL = "small"
MINUTES = Range(0, 1e6, exclusive=True)
Cell = Callable[[Figures, Run], str]  # the text of a column for a row of a run


class Line(NamedTuple):
    """A row as the history holds it, and the run that measured it."""

    row: Figures
    run: Run


class Column(NamedTuple):
    """A column of a table. One whose cells are all empty is left out."""

    title: str
    value: str | Cell  # a field of the row, such as `token` or `token.slowest`; or a function
    form: str | Callable[[Any], str] = ""  # how a field is shown: a format such as `.2f`, or a function
    note: str = ""  # explains the column below the table
    detail: bool = False  # shown on the terminal only, and not in the documents

    def cell(self, row: Figures, run: Run) -> str:
        """The text of a cell. A timing is shown by its median, and a field that a row does not have is empty.

        Without `form`, whole numbers have separators, and others three significant digits.
        """
        if not isinstance(self.value, str):
            return self.value(row, run)
        value: Any = row
        for name in self.value.split("."):
            value = value and value.get(name)
        if isinstance(value, dict):
            value = value["median"]
        if callable(self.form):
            return self.form(value)
        if value is None:
            return ""
        if isinstance(value, float) and not self.form:
            return number(value)
        return format(value, self.form or ("," if isinstance(value, int) else ""))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A limit that a figure of the result must keep, with the settings of a size."""

    config: str | None = None  # the only size at which it is made
    limit: float
    text: str  # the claim, with {limit:g}
    found: str  # what was measured, with {value}
    value: Callable[[Sequence[Line]], float | None]  # None if the figure is missing
    least: bool = False  # whether the limit is a minimum; it is a maximum otherwise

    def judged(self, lines: Sequence[Line]) -> str:
        """The claim, whether it holds, and what was measured, as one sentence after another."""
        claim = f"Claim: {self.text.format(limit=self.limit)}."
        value = self.value(lines)
        if value is None:
            return f"{claim} Not measured here."
        holds = value >= self.limit if self.least else value <= self.limit
        return f"{claim} {'Holds' if holds else '**MISSED**'}: {self.found.format(value=value)}."


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one run of a case is asked to do."""

    config: BenchmarkConfig
    threads: int  # CPU threads of every side
    given_threads: int | None  # None if sessions choose for themselves
    folder: Path  # temporary
    options: Mapping[str, Any] = field(default_factory=dict)  # of the case: those that have a value
    progress: Callable[[str], None] = lambda line: None
    earlier: Sequence[Figures] = ()  # of a resumable case, what is in its history
    keep: Callable[[Any], object] = lambda row: None  # of a resumable case, appends a row to its history

    def __getitem__(self, name: str) -> Any:
        """The value of an option; None if it has none."""
        return self.options.get(name)

    @property
    def rule(self) -> MemoryRule:
        """The memory rule of the model."""
        mem_len = self.options.get("mem_len", self.config.mem_len)
        return MemoryRule(mem_len=mem_len, segment=self.config.segment)

    def with_memory(self, mem_len: int) -> Job:
        """The same job at a length of memory, with a folder of its own."""
        folder = self.folder / f"{mem_len}"
        folder.mkdir()
        return replace(self, options={**self.options, "mem_len": mem_len}, folder=folder)

    @property
    def operators(self) -> Any:
        """What computes a step: `standard`, or the `fused` operator."""
        return self.options.get("operators", "standard")

    def repeats(self, default: int) -> int:
        """The number of timed calls of each side."""
        return int(self.options.get("repeats", default))

    def chosen(self, names: Iterable[str], default: Sequence[str] = ()) -> list[str]:
        """The names that --only chooses; without it the default, or all if there is none."""
        wanted = self.options.get("names", default)
        return [name for name in names if not wanted or name in wanted]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark case, as the `CASE` of its module."""

    name: str
    run: Callable[[Job], Iterable[Any]]  # checks every side, measures, and returns a dataclass for each row
    keys: tuple[str, ...]  # fields that tell one row from another
    columns: tuple[Column, ...]
    options: tuple[str | click.Option, ...] = ()  # names in `OPTIONS`, and options of its own
    claims: tuple[Claim, ...] = ()
    # Paragraphs under the table, before the notes of its columns.
    notes: Callable[[Sequence[Line]], list[str]] = lambda lines: []
    # Rows to show instead of those in the history, such as means over seeds.
    summarized: Callable[[list[Line]], list[Line]] = lambda lines: lines
    # The runs that the documents show; an empty list while there is none.
    published: Callable[[History], Sequence[Run]] = lambda history: []
    # The size to record for a case without --config, or with an option that decides it.
    size: Callable[[dict[str, Any]], BenchmarkConfig] = lambda options: options["config"]
    draw: Callable[[Any, Sequence[Figures]], None] | None = None  # into a figure of matplotlib
    unavailable: Callable[[], str | None] = lambda: None  # why this machine cannot measure the case
    resumable: bool = False  # `run` does not measure again what `earlier` has, and keeps each new row at once
    engine: str = "onnxruntime"  # the package that computes
    precision: str = "fp32"

    def measure(
        self, config: BenchmarkConfig, *, threads: int | None = None, options: Mapping[str, Any], **more: Any
    ) -> list[Any]:
        """The rows of one run. more: further fields of its `Job`."""
        with tempfile.TemporaryDirectory() as folder:
            job = Job(
                config=config,
                threads=threads or available_cpus(),
                given_threads=threads,
                folder=Path(folder),
                options=options,
                **more,
            )
            return list(self.run(job))


def option(name: str, text: str, **settings: Any) -> click.Option:
    """An option; name: as on the command line, and in `Job` if that differs."""
    return click.Option(name.split(), help=text, **settings)


def minutes_option(text: str, default: float) -> click.Option:
    """A time; text: what it limits."""
    return option("--minutes", text, type=Number(MINUTES), default=default)


def only_option(names: Iterable[str], text: str) -> click.Option:
    """Names of parts of the case."""
    kind = click.Choice(list(names))
    return option("--only names", f"{text}; may be repeated.", multiple=True, type=kind)


def file_option(name: str, text: str, **settings: Any) -> click.Option:
    """A file or a folder."""
    return option(name, text, type=FILE, **settings)


def parse_lengths(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """The attention lengths of a text such as `64,128`, ascending and each once."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= LONGEST for part in parts):
        raise ConfigError(
            f"--attention-lengths is {text!r:.60}; expected numbers from 1 to {LONGEST} with commas between, "
            "such as 64,128."
        )
    return tuple(sorted({int(part) for part in parts}))


# Options that several cases have, by the name that a case gives.
OPTIONS = {
    "config": option(
        "--config",
        "The size of the model: small (default), enwik8-base (some minutes), wt103-base, enwik8-large, "
        "medium, tales or demo.",
        default=SMALL,
        type=click.Choice(list(CONFIGS)),
        callback=lambda ctx, option, name: CONFIGS[name],
    ),
    "repeats": option(
        "--repeats",
        "Timed calls of each side; the default depends on the case and the size.",
        type=click.IntRange(1, 1 << 17),
    ),
    "mem-len": option(
        "--mem-len", "Length of the memory in tokens (M); the default depends on the size.", type=int
    ),
    "attention-lengths": option(
        "--attention-lengths",
        "Lengths in tokens, such as 64,128,256; the default depends on the size.",
        callback=parse_lengths,
    ),
    "operators": option(
        "--operators",
        "What computes a step: ONNX Runtime's own operators (default), or the fused operator for the CPU, "
        "which is built first.",
        type=click.Choice(["standard", "fused"]),
    ),
}


def number(value: float) -> str:
    """Three significant digits; whole numbers with separators from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def megabytes(num_bytes: float | None) -> str:
    """Millions of bytes."""
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / 1e6:,.4g}" if num_bytes < 1e9 else f"{num_bytes / 1e6:,.0f}"


def microseconds(milliseconds: float) -> str:
    """A time in microseconds."""
    return number(milliseconds * 1e3)


def per_second(milliseconds: float) -> str:
    """How many a second, if one takes so long."""
    return f"{1e3 / milliseconds:,.0f}"
