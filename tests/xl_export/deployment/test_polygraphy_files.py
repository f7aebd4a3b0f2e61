"""Files for `polygraphy run`, given to the tool itself."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes import open_session
from runtimes.contract.spec import load_spec
from tests.architectures import ARCHITECTURES
from tests.commands import xl
from xl_export.artefact.export import export
from xl_export.deployment.polygraphy_files import (
    ANSWERS,
    COMMANDS,
    INPUTS,
    write_polygraphy_files,
)


@pytest.fixture(scope="module")
def files(artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("polygraphy") / "files"
    write_polygraphy_files(artefacts["ring"], folder)
    return folder


def run_tool(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("polygraphy")
    if not tool.is_file():
        pytest.skip("polygraphy is not installed; pip install polygraphy")
    return subprocess.run(
        [sys.executable, str(tool), *shlex.split(line)[1:]],
        cwd=folder,
        env=os.environ | {"POLYGRAPHY_AUTOINSTALL_DEPS": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_tool_itself_finds_the_same_answers(files: Path) -> None:
    line = (files / COMMANDS).read_text().splitlines()[0]
    told = run_tool(files, line)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "PASSED" in told.stdout


@pytest.mark.slow
def test_memory_in_int8_may_differ_by_one_in_each_byte(make_run: Callable[..., Path], tmp_path: Path) -> None:
    artefact = export(make_run(), tmp_path / "artefact", memory_precision="int8")
    write_polygraphy_files(artefact, tmp_path / "files")
    line = (tmp_path / "files" / COMMANDS).read_text().splitlines()[0]
    assert "--atol 0.02 present.0.key:1 present.0.value:1 " in line
    assert "scale:1" not in line
    told = run_tool(tmp_path / "files", line)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("form", ["shift", "selective"])
def test_the_answers_are_those_of_the_session(
    form: str, artefacts: dict[str, Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    if form == "selective":
        artefact = export(make_run(**ARCHITECTURES["adaptive-softmax"]), tmp_path / "a")
    else:
        artefact = artefacts[form]
    spec, session = load_spec(artefact), open_session(artefact)
    made = xl("polygraphy", artefact, "--out", tmp_path / "files", "--batch", 3)
    assert made.exit_code == 0, made.output
    assert (
        "inputs and answers of 3 steps: a segment from empty memory, 3 x 8; a segment after " in made.output
    )
    lines = (tmp_path / "files" / COMMANDS).read_text().splitlines()
    assert ["--trt" in line for line in lines] == ([False, True] if form == "shift" else [False])
    inputs = read(json.loads((tmp_path / "files" / INPUTS).read_text()))
    results = json.loads((tmp_path / "files" / ANSWERS).read_text())["lst"][0][1]
    answers = read(
        [{name: value["values"] for name, value in result["outputs"].items()} for result in results]
    )
    for number, (given, answer) in enumerate(zip(inputs, answers, strict=True)):
        assert list(given) == [fact.name for fact in spec.inputs]
        assert list(answer) == [fact.name for fact in spec.outputs]
        tokens, positions = given["input_ids"], given["position_ids"]
        assert tokens.shape == (3, (8, 8, 1)[number])
        assert (positions[:, 0] >= spec.rule.slots).all() == (number > 0)
        memory = session.start(3)
        memory.tensors.update({state.name: given[state.name].copy() for state in spec.state})
        memory.positions[:] = positions[:, 0]
        if spec.model.selective:
            log_probs, memory = session.score(tokens, given["targets"], memory)
            assert np.abs(log_probs - answer["log_probs"]).max() < 1e-5
        else:
            logits, memory = session.step(tokens, memory)
            assert np.abs(logits - answer["logits"]).max() < 1e-5
        for state in spec.state:
            assert np.array_equal(memory.tensors[state.name], answer[state.present])
            assert answer[state.present].std() > 0
            assert (given[state.name].std() > 0) == (number > 0)


def read(iterations: list[dict[str, dict[str, str]]]) -> list[dict[str, np.ndarray]]:
    """Arrays as Polygraphy reads them."""
    import base64
    import io

    return [
        {name: np.load(io.BytesIO(base64.b64decode(value["array"]))) for name, value in iteration.items()}
        for iteration in iterations
    ]
