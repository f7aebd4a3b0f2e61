"""Compares the C++ library with the Python package on one artefact: answers, tokens and saved streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from runtimes.contract.checks import load_memory
from runtimes.contract.memory import save_memory
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.sessions.onnx_runtime import KernelChoice, OrtSession
from runtimes.tasks.generate import generate
from tests.cpp.program import Driver

GREEDY = 200  # tokens


def compare(
    driver: Driver, folder: Path, scratch: Path, *, fused: Path | None = None, nats: float = 1e-5
) -> None:
    """Reference, greedy and drawn tokens, rows of a batch, and streams that change sides in both directions.

    fused: the library of the fused operator. nats: how far log-probabilities may differ; both sides run the
    same ONNX Runtime, so this is far below the limits of the reference.
    """
    more: dict[str, Any] = {} if fused is None else {"fused": str(fused)}
    kernel: KernelChoice = "standard" if fused is None else "fused"
    session = OrtSession.open(folder, threads=1, kernel=kernel)
    report = driver.ask("check", folder, **more)
    assert report.get("passed"), report
    spec = session.spec
    assert (report["tolerance"], report["mean_tolerance"]) == (spec.tolerance, spec.mean_tolerance)
    _compare_tokens(driver, session, folder, more)
    _compare_steps(driver, session, folder, scratch, more, nats)


def _compare_tokens(driver: Driver, session: Session, folder: Path, more: dict[str, Any]) -> None:
    """Greedy tokens, and tokens drawn with the same seed."""
    prompt = (np.arange(1, 12) * 5 % session.vocab.size).tolist()
    for tokens, options in (
        (GREEDY, {"temperature": 0.0}),
        (40, {"temperature": 0.9, "top_k": 7, "seed": 5}),
        (40, {"temperature": 1.3, "top_p": 0.8, "seed": 1 << 40}),
        (40, {"min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2}),
    ):
        seed = int(options.get("seed", 0))
        sampler = Sampler(**{name: value for name, value in options.items() if name != "seed"})  # type: ignore[arg-type]
        pieces = list(generate(session, [prompt], max_tokens=tokens, sampler=sampler, seed=seed))
        found = driver.ask("generate", folder, ids=prompt, tokens=tokens, **options, **more)
        assert found.get("ids") == [piece.token for piece in pieces], options
        assert found["pieces"] == [piece.text for piece in pieces]


def _compare_steps(
    driver: Driver, session: Session, folder: Path, scratch: Path, more: dict[str, Any], nats: float
) -> None:
    """Scores of two rows, one padded on the left; then each side continues the other's streams."""
    segment = session.rule.segment
    lengths = [1, segment, max(1, segment - 3), segment, 1]
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, session.vocab.size, (2, sum(lengths) + 1))
    mine, theirs = scratch / "python.stream", scratch / "cpp.stream"

    def python(memory: Any) -> np.ndarray:
        scores, at = [], 0
        for length in lengths:
            part = slice(at, at + length)
            scores.append(session.score(tokens[:, part], tokens[:, at + 1 : at + length + 1], memory)[0])
            at += length
        return np.concatenate([score.ravel() for score in scores])

    memory = session.start(2)
    memory.positions[1] = -3
    expected, question = python(memory), {"ids": tokens.ravel().tolist(), "lengths": lengths, **more}
    save_memory(memory, mine)
    found = driver.ask("steps", folder, batch=2, positions=[0, -3], save=str(theirs), **question)
    seen = np.ones(len(expected), bool)
    seen[[1, *range(2 + segment, 2 + segment + 3)]] = False  # answers at padding mean nothing
    assert found["positions"] == memory.positions.tolist()
    assert np.abs(np.array(found["scores"]) - expected)[seen].max() < nats
    # Every pair of a writer and a reader continues alike.
    continued = [
        np.array(driver.ask("steps", folder, load=str(mine), **question)["scores"]),
        np.array(driver.ask("steps", folder, load=str(theirs), **question)["scores"]),
        python(load_memory(mine, session)),
        python(load_memory(theirs, session)),
    ]
    for other in continued[1:]:
        assert np.abs(other - continued[0]).max() < nats
    loaded = load_memory(mine, session), load_memory(theirs, session)
    for name, array in loaded[0].tensors.items():
        assert np.abs(array.astype(np.float32) - loaded[1].tensors[name]).max(initial=0) < nats
