"""One step with full memory, on ONNX Runtime and in PyTorch with the same memory.

- `decode`: one token, for several lengths of memory
- `segment`: a whole segment of one stream
- `batch`: one token of each of several streams
- `form`: one token with each form of memory, on ONNX Runtime only

The memory of both sides holds keys and values, so neither computes the past again. A step takes at least the
time to read its weights, tables and visible memory, or to compute its multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from benchmarks.arithmetic import step_bytes
from benchmarks.checked_sessions import Operators, agreed, fed, open_checked, step_of
from benchmarks.harness import OPERATORS, Document, Job, Row, lengths_option, number, only_option, ratio
from benchmarks.measure import least_ms, take_turns, timing
from benchmarks.models import artefact_of, run_of
from runtimes.contract.tensors import Form
from trainer.model.arithmetic import step_multiply_adds
from trainer.run.checkpoint import load_run
from trainer.run.session import ProjectedTorchSession

KINDS = ("decode", "segment", "batch", "form")
STREAMS = (1, 8, 32)
FORMS: tuple[Form, ...] = get_args(Form)
FORM_TOLERANCE = 1e-4  # nats between two forms
OPTIONS = (
    only_option(KINDS, "Measure this kind of step only"),
    lengths_option("Lengths of memory of `decode`, such as 64,128,256; the default depends on the model."),
    OPERATORS,
)


def run(job: Job) -> Iterator[Row]:
    """The rows of each kind. The fused operator is only for the ring."""
    kinds = job["only"] or KINDS
    one, several = job.repeats(job.config.token_repeats), job.repeats(job.config.repeats)
    if "decode" in kinds:
        for length in job.lengths:
            yield from _compared(job.with_memory(length), "decode", [(1, 1)], one)
    if "segment" in kinds:
        yield from _compared(job, "segment", [(1, job.config.segment)], several)
    if "batch" in kinds:
        yield from _compared(job, "batch", [(streams, 1) for streams in STREAMS], several)
    if "form" in kinds:
        yield from _forms(job, one)


def _compared(job: Job, kind: str, steps: Sequence[tuple[int, int]], repeats: int) -> Iterator[Row]:
    """A row for each pair of streams and tokens."""
    rule = job.rule
    artefact = open_checked(_exported(job, "ring"), threads=job.threads, operators=job.operators)
    trained = load_run(run_of(job))
    torch.set_num_threads(job.threads)
    torch_run = ProjectedTorchSession(trained.model.eval(), trained.vocab, rule, weights=trained.sha256)
    for streams, tokens in steps:
        job.say(f"memory of {rule.mem_len} tokens: timing {repeats} steps of {streams} x {tokens} tokens")
        sides = {
            "onnxruntime_ms": step_of(artefact, streams, tokens),
            "pytorch_ms": step_of(torch_run, streams, tokens),
        }
        times = take_turns(sides, repeats=repeats)
        yield {
            "kind": kind,
            "form": "ring",
            "operators": job.operators,
            "mem_len": rule.mem_len,
            "streams": streams,
            "tokens": tokens,
            **{side: timing(ms) for side, ms in times.items()},
            "step_bytes": step_bytes(job.config.model, rule, "ring", streams=streams),
            "multiply_adds": streams * step_multiply_adds(job.config.model, rule, "ring", tokens),
        }


def _forms(job: Job, repeats: int) -> Iterator[Row]:
    """A row for each form of memory, after a comparison with the ring."""
    rule = job.rule
    operators: dict[Form, Operators] = {
        form: job.operators if form == "ring" else "standard" for form in FORMS
    }
    sessions = {
        form: open_checked(_exported(job, form), threads=job.threads, operators=operators[form])
        for form in FORMS
    }
    job.say(f"comparing the forms with one another, then timing {repeats} tokens of each")
    tokens = np.random.default_rng(0).integers(0, job.config.model.vocab_size, (1, rule.slots + rule.segment))
    answers = {form: fed(session, tokens)[0] for form, session in sessions.items()}
    for form, answer in answers.items():
        difference = float(np.abs(answer - answers["ring"]).max())
        agreed(difference, FORM_TOLERANCE, f"the {form} form differs from the ring")
    times = take_turns({form: step_of(session) for form, session in sessions.items()}, repeats=repeats)
    for form, ms in times.items():
        yield {
            "kind": "form",
            "form": form,
            "operators": operators[form],
            "mem_len": rule.mem_len,
            "streams": 1,
            "tokens": 1,
            "onnxruntime_ms": timing(ms),
        }


def _exported(job: Job, form: Form) -> Path:
    """The artefact, exported once."""
    folder = job.folder / form
    return folder if folder.exists() else artefact_of(job, form)


def _least(row: Row, document: Document) -> float | None:
    if "multiply_adds" not in row:
        return None
    return least_ms(document["limits"], row["step_bytes"], row["multiply_adds"])


KEYS = ("kind", "form", "operators", "mem_len", "streams", "tokens")
COLUMNS = {
    "form": lambda row, _: f"`{row['form']}`" if row["kind"] == "form" else "",
    "operators": "operators",
    "memory, tokens": "mem_len",
    "streams": "streams",
    "tokens of each": "tokens",
    "at least, ms": _least,
    "ONNX Runtime, ms": "onnxruntime_ms",
    "PyTorch, ms": "pytorch_ms",
    "PyTorch / ONNX Runtime": lambda row, _: (
        ratio(row, "pytorch_ms", "onnxruntime_ms") if "pytorch_ms" in row else None
    ),
    "tokens/s": lambda row, _: number(1e3 * row["streams"] * row["tokens"] / row["onnxruntime_ms"]["median"]),
}
NOTE = "Times are for a whole step."
