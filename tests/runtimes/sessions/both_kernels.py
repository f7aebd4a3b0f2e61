"""Compares the fused operator with the standard operators, which are the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtimes.contract.precision import MemoryPrecision
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import SCALE
from runtimes.sessions.onnx_runtime import OrtSession
from tests.streams import feed, rows
from trainer.model.config import SpanConfig
from xl_export.artefact.export import export


def compare(artefact: Path, stream: np.ndarray, cut: list[int], tolerance: float = 1e-4) -> None:
    """Both graphs over the stream; one row begins with padding and starts a new text on the way."""
    half, answers = len(cut) // 2, []
    padding = min(5, sum(cut[:half]) - 1)
    for kernel in ("standard", "fused"):
        session = OrtSession.open(artefact, kernel=kernel)  # type: ignore[arg-type]
        memory = session.start(len(stream))
        memory.positions[-1] = -padding
        before, memory = feed(session, stream[:, : sum(cut[:half])], cut[:half], memory)
        memory.positions[0] = 0
        after, memory = feed(session, stream[:, sum(cut[:half]) :], cut[half:], memory)
        answers.append(
            (
                np.concatenate([before[:-1, padding:], after[:-1]], axis=1),
                before[-1, padding:],
                after,
                memory.tensors,
            )
        )
    for standard, mine in zip(answers[0][:3], answers[1][:3], strict=True):
        assert np.isfinite(mine).all()
        assert np.abs(standard - mine).max() < tolerance
    refuse_other_memory(answers[0][3], answers[1][3], tolerance)


def refuse_other_memory(right: dict[str, np.ndarray], mine: dict[str, np.ndarray], tolerance: float) -> None:
    """Fails where two sets of memory tensors differ by more than a tolerance.

    Bytes are compared as the floats that they stand for; a value on the edge between two may go either way.
    """
    for name, array in right.items():
        edge: float | np.ndarray = 0.0
        sides = array, mine[name]
        if array.dtype == np.int8:
            edge = 1.01 * right[name + SCALE]
            sides = array * right[name + SCALE], mine[name] * mine[name + SCALE]
        assert (np.abs(sides[0] - sides[1]) < tolerance + edge).all(), name


def compare_random_model(
    chance: random.Random,
    make_run: Callable[..., Path],
    tokens: np.ndarray,
    folder: Path,
    memory: MemoryPrecision = "fp32",
) -> None:
    """Zero initial memory, persistent vectors and gated spans, in all their combinations."""
    mem_len, segment = chance.choice((0, 5, 40, 150, 300)), chance.choice((1, 6, 40, 150))
    sizes: dict = {
        "layers": 1,
        "head_dim": chance.choice((7, 16, 32, 48)),
        "pre_norm": chance.random() < 0.5,
        "positions": chance.choice(("relative", "shaw", "learned")),
    }
    if sizes["positions"] != "relative":
        sizes["context"] = mem_len + 1
    if chance.random() < 0.6:
        sublayers = chance.choice(
            ("all-attention", "all-attention", "attn-split", "head-split", "single-head")
        )
        sizes |= {"d_ff": 0, "sublayers": sublayers, "persistent": chance.choice((1, 5, 140))}
    epsilon = 0.0
    if mem_len and chance.random() < 0.6:
        epsilon = chance.choice((0.0, 1e-8, 0.3))
        sizes["span"] = SpanConfig(maximum=mem_len, ramp=chance.choice((2, 32)), epsilon=epsilon)
    rule = MemoryRule(
        mem_len=mem_len,
        segment=segment,
        mask=chance.choice(("same-length", "full")),
        initial_memory=chance.choice(("zeros", "zeros", "masked")),
        include_self=mem_len == 0 or chance.random() < 0.5,
    )
    run = make_run(rule=rule, seed=chance.randrange(99), **sizes)
    cut = [segment, 1, max(1, segment // 3), segment, 1, segment, 1] * 2
    artefact = export(run, folder / "artefact", memory_precision=memory)
    compare(artefact, rows(tokens, 2, sum(cut)), cut, 5e-3 if memory == "int8" else 1e-4)
