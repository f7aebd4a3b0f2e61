"""The seconds and the peak memory of an export, which includes the comparison with PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case, CaseRow, Column, config_option, megabytes, milliseconds, whole
from benchmarks.child import in_child
from benchmarks.configs import BenchmarkConfig, checked_threads
from benchmarks.measure import Timing
from benchmarks.models import random_weights, write_run
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import Form
from trainer.model.model import count_parameters

FORMS: tuple[Form, ...] = ("ring", "shift")  # not hidden, which the case memory-forms shows to be slow


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One form of memory, exported once."""

    form: Form
    mem_len: int
    export: Timing
    #: Of the process; None where the system does not tell.
    peak_bytes: int | None
    weight_bytes: int


def run(
    config: BenchmarkConfig,
    *,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each form, at the memory length of the configuration."""
    threads = checked_threads(threads)
    rule = MemoryRule(mem_len=config.mem_len, segment=config.segment)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        trained = write_run(Path(name) / "run", config.model, rule, random_weights(config.model))
        for form in FORMS:
            progress(f"{form}: exporting in a process of its own")
            report = in_child("export", trained, Path(name) / form, form, threads=threads)
            once = report["seconds"] * 1e3
            rows.append(
                Row(
                    form=form,
                    mem_len=rule.mem_len,
                    export=Timing(median=once, fastest=once, slowest=once, repeats=1),
                    peak_bytes=report["peak_bytes"],
                    weight_bytes=4 * count_parameters(config.model),
                )
            )
    return rows


CASE = Case(
    name="export",
    summary="time and peak memory of an export, which includes the comparison with PyTorch",
    run=run,
    keys=("form",),
    columns=(
        Column("form of memory", lambda row, run: f"`{row['form']}`"),
        Column("memory, tokens", whole("mem_len")),
        Column("seconds", milliseconds("export", scale=1e-3)),
        Column("peak memory, MB", lambda row, run: megabytes(row["peak_bytes"])),
        Column("weights, MB", lambda row, run: megabytes(row["weight_bytes"])),
    ),
    options=(config_option,),
    published=lambda history: [history.newest("export", "enwik8-large")],
)
