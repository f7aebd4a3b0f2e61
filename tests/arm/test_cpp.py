"""The C++ library, cross-compiled, gives the host's answers on an emulated ARM processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architectures import ARCHITECTURES
from tests.arm.emulator import PROCESSORS, ROOT, TOOLS, MissingError, prepare_programs
from tests.cpp.comparison import compare
from tests.cpp.program import Driver, compiled
from xl_export.artefact.export import export

pytestmark = [pytest.mark.arm, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=PROCESSORS)
def emulated(request: pytest.FixtureRequest) -> Iterator[Driver]:
    try:
        before, library = prepare_programs(ROOT / "build" / "arm", request.param)
    except MissingError as error:
        pytest.fail(str(error), pytrace=False)
    source = ROOT / "tests" / "cpp" / "driver.cpp"
    running = Driver(compiled(source, "-O1", compiler=TOOLS[1], library=library), *before)
    yield running
    assert running.close() == 0


@pytest.mark.parametrize("name", ["ring", "shift", "hidden", "adaptive-softmax"])
def test_it_replays_the_reference_and_generates_the_same_tokens(
    name: str, emulated: Driver, artefacts: dict[str, Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    if name in artefacts:
        folder = artefacts[name]
    else:
        folder = export(make_run(**ARCHITECTURES[name]), tmp_path / "artefact")
    compare(emulated, folder, tmp_path, nats=1e-4)
