"""A ring artefact loads in onnxruntime-genai as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes import Sampler, generate, open_session

og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai has no package for this platform")
PROMPT, LENGTH = "The function", 60


def greedy(artefact: Path, prompt: str) -> list[int]:
    pieces = generate(open_session(artefact), prompt, max_tokens=LENGTH, sampler=Sampler(temperature=0))
    return [piece.token for piece in pieces]


def append(generator: object, rows: np.ndarray, segment: int) -> None:
    """Feeds prompts [B, N] in pieces that the ring has room for."""
    for at in range(0, rows.shape[1], segment):
        generator.append_tokens(rows[:, at : at + segment].astype(np.int32))  # type: ignore[attr-defined]


def test_genai_generates_the_same_tokens_far_beyond_the_capacity_of_the_ring(
    artefacts: dict[str, Path],
) -> None:
    session = open_session(artefacts["ring"])
    assert 2 * session.rule.slots < LENGTH
    generator = og.Generator(model := og.Model(str(artefacts["ring"])), og.GeneratorParams(model))
    append(generator, session.vocab.encode(PROMPT)[None], session.rule.segment)
    found = []
    while len(found) < LENGTH:
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    assert found == greedy(artefacts["ring"], PROMPT)


def test_genai_runs_a_batch(artefacts: dict[str, Path]) -> None:
    session = open_session(artefacts["ring"])
    prompts = ["The func", "a statem"]  # genai takes the prompts of a batch in one piece
    params = og.GeneratorParams(model := og.Model(str(artefacts["ring"])))
    params.set_search_options(batch_size=2)
    generator = og.Generator(model, params)
    append(generator, np.stack([session.vocab.encode(prompt) for prompt in prompts]), session.rule.segment)
    found = []
    while len(found) < LENGTH:
        generator.generate_next_token()
        found.append([int(token) for token in generator.get_next_tokens()])
    assert [list(row) for row in zip(*found, strict=True)] == [
        greedy(artefacts["ring"], prompt) for prompt in prompts
    ]


def test_only_the_ring_writes_a_genai_configuration(artefacts: dict[str, Path]) -> None:
    assert {form for form, folder in artefacts.items() if (folder / "genai_config.json").exists()} == {"ring"}
