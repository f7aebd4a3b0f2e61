"""The written and the traced graph of one model, in ring and in shift memory: nodes, export and one token.

Both are exports of the same weights, and each export compares its graph with PyTorch before it is timed here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir

from benchmarks.case import (
    Case,
    CaseRow,
    Column,
    config_option,
    decimal,
    mem_len_option,
    milliseconds,
    number,
    repeats_option,
    whole,
    words,
)
from benchmarks.checked_sessions import open_checked
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_weights, write_run
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
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


def run(
    config: BenchmarkConfig,
    *,
    mem_len: int | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each form and exporter; an argument that is None is taken from the configuration."""
    threads = checked_threads(threads)
    repeats = checked_repeats(repeats, config.token_repeats)
    rule = MemoryRule(mem_len=config.mem_len if mem_len is None else mem_len, segment=config.segment)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        trained = write_run(Path(name) / "run", config.model, rule, random_weights(config.model))
        for form in FORMS:
            folders = {}
            seconds = {}
            for exporter in get_args(Exporter):
                progress(f"{form}, {exporter}: exporting and comparing with PyTorch")
                began = time.perf_counter()
                folders[exporter] = export(
                    trained, Path(name) / f"{form}-{exporter}", exporter=exporter, memory=form
                )
                seconds[exporter] = time.perf_counter() - began
            progress(f"{form}: timing {repeats} tokens of each graph")
            rows += _measure(config, rule, form, folders, seconds, threads=threads, repeats=repeats)
    return rows


def _measure(
    config: BenchmarkConfig,
    rule: MemoryRule,
    form: Form,
    folders: dict[Exporter, Path],
    seconds: dict[Exporter, float],
    *,
    threads: int,
    repeats: int,
) -> list[Row]:
    sessions = {
        exporter: open_checked(folder, threads=threads, operators="standard")
        for exporter, folder in folders.items()
    }
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (1, rule.slots + rule.segment))
    answers = {}
    memories = {}
    for exporter, session in sessions.items():
        answers[exporter], memories[exporter] = _feed(session, tokens)
    differences = {
        exporter: float(np.abs(answers[exporter] - answers["graph"]).max()) for exporter in sessions
    }
    times = {}
    for length, turns in ((1, repeats), (rule.segment, max(3, repeats // 10))):
        sides = {e: _step(session, memories[e], length) for e, session in sessions.items()}
        times[length] = take_turns(sides, repeats=turns)
    return [
        Row(
            form=form,
            exporter=exporter,
            mem_len=rule.mem_len,
            nodes=len(list(ir.load(folders[exporter] / GRAPH).graph)),
            export_seconds=seconds[exporter],
            token=times[1][exporter],
            segment=times[rule.segment][exporter],
            written_ratio=times[1][exporter].median / times[1]["graph"].median,
            difference=differences[exporter],
        )
        for exporter in sessions
    ]


def _feed(session: Session, tokens: np.ndarray) -> tuple[np.ndarray, Memory]:
    """log p of each token [N] but the first, fed in segments, and the memory after the last."""
    memory = session.start(1)
    pieces = []
    for at in range(0, tokens.shape[1] - 1, session.rule.segment):
        inputs = tokens[:, at : at + session.rule.segment][:, : tokens.shape[1] - 1 - at]
        targets = tokens[:, at + 1 : at + 1 + inputs.shape[1]]
        log_probs, memory = session.score(inputs, targets, memory)
        pieces.append(log_probs[0])
    return np.concatenate(pieces), memory


def _step(session: Session, memory: Memory, length: int) -> Callable[[], Any]:
    tokens = np.zeros((1, length), np.int64)
    return lambda: session.predict(tokens, memory)


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
