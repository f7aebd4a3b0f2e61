"""One token with full memory in each of the three forms of memory: ring, shift and hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from benchmarks.case import Case, Claim, Column, Job, Line
from benchmarks.checked_sessions import Operators, agreed, fed, open_checked, step_of
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_artefact
from benchmarks.runs import operators as operators_of
from runtimes.contract.tensors import Form

FORMS: tuple[Form, ...] = get_args(Form)
TOLERANCE = 1e-4  # nats, between the forms


@dataclass(frozen=True, kw_only=True)
class Row:
    """One form of memory."""

    form: Form
    mem_len: int
    #: The time of one token.
    token: Timing
    #: This time over the ring's.
    ring_ratio: float
    #: What computed this form.
    operators: Operators = "standard"


def run(job: Job) -> list[Row]:
    """A row for each form, all measured in turns after a comparison with PyTorch and with one another.

    --operators is for the ring; the other forms always use standard operators.
    """
    rule = job.rule
    model = job.config.model
    operators: dict[Form, Operators] = {
        form: job.operators if form == "ring" else "standard" for form in FORMS
    }
    sessions = {
        form: open_checked(random_artefact(job, form), threads=job.threads, operators=operators[form])
        for form in FORMS
    }
    repeats = job.repeats(job.config.token_repeats)
    job.progress(f"comparing the forms with one another, then timing {repeats} tokens of each")
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (1, rule.slots + rule.segment))
    answers = {form: fed(session, tokens)[0] for form, session in sessions.items()}
    for form, answer in answers.items():
        difference = float(np.abs(answer - answers["ring"]).max())
        agreed(difference, TOLERANCE, f"the {form} form differs from the ring")
    times = take_turns({form: step_of(session) for form, session in sessions.items()}, repeats=repeats)
    return [
        Row(
            form=form,
            mem_len=rule.mem_len,
            token=times[form],
            ring_ratio=times[form].median / times["ring"].median,
            operators=operators[form],
        )
        for form in FORMS
    ]


def _hidden(lines: Sequence[Line]) -> float:
    return next(float(row["ring_ratio"]) for row, _ in lines if row["form"] == "hidden")


CASE = Case(
    name="memory-forms",
    run=run,
    keys=("form", "mem_len", "operators"),
    columns=(
        Column("form", lambda row, run: f"`{row['form']}`"),
        Column("operators", lambda row, run: operators_of(row)),
        Column("ms per token", "token"),
        Column("times the ring", "ring_ratio", ".2f"),
    ),
    notes=lambda lines: [f"Memory of {lines[0].row['mem_len']:,} tokens."],
    claims=(
        Claim(
            config="enwik8-base",
            limit=6.0,
            text="`hidden` takes at least {limit:g} times as long as `ring`",
            found="it took {value:.1f} times as long",
            value=_hidden,
            least=True,
        ),
    ),
    options=("config", "repeats", "mem-len", "operators"),
    published=lambda history: [history.newest("memory-forms", "enwik8-base", operators="fused")],
)
