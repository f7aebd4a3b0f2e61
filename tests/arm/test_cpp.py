"""The C++ library, cross-compiled, gives the host's answers on an emulated ARM processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtimes.sessions import fused_cpu
from runtimes.sessions.fused_cpu.library import FOLDER
from tests.architectures import ARCHITECTURES
from tests.arm.emulator import PROCESSORS, ROOT, TOOLS, MissingError, prepare_programs
from tests.cpp.program import CPP, DRIVER, compiled
from tests.cpp.test_programs import run as printed_by
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


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which CMake has cross-built the fused operator into the examples."""
    folder = tmp_path_factory.mktemp("fused")
    try:
        _, library = prepare_programs(ROOT / "build" / "arm", next(iter(PROCESSORS)))
    except MissingError as error:
        pytest.fail(str(error), pytrace=False)
    facts = ("-DXL_EXPORT_FUSED=ON", f"-DONNXRUNTIME_LIBRARY={library}", "-DCMAKE_BUILD_TYPE=Debug")
    printed_by("cmake", "-S", CPP, "-B", folder, f"-DCMAKE_CXX_COMPILER={TOOLS[1]}", *facts)
    printed_by("cmake", "--build", folder, "--target", "xl_check", "xl_benchmark")
    archives = [folder / "fused" / "libxl_export_fused.a", *(folder / "fused").glob("libxl_export_fused_*.a")]
    source = Path(__file__).with_name("variant.cpp")
    printed_by(TOOLS[1], "-I", FOLDER, source, *archives, "-o", folder / "variant")
    return folder


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_built_in_operator_takes_the_instructions_of_the_processor(
    processor: str, fused: Path, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fused_cpu.build()
    artefact = export(run, tmp_path / "artefact", storage="fused-ort", precision="int8")
    before, _ = prepare_programs(ROOT / "build" / "arm", processor)
    assert printed_by(*before, fused / "variant") == f"{PROCESSORS[processor].variant}\n"
    assert printed_by(*before, fused / "check", artefact).endswith("passed\n")
    assert json.loads(printed_by(*before, fused / "benchmark", artefact, 5, 1))["kernel"] == "fused"
