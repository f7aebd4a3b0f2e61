"""One token with full memory in each of the three forms of memory: ring, shift and hidden.

The limit of `ring` and `shift` is reading: weights, visible memory and position tables at the measured rate
of the machine. `hidden` computes all keys and values again, and its limit is the multiply-adds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.arithmetic import step_bytes, step_multiply_adds
from benchmarks.case import (
    Case,
    CaseRow,
    Claim,
    Column,
    Line,
    config_option,
    decimal,
    mem_len_option,
    milliseconds,
    number,
    operators_option,
    repeats_option,
)
from benchmarks.checked_sessions import Operators, open_checked
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_weights, write_artefact
from benchmarks.runs import operators as operators_of
from runtimes.base.errors import ArtefactError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.tensors import Form

FORMS: tuple[Form, ...] = get_args(Form)
TOLERANCE = 1e-4  # nats, between the forms


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One form of memory."""

    form: Form
    mem_len: int
    #: The time of one token.
    token: Timing
    #: This time over the ring's.
    ring_ratio: float
    num_bytes: int
    multiply_adds: int
    #: Of log-probabilities from the ring's, at most, in nats.
    difference: float
    #: What computed this form.
    operators: Operators = "standard"


def run(
    config: BenchmarkConfig,
    *,
    mem_len: int | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    operators: Operators = "standard",
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each form, all measured in turns after a comparison with PyTorch and with one another.

    An argument that is None is taken from the configuration. operators: of the ring; the other forms always
    use standard operators.
    """
    threads = checked_threads(threads)
    repeats = checked_repeats(repeats, config.token_repeats)
    rule = MemoryRule(mem_len=config.mem_len if mem_len is None else mem_len, segment=config.segment)
    weights = random_weights(config.model)
    with tempfile.TemporaryDirectory() as folder:
        sessions: dict[Form, Session] = {}
        for form in FORMS:
            progress(f"{form}: exporting and comparing with PyTorch")
            artefact = write_artefact(Path(folder), config.model, rule, weights, form)
            sessions[form] = open_checked(
                artefact, threads=threads, operators=operators if form == "ring" else "standard"
            )
        progress(f"comparing the forms with one another, then timing {repeats} tokens of each")
        return _measure(config, rule, sessions, repeats=repeats, operators=operators)


def _measure(
    config: BenchmarkConfig,
    rule: MemoryRule,
    sessions: Mapping[Form, Session],
    *,
    repeats: int,
    operators: Operators,
) -> list[Row]:
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (1, rule.slots + rule.segment))
    streams = {form: feed(session, tokens) for form, session in sessions.items()}
    differences = {
        form: _difference(form, answers, streams["ring"][0]) for form, (answers, _) in streams.items()
    }
    sides = {form: _one_token(sessions[form], memory) for form, (_, memory) in streams.items()}
    times = take_turns(sides, repeats=repeats)
    return [
        Row(
            form=form,
            mem_len=rule.mem_len,
            token=times[form],
            ring_ratio=times[form].median / times["ring"].median,
            num_bytes=step_bytes(config.model, rule, form),
            multiply_adds=step_multiply_adds(config.model, rule, form, 1),
            difference=differences[form],
            operators=operators if form == "ring" else "standard",
        )
        for form in FORMS
    ]


def feed(session: Session, tokens: np.ndarray) -> tuple[np.ndarray, Memory]:
    """Log-probabilities [N, V] after each of tokens [1, N], fed in segments, and the memory after the last.

    The memory is empty before the first token.
    """
    memory = session.start(1)
    pieces = []
    for at in range(0, tokens.shape[1], session.rule.segment):
        logits, memory = session.step(tokens[:, at : at + session.rule.segment], memory)
        pieces.append((logits - log_sum_exp(logits)[..., None])[0])
    return np.concatenate(pieces), memory


def _one_token(session: Session, memory: Memory) -> Callable[[], Any]:
    token = np.zeros((1, 1), np.int64)
    return lambda: session.step(token, memory)


def _difference(form: Form, answers: np.ndarray, ring: np.ndarray) -> float:
    worst = float(np.abs(answers - ring).max())
    if not worst <= TOLERANCE:
        raise ArtefactError(
            f"the {form} form differs from the ring by {worst:.3g} nats, more than {TOLERANCE:g}; nothing "
            "was measured, try another version of onnxruntime or report this."
        )
    return worst


def _hidden(lines: Sequence[Line]) -> float:
    return next(float(row["ring_ratio"]) for row, _ in lines if row["form"] == "hidden")


CASE = Case(
    name="memory-forms",
    summary="one token in each of the three forms of memory",
    run=run,
    keys=("form", "mem_len", "operators"),
    columns=(
        Column("form", lambda row, run: f"`{row['form']}`"),
        Column("operators", lambda row, run: operators_of(row)),
        Column("ms per token", milliseconds("token")),
        Column("times the ring", decimal("ring_ratio")),
        Column(
            "at least by reading, ms", lambda row, run: number(run.reading(row["num_bytes"])), detail=True
        ),
        Column(
            "at least by computing, ms",
            lambda row, run: number(run.computing(row["multiply_adds"])),
            detail=True,
        ),
    ),
    notes=lambda lines: [f"Memory of {lines[0].row['mem_len']:,} tokens."],
    claims=(
        Claim(
            limit="ring_claim",
            text="`hidden` takes at least {limit:g} times as long as `ring`",
            found="it took {value:.1f} times as long",
            value=_hidden,
            least=True,
        ),
    ),
    options=(config_option, repeats_option, mem_len_option, operators_option),
    published=lambda history: [history.newest("memory-forms", "enwik8-base", operators="fused")],
)
