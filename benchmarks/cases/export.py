"""The seconds and the peak memory of an export, which includes the comparison with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.case import Case, CaseRow, Column, Job, config_option, megabytes, milliseconds, whole
from benchmarks.child import in_child
from benchmarks.measure import Timing
from benchmarks.models import random_run
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


def run(job: Job) -> Iterator[Row]:
    """A row for each form, at the memory length of the configuration."""
    trained = random_run(job)
    for form in FORMS:
        job.progress(f"{form}: exporting in a process of its own")
        report = in_child("export", trained, job.folder / form, form, threads=job.threads)
        yield Row(
            form=form,
            mem_len=job.rule.mem_len,
            export=Timing.of([report["seconds"] * 1e3]),
            peak_bytes=report["peak_bytes"],
            weight_bytes=4 * count_parameters(job.config.model),
        )


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
