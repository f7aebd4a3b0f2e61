"""C++ and JavaScript compute steps that are no language model, and refuse what does not fit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import check
from tests.parity.operations import Implementation, Program, Reference
from tests.sealing import sealed
from tests.steps import observed
from tests.xl_export.tracing.modules import T


def flat(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: x.ravel().tolist() for name, x in inputs.items()}


@pytest.fixture(params=["cpp", "javascript"])
def program(request: pytest.FixtureRequest) -> Program:
    library: Program = request.getfixturevalue(request.param)
    return library


def test_named_steps_give_python_s_answers_and_streams(
    program: Program, policy: Path, tmp_path: Path
) -> None:
    follow(program, policy, tmp_path)


@pytest.mark.parametrize(
    "how", [{"worker": True}, {"device": "native"}, {"more": {"inPlace": False}}], ids=str
)
def test_named_steps_run_in_every_way_of_javascript(
    javascript: Program, policy: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    follow(javascript, policy, tmp_path, **how)


@pytest.mark.parametrize("kind", ["server", "replica"])
def test_servers_answer_named_steps_as_python_does(
    kind: str, serve: Callable[[str, Path], Implementation], policy: Path, tmp_path: Path
) -> None:
    follow(serve(kind, policy), policy, tmp_path, rows=1)


def follow(program: Implementation, policy: Path, tmp_path: Path, rows: int = 2, **how: Any) -> None:
    """Steps next to Python, with restarts, forks, and files of streams in both directions."""
    for name in ("python", "own"):
        (tmp_path / name).mkdir()
    reference = Reference.of_steps(policy, tmp_path / "python", rows=rows)
    program.ask("open", model=str(policy), **how)
    assert reference.check(program, tmp_path / "own")["step by name"] < 1e-5


def test_a_graph_of_fixed_sizes_takes_no_other_step(
    program: Program, module_artefact: Callable[[str], Path]
) -> None:
    program.ask("open", model=str(module_artefact("policy of 2 rows")))
    assert program.ask("check")["passed"]
    program.ask("start", stream="a", rows=2)
    refused = program.refusal("step by name", stream="a", inputs=flat(observed(2, 1, 0)))
    assert f"exported for exactly 2 rows of {T}" in refused


def test_graphs_of_fixed_sizes_are_chosen_by_the_length_of_a_step(
    program: Program, module_artefact: Callable[[str], Path], tmp_path: Path
) -> None:
    follow(program, module_artefact("policy of 2 graphs"), tmp_path, rows=1)


def test_a_named_step_in_int8_passes_its_own_check_only(
    program: Program, module_artefact: Callable[[str], Path], tmp_path: Path
) -> None:
    artefact = module_artefact("wide in int8")
    program.ask("open", model=str(artefact))
    assert program.ask("check")["passed"]
    other = shutil.copytree(artefact, tmp_path / "other")
    place = json.loads((other / "reference.json").read_text())["outputs"]["value"]
    answers = bytearray((other / "reference.bin").read_bytes())
    values = np.frombuffer(answers, "<f4", math.prod(place["shape"]), place["offset"])
    values *= -1  # small outputs, whose differences are far below 1
    (other / "reference.bin").write_bytes(answers)
    spec = json.loads((other / "spec.json").read_text())
    (other / "spec.json").write_bytes(sealed(spec, other, "reference.bin"))
    program.ask("open", model=str(other))
    assert not program.ask("check")["passed"]
    assert not check(other).passed


@pytest.mark.parametrize("name", ["signs", "bounded"])
def test_a_row_restarts_clean_although_no_output_shows_its_overflow(
    name: str, program: Program, module_artefact: Callable[[str], Path], tmp_path: Path
) -> None:
    program.ask("open", model=str(module_artefact(name)))
    clean = {"input": [0.5] * (4 * T)}
    program.ask("start", stream="a")
    program.ask("step by name", stream="a", inputs={"input": [3e38] * (4 * T)})
    program.ask("fork", stream="a", **{"as": "fork"})
    for stream in ("a", "fork"):
        program.ask("restart", stream=stream, row=0)
    program.ask("save", stream="a", file=str(tmp_path / "streams"))
    program.ask("load", stream="loaded", file=str(tmp_path / "streams"))
    program.ask("start", stream="new")
    expected = program.ask("step by name", stream="new", inputs=clean)
    for stream in ("a", "fork", "loaded"):
        assert program.ask("step by name", stream=stream, inputs=clean) == expected


def test_named_steps_that_do_not_fit_are_refused(program: Program, policy: Path) -> None:
    program.ask("open", model=str(policy))
    program.ask("start", stream="a")
    step = flat(observed(1, 2, 0))
    ask = lambda **changed: program.refusal("step by name", stream="a", inputs=step | changed)  # noqa: E731
    assert "previous has the id 3; expected 0 to 2" in ask(previous=[0, 3])
    assert "previous has 3 numbers" in ask(previous=[0, 1, 2])
    assert "goal has 1 numbers; expected 2." in ask(goal=[0.5])
    assert "goal has a number that is not finite" in ask(goal=[0.5, 1e39])
    assert f"takes at most {T}" in program.refusal(
        "step by name", stream="a", inputs=flat(observed(1, T + 1, 0))
    )
    assert "4 inputs were given; expected observation, previous, goal" in ask(other=[0.5])
    no_model = (
        "no language model: its step reads observation, previous, goal and returns action, worth, features"
    )
    assert no_model in program.refusal("encode", text="a")
    assert no_model in program.refusal("predict", stream="a", tokens=[[0, 1]])
    assert no_model in program.refusal("score", stream="a", tokens=[[0, 1]])
    assert no_model in program.refusal("generate", stream="a", tokens=[0], max_tokens=1)
    program.ask("pad", stream="a", positions=[-1])
    assert "does not keep the promise `padding`" in ask()


def test_rows_and_cuts_that_are_not_promised_are_refused(
    program: Program, policy: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(policy, tmp_path / "artefact")
    spec = json.loads((folder / "spec.json").read_text()) | {"without": ["rows", "cuts"]}
    (folder / "spec.json").write_bytes(sealed(spec))
    program.ask("open", model=str(folder))
    program.ask("start", stream="a", rows=2)
    two = program.refusal("step by name", stream="a", inputs=flat(observed(2, 1, 0)))
    assert "does not keep the promise `rows`" in two
    program.ask("start", stream="a")
    program.ask("step by name", stream="a", inputs=flat(observed(1, 1, 0)))
    again = program.refusal("step by name", stream="a", inputs=flat(observed(1, 1, 1)))
    assert "does not keep the promise `cuts`, and a row is at position 1" in again


def test_javascript_refuses_other_types_and_shapes(javascript: Program, policy: Path) -> None:
    javascript.ask("open", model=str(policy))
    javascript.ask("start", stream="a")
    step = flat(observed(1, 2, 0))
    ask = lambda goal: javascript.refusal("step by name", stream="a", inputs=step | {"goal": goal})  # noqa: E731
    assert 'goal is ["a","b"]; expected a Float32Array' in ask(["a", "b"])
    assert "goal has the shape [2]; expected [1,2]" in ask({"data": [0, 0], "shape": [2]})
    assert "only from a ring; copy() the memory" in javascript.refusal("rewind", stream="a", count=1)
