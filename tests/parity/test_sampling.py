"""Sampling, stop strings and the model's own settings in C++ and JavaScript are those of Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import runtimes
from runtimes.contract.sampling import write_sampling
from tests.parity.operations import Program
from tests.runtimes.contract.test_spec import in_place_cases
from tests.sampling import read_cases


@pytest.fixture(params=["cpp", "javascript"])
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = request.getfixturevalue(request.param)
    return found


def test_every_case_draws_its_token(program: Program) -> None:
    for case in read_cases():
        assert program.ask("draw", **case) == {"token": case["token"]}, case


def test_random_numbers_are_numpy_s(program: Program, cpp: Program) -> None:
    bits = 63 if program is cpp else 52  # JavaScript has no larger integers
    for seed, row in ((0, 0), (1, 0), ((1 << bits) + 5, (1 << 33) + 1)):
        uniforms = program.ask("uniforms", seed=seed, row=row)["uniforms"]
        assert uniforms == np.random.default_rng([seed, row]).random(8).tolist()


def test_memory_is_written_in_place_as_in_python(program: Program) -> None:
    for case in in_place_cases():
        assert program.ask("in_place", **case) == {"in_place": case["expected"]}, case


def test_stop_strings_end_a_text_as_in_python(
    program: Program, artefacts: dict[str, Path], text: str
) -> None:
    session = runtimes.open_session(artefacts["ring"])
    whole = "".join(piece.text for piece in runtimes.generate(session, text[:20], max_tokens=60, seed=9))
    program.ask("open", model=str(artefacts["ring"]))
    for stop in ([whole[30:33]], [whole[12:14], whole[10:15] + "\n"], ["no such text"]):
        pieces = list(runtimes.generate(session, text[:20], max_tokens=60, seed=9, stop=stop))
        program.ask("start", stream="a")
        found = program.ask("generate", stream="a", text=text[:20], max_tokens=60, seed=9, stop=stop)
        assert found["pieces"] == [piece.text for piece in pieces]
        assert found["ended"] == pieces[-1].ended


def test_the_model_recommends_its_sampling(
    program: Program, artefacts: dict[str, Path], text: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(artefacts["ring"], tmp_path / "own")
    write_sampling(folder, runtimes.Sampler(temperature=0.6, top_k=5, repetition_penalty=1.1))
    pieces = runtimes.generate(runtimes.open_session(folder), text[:20], max_tokens=40, seed=3)
    program.ask("open", model=str(folder))
    program.ask("start", stream="a")
    found = program.ask("generate", stream="a", text=text[:20], max_tokens=40, seed=3, recommended=True)
    assert found["tokens"] == [piece.token for piece in pieces]
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    for content, words in (
        ('{"top_p": 7}', "is 7; expected above 0 and at most 1"),
        ('{"topP": 0.9}', "unknown"),
        ('{"temperature": "1"}', "number"),
        ("[]", "object"),
    ):
        (wrong / "sampling.json").write_text(content)
        assert words in program.refusal("open", model=str(wrong))
