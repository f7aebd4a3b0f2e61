"""The written and the traced graph of one model, in ring and in shift memory: nodes, export and one token.

Both are exports of the same weights, and each export compares its graph with PyTorch before it is timed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np
import onnx_ir as ir

from benchmarks.case import (
    Case,
    CaseRow,
    Column,
    Job,
    config_option,
    decimal,
    mem_len_option,
    milliseconds,
    number,
    repeats_option,
    whole,
    words,
)
from benchmarks.checked_sessions import fed, open_checked, step_of
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_run
from runtimes.contract.spec import GRAPH, Exporter
from runtimes.contract.tensors import Form
from xl_export import export

FORMS: tuple[Form, ...] = ("ring", "shift")  # not hidden, which the case memory-forms shows to be slow


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One graph: its nodes, the seconds of its one export, and the times of one token and of a segment."""

    form: Form
    exporter: Exporter
    mem_len: int
    nodes: int
    export_seconds: float
    token: Timing
    segment: Timing
    #: The time of one token divided by the written graph's in the same form.
    written_ratio: float
    #: Of log-probabilities from the written graph's, at most, in nats.
    difference: float


def run(job: Job) -> Iterator[Row]:
    """A row for each form and exporter."""
    rule = job.rule
    repeats = job.repeats(job.config.token_repeats)
    trained = random_run(job)
    tokens = np.random.default_rng(0).integers(0, job.config.model.vocab_size, (1, rule.slots + rule.segment))
    for form in FORMS:
        folders = {}
        seconds = {}
        for exporter in get_args(Exporter):
            job.progress(f"{form}, {exporter}: exporting and comparing with PyTorch")
            began = time.perf_counter()
            out = job.folder / f"{form}-{exporter}"
            folders[exporter] = export(trained, out, exporter=exporter, memory=form)
            seconds[exporter] = time.perf_counter() - began
        sessions = {
            exporter: open_checked(folder, threads=job.threads, operators="standard")
            for exporter, folder in folders.items()
        }
        answers = {exporter: fed(session, tokens)[0] for exporter, session in sessions.items()}
        job.progress(f"{form}: timing {repeats} tokens of each graph")
        times = {}
        for length, count in ((1, repeats), (rule.segment, max(3, repeats // 10))):
            sides = {exporter: step_of(session, 1, length) for exporter, session in sessions.items()}
            times[length] = take_turns(sides, repeats=count)
        for exporter in sessions:
            yield Row(
                form=form,
                exporter=exporter,
                mem_len=rule.mem_len,
                nodes=len(list(ir.load(folders[exporter] / GRAPH).graph)),
                export_seconds=seconds[exporter],
                token=times[1][exporter],
                segment=times[rule.segment][exporter],
                written_ratio=times[1][exporter].median / times[1]["graph"].median,
                difference=float(np.abs(answers[exporter] - answers["graph"]).max()),
            )


CASE = Case(
    name="traced",
    summary="the graph that is written against the one that PyTorch traces: nodes, export, one token",
    run=run,
    keys=("form", "exporter"),
    columns=(
        Column("form", words("form")),
        Column("graph", lambda row, run: {"graph": "written", "trace": "traced"}[row["exporter"]]),
        Column("nodes", whole("nodes")),
        Column("export, s", lambda row, run: number(row["export_seconds"])),
        Column("ms per token", milliseconds("token")),
        Column("times the written graph", decimal("written_ratio")),
        Column("ms per segment", milliseconds("segment")),
        Column("nats apart", decimal("difference", ".1e")),
    ),
    options=(config_option, repeats_option, mem_len_option),
)
