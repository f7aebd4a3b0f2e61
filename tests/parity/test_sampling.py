"""Sampling, stop strings and the model's own settings in C++ and JavaScript are those of Python."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import runtimes
from runtimes.base.errors import UserError
from runtimes.contract.sampling import read_sampling, write_sampling
from tests.parity.operations import Program
from tests.runtimes.contract.test_spec import in_place_cases
from tests.sampling import NO_FILES, file_cases, put_no_file, read_cases


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
    (wrong := shutil.copytree(folder, tmp_path / "wrong") / "sampling.json").write_text('{"top_p": 7}')
    assert "is 7; expected above 0 and at most 1" in program.refusal("open", model=str(wrong.parent))


@pytest.fixture(params=["python", "cpp", "javascript"])
def read(request: pytest.FixtureRequest) -> Callable[[Path], runtimes.Sampler]:
    """A reader of the `sampling.json` in a folder, which raises UserError."""
    if request.param == "python":
        return read_sampling
    program: Program = request.getfixturevalue(request.param)

    def settings(folder: Path) -> runtimes.Sampler:
        answer = program.ask("sampling", folder=str(folder))
        if "error" in answer:
            raise UserError(answer["error"])
        named = {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key): answer[key] for key in answer}
        return runtimes.Sampler(**{**named, "top_k": named["top_k"] or None})

    return settings


def test_every_implementation_accepts_the_same_settings(
    read: Callable[[Path], runtimes.Sampler], tmp_path: Path
) -> None:
    assert read(tmp_path) == runtimes.Sampler()
    wrong = []
    for content, expected in file_cases().items():
        (tmp_path / "sampling.json").write_bytes(content)
        found: runtimes.Sampler | UserError | None
        try:
            found = read(tmp_path)
        except UserError as error:
            found = None if "sampling.json" in str(error) else error
        if found != expected:
            wrong.append((content, found, expected))
    assert wrong == []


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_refused_as_settings(
    kind: str, read: Callable[[Path], runtimes.Sampler], tmp_path: Path
) -> None:
    put_no_file(tmp_path / "sampling.json", kind)
    with pytest.raises(UserError, match=r"sampling\.json"):
        read(tmp_path)
