"""Comparing a session with a reference session, and timing it at several shapes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arithmetic import FLOAT, step_bytes, step_multiply_adds
from benchmarks.configs import BenchmarkConfig
from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps.models import rule_of
from benchmarks.measure import Timing, take_turns
from benchmarks.steps import filled
from runtimes import Session, check, load_memory, open_session, save_memory
from runtimes.contract.precision import MEMORY_IN_BYTES, TOLERANCES, MemoryPrecision, Precision
from runtimes.contract.rule import Mask, MemoryRule
from runtimes.contract.tensors import Form
from trainer.model.arithmetic import with_head
from trainer.model.config import ModelConfig

BATCHES = (1, 8)
COMPARED = 4  # segments of both sessions
LEAST_TOLERANCE = 1e-3  # nats, of single log-probabilities: both sides add in orders of their own
WEIGHT_BYTES: dict[Precision, float] = {
    "fp32": 4,
    "fp16": 2,
    "int8-stored": 4,  # once the graph is loaded
    "int8": 1,
    "fp8": 1,
    "int4": 0.5,
}
MEMORY_BYTES: dict[MemoryPrecision, float] = {"fp32": 4, "fp16": 2, "int8": 1}  # the scales of int8 left out
SAVED_TOLERANCE = 1e-3  # nats between a stream and the same stream saved and opened again


def tried(
    record: Record,
    folder: Path,
    session: Session,
    config: BenchmarkConfig,
    *,
    side: str,
    form: Form,
    precision: Precision,
    memory: MemoryPrecision = "fp32",
    mask: Mask = "same-length",
    artefact: Path | None = None,
    device: str = "auto",
) -> None:
    """Keeps what a session over `folder` does: its check, its scores, a saved stream, and its times.

    artefact: that of an engine; None where `folder` is one. Nothing is timed where a comparison has failed.
    """
    record.fact(f"{side}: computed by", session.computed_by)
    before = len(record.result.checks)
    with record.attempt(f"{side}: check"):
        report = check(folder, device=device)
        record.check(f"{side}: check", report.passed, report.sentence)
    with record.attempt(f"{side}: scores"):
        reference = open_session(artefact or folder, device="cpu")
        tolerance = tolerance_of(precision, memory)
        _compare(record, f"{side}: scores", session, reference, tolerance=tolerance)
    with record.attempt(f"{side}: a saved stream"):
        _continue(record, f"{side}: a saved stream", session)
    if not all(done.passed for done in record.result.checks[before:]):
        record.fact(f"{side}: times", "not measured, since a comparison has failed")
        return
    for batch in BATCHES:
        for tokens, repeats in ((1, config.token_repeats), (config.segment, 4 * config.repeats)):
            with record.attempt(f"{side}: timing {batch} x {tokens}"):
                timing = take_turns({"step": _call(session, batch, tokens)}, repeats=repeats)["step"]
                # A graph for ONNX Runtime stores its weights in fewer bits, and computes in fp32.
                for_engines = session.spec is not None and session.spec.target == "tensorrt"
                keep(
                    record,
                    timing,
                    config,
                    side=side,
                    form=form,
                    precision=precision,
                    memory=memory,
                    mask=mask,
                    halves=for_engines and precision != "fp32",
                    batch=batch,
                    tokens=tokens,
                )


def _compare(record: Record, name: str, session: Session, reference: Session, *, tolerance: float) -> None:
    """Keeps how far the log-probabilities are from the reference's, over segments and single tokens."""
    T, draw = session.rule.segment, np.random.default_rng(0)
    lengths = [T] * COMPARED + [1, 1, 1, max(1, T // 2)]
    tokens = draw.integers(0, session.vocab.size, (2, sum(lengths) + 1))
    answers = [_scores(side, tokens, lengths) for side in (session, reference)]
    worst = float(np.abs(answers[0] - answers[1]).max())
    bits = [-float(answer.mean()) / np.log(2) for answer in answers]
    said = (
        f"log-probabilities differ from ONNX Runtime's on the CPU by at most {worst:.2e} nats (tolerance "
        f"{tolerance:g}); {bits[0]:.4f} and {bits[1]:.4f} bits a token"
    )
    record.check(name, worst <= tolerance, said)


def _continue(record: Record, name: str, session: Session) -> None:
    """Keeps whether a stream that is saved and opened again goes on as the stream itself."""
    with tempfile.TemporaryDirectory() as folder:
        T, path = session.rule.segment, Path(folder) / "stream.safetensors"
        draw = np.random.default_rng(1).integers(0, session.vocab.size, (2, 2 * T + 1))
        _, memory = session.score(draw[:, :T], draw[:, 1 : T + 1], session.start(2))
        save_memory(memory, path)
        again = load_memory(path, session)
        answers = [session.score(draw[:, T:-1], draw[:, T + 1 :], side)[0] for side in (memory, again)]
    worst = float(np.abs(answers[0] - answers[1]).max())
    said = f"it goes on as the stream itself, at most {worst:.2e} nats apart (tolerance {SAVED_TOLERANCE:g})"
    record.check(name, worst <= SAVED_TOLERANCE, said)


def keep(
    record: Record,
    timing: Timing,
    config: BenchmarkConfig,
    *,
    side: str,
    form: Form,
    precision: Precision,
    halves: bool,
    batch: int,
    tokens: int,
    memory: MemoryPrecision = "fp32",
    mask: Mask = "same-length",
) -> None:
    """Keeps a timing with the physical limit of the step beside it.

    precision: of the weights. memory: of the memory. halves: whether the step computes in 16 bits, memory
    included.
    """
    rule = rule_of(config, mask)
    least = least_bytes(
        config.model, rule, form, batch=batch, precision=precision, halves=halves, memory=memory
    )
    record.time(
        timing,
        model=config.name,
        side=side,
        batch=batch,
        tokens=tokens,
        num_bytes=least,
        multiply_adds=batch * step_multiply_adds(with_head(config.model), rule, form, tokens),
        halves=halves,
    )


def tolerance_of(precision: Precision, memory: MemoryPrecision = "fp32") -> float:
    """By how many nats the log-probabilities of two devices may differ: keys and values on the border
    between two numbers of a coarse memory are rounded to either.
    """
    of_memory = {"fp32": 0.0, "fp16": TOLERANCES["fp16"], "int8": MEMORY_IN_BYTES[0]}[memory]
    return max(TOLERANCES[precision], of_memory, LEAST_TOLERANCE)


def least_bytes(
    model: ModelConfig,
    rule: MemoryRule,
    form: Form,
    *,
    batch: int,
    precision: Precision,
    halves: bool,
    memory: MemoryPrecision = "fp32",
) -> float:
    """The bytes of weights, tables and visible memory that a step reads.

    The form `shift` writes its whole memory again besides. Of an adaptive softmax the head alone is counted.
    """
    of_table = 2 if halves else 4  # bytes of a number
    of_memory = 2 if halves else MEMORY_BYTES[memory]
    weights_and_tables = step_bytes(with_head(model), rule, form, streams=0) / FLOAT
    tables = model.layers * model.heads * model.head_dim * rule.position_rows
    seen = step_bytes(with_head(model), rule, form, streams=batch) / FLOAT - weights_and_tables
    moved = 3 * seen if form == "shift" else seen  # read, and read once more and written
    matrices = WEIGHT_BYTES[precision] * (weights_and_tables - tables)
    return matrices + of_table * tables + of_memory * moved


def _scores(session: Session, tokens: np.ndarray, lengths: list[int]) -> np.ndarray:
    memory, pieces, at = session.start(len(tokens)), [], 0
    for length in lengths:
        piece = tokens[:, at : at + length], tokens[:, at + 1 : at + length + 1]
        log_probs, memory = session.score(*piece, memory)
        pieces.append(log_probs)
        at += length
    return np.concatenate(pieces, axis=1)


def _call(session: Session, batch: int, tokens: int) -> Callable[[], Any]:
    """One token is predicted from; a segment is scored, as generation and scoring do."""
    memory, segment = filled(session, batch), np.zeros((batch, tokens), np.int64)
    if tokens == 1:
        return lambda: session.predict(segment, memory)
    return lambda: session.score(segment, segment, memory)
