"""Calls the commands, measures cases at a tiny size, and shows rows that were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner, Result

from benchmarks.__main__ import main
from benchmarks.cases import CASES
from benchmarks.configs import BenchmarkConfig
from benchmarks.render import markdown, terminal
from benchmarks.runs import Run
from runtimes.base.records import to_json


def rows_of(case: str, config: BenchmarkConfig, *, earlier: Sequence[Any] = (), **options: Any) -> list[Any]:
    """The rows that a case measures with one thread. earlier: documents of its history."""
    return CASES[case].measure(config, threads=1, options=options, earlier=earlier)


def a_run(case: str, rows: Sequence[Any], **changes: Any) -> Run:
    """A run of a case on an idle machine; rows: dataclasses, or as the history holds them."""
    facts = {
        "case": case,
        "time": "2026-11-01T10:00:00+00:00",
        "config": "tiny",
        "threads": 2,
        "machine": {"cpu": "A", "cpus": 2, "system": "Linux", "memory_bytes": 1 << 34, "busy_cpus": 0.0},
        "versions": {},
        "limits": {"read_bytes": 1e9, "multiply_adds": 1e9},
        "commit": None,
    }
    documents = [row if isinstance(row, dict) else to_json(row) for row in rows]
    return Run({**facts, "rows": documents, **changes})


def on_terminal(case: str, rows: Sequence[Any], **changes: Any) -> list[str]:
    """The lines that `run` prints, with the claims of the size."""
    return terminal(CASES[case], a_run(case, rows, **changes), judged=True)


def in_documents(case: str, rows: Sequence[Any], **changes: Any) -> list[str]:
    """The lines of the table in Markdown."""
    return markdown(CASES[case], [a_run(case, rows, **changes)])


def call(*arguments: object) -> Result:
    """`call("run", "decode", "--csv", path)` → the result of `python -m benchmarks`."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])
