"""The C++ library computes steps that are no language model, and refuses what is not promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import load_memory, open_session, save_memory
from tests.parity.operations import Program
from tests.xl_export.tracing import modules
from tests.xl_export.tracing.modules import RULE, T
from xl_export import trace


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("named") / "policy"
    return trace(modules.Policy(), folder, rule=RULE, without={"padding"})


def fed(rows: int, count: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "observation": draw.standard_normal((rows, count, 5), np.float32),
        "previous": draw.integers(3, size=(rows, count)),
        "goal": draw.standard_normal((rows, 2), np.float32),
    }


def flat(inputs: dict[str, np.ndarray]) -> dict[str, list[Any]]:
    return {name: x.ravel().tolist() for name, x in inputs.items()}


def test_named_steps_give_python_s_answers_and_streams(cpp: Program, policy: Path, tmp_path: Path) -> None:
    session = open_session(policy)
    memory = session.start(2)
    session.step(fed(2, 3, 0), memory)
    save_memory(memory, tmp_path / "before")
    cpp.ask("open", model=str(policy))
    assert cpp.ask("check")["passed"]
    cpp.ask("load", stream="a", file=str(tmp_path / "before"))
    for count in (1, T, 2):
        outputs, memory = session.step(fed(2, count, count), memory)
        answer = cpp.ask("step by name", stream="a", inputs=flat(fed(2, count, count)))
        assert outputs.keys() == answer["outputs"].keys()
        for name, output in outputs.items():
            assert np.abs(output.ravel() - answer["outputs"][name]).max() < 1e-5
    assert answer["positions"] == memory.positions.tolist() == [10, 10]
    cpp.ask("save", stream="a", file=str(tmp_path / "after"))
    after = load_memory(tmp_path / "after", session)
    assert all(np.abs(after.tensors[name] - x).max() < 1e-5 for name, x in memory.tensors.items())


def test_a_graph_of_fixed_sizes_takes_no_other_step(cpp: Program, tmp_path: Path) -> None:
    fixed = trace(modules.Policy(), tmp_path / "a", rule=RULE, without={"padding"}, rows=2)
    cpp.ask("open", model=str(fixed))
    assert cpp.ask("check")["passed"]
    cpp.ask("start", stream="a", rows=2)
    refused = cpp.refusal("step by name", stream="a", inputs=flat(fed(2, 1, 0)))
    assert f"traced for exactly 2 rows of {T}" in refused


def test_named_steps_that_do_not_fit_are_refused(cpp: Program, policy: Path) -> None:
    cpp.ask("open", model=str(policy))
    cpp.ask("start", stream="a")
    step = flat(fed(1, 2, 0))
    ask = lambda **changed: cpp.refusal("step by name", stream="a", inputs=step | changed)  # noqa: E731
    assert "previous has the id 3; expected 0 to 2" in ask(previous=[0, 3])
    assert "previous has 3 numbers" in ask(previous=[0, 1, 2])
    assert "goal has 1 numbers" in ask(goal=[0.5])
    assert "4 inputs were given; expected observation, previous, goal" in ask(other=[0.5])
    no_model = "no language model: its step reads observation"
    assert no_model in cpp.refusal("encode", text="a")
    assert no_model in cpp.refusal("predict", stream="a", tokens=[[0, 1]])
    cpp.ask("pad", stream="a", positions=[-1])
    assert "does not keep the promise `padding`" in ask()
