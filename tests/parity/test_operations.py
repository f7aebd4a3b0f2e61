"""One recording of operations, answered by every implementation and compared with the naive reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nightly import matrix
from tests.parity.operations import Implementation, Program, Reference
from tests.web.npm import packages

MODELS = (
    *("ring", "shift", "hidden", "words, adaptive softmax", "bytes, groups of heads", "subwords, zeros"),
    *("empty weights", "memory of bytes", "lstm", "large lstm"),
)
SERVED = ("ring", "bytes, groups of heads")
BATCHES = {"check", "score", "generate", "fork", "save", "load", "step", "predict", "restart"}


@pytest.fixture(scope="module")
def reference(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Reference]:
    """`reference(name)` → the answers for a model."""

    @functools.cache
    def of(name: str) -> Reference:
        return Reference.of(model(name), tmp_path_factory.mktemp("python"), rounds=name == "memory of bytes")

    return of


# How a model is opened. JavaScript computes on WebAssembly in its own thread unless it is asked otherwise.
OPENED: dict[str, dict[str, Any]] = {
    "cpp": {},
    "javascript": {},
    "worker": {"worker": True},
    "native": {"device": "native"},
    "copied": {"more": {"inPlace": False}},
}


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *((how, name) for how in ("cpp", "javascript") for name in MODELS),
        pytest.param("cpp", "empty weights, hidden", marks=pytest.mark.slow),
        pytest.param("javascript", "empty weights, hidden", marks=pytest.mark.slow),
        *matrix(("worker", "native", "copied"), ("ring", "shift"), together=1),
    ],
)
def test_libraries_answer_as_the_naive_reference(
    how: str,
    name: str,
    model: Callable[[str], Path],
    reference: Callable[[str], Reference],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    program: Program = request.getfixturevalue("cpp" if how == "cpp" else "javascript")
    if how == "native" and not (packages() / "onnxruntime-node").is_dir():
        pytest.skip("onnxruntime-node is not installed")
    opened = program.ask("open", model=str(model(name)), **OPENED[how])
    assert opened.get("memory", "in place") == ("copied" if how == "copied" else "in place")
    assert reference(name).check(program, tmp_path).keys() >= BATCHES


@pytest.mark.parametrize("language", ["cpp", "javascript"])
def test_libraries_choose_among_graphs_of_fixed_sizes(
    language: str, model: Callable[[str], Path], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program: Program = request.getfixturevalue(language)
    for name in ("python", "own"):
        (tmp_path / name).mkdir()
    artefact = model("fixed sizes")
    steps = Reference.of_steps(artefact, tmp_path / "python", rows=1)
    program.ask("open", model=str(artefact))
    assert steps.check(program, tmp_path / "own").keys() >= {"check", "step"}


@pytest.mark.slow
@pytest.mark.parametrize("language", ["cpp", "javascript"])
def test_a_padded_vocabulary_passes_its_check(
    language: str, module_artefact: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    program: Program = request.getfixturevalue(language)
    program.ask("open", model=str(module_artefact("padded")))
    assert program.ask("check")["passed"]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("kind", ["server", "replica"])
def test_servers_answer_as_the_naive_reference(
    name: str,
    kind: str,
    serve: Callable[[str, Path], Implementation],
    model: Callable[[str], Path],
    reference: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    assert reference(name).check(serve(kind, model(name)), tmp_path).keys() >= {"score", "generate"}
