"""The C++ library, cross-compiled, gives the host's answers on an emulated ARM processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architectures import ARCHITECTURES
from tests.arm.emulator import PROCESSORS, ROOT, TOOLS, MissingError, prepare_programs
from tests.cpp.program import DRIVER, compiled
from tests.parity.operations import Program, Reference
from xl_export.artefact.export import export

pytestmark = [pytest.mark.arm, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=PROCESSORS)
def emulated(request: pytest.FixtureRequest) -> Iterator[Program]:
    try:
        before, library = prepare_programs(ROOT / "build" / "arm", request.param)
    except MissingError as error:
        pytest.fail(str(error), pytrace=False)
    program = compiled(DRIVER, "-O1", compiler=TOOLS[1], library=library)
    running = Program(*before, program, tolerance=1e-4)
    yield running
    assert running.close() == 0


@pytest.mark.parametrize("name", ["ring", "shift", "hidden", "adaptive-softmax"])
def test_it_answers_as_the_naive_reference(
    name: str, emulated: Program, artefacts: dict[str, Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    if name in artefacts:
        folder = artefacts[name]
    else:
        folder = export(make_run(**ARCHITECTURES[name]), tmp_path / "artefact")
    emulated.ask("open", model=str(folder))
    python, own = tmp_path / "python", tmp_path / "own"
    python.mkdir()
    own.mkdir()
    assert "generate" in Reference.of(folder, python).check(emulated, own)
