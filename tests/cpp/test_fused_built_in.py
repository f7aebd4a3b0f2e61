"""CMake builds the fused operator into a program, which uses it for every artefact with a graph for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runtimes.sessions import fused_cpu
from tests.cpp.program import CPP, onnxruntime_library
from tests.cpp.test_programs import run as printed_by
from xl_export.artefact.export import export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("cmake or g++ is not installed")
    folder = tmp_path_factory.mktemp("build (1)")
    facts = ("-DXL_EXPORT_FUSED=ON", f"-DONNXRUNTIME_LIBRARY={onnxruntime_library()}")
    # As a product may: link-time optimization would join the variants' functions.
    facts += ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON")
    printed_by("cmake", "-S", CPP, "-B", folder, *facts)
    printed_by("cmake", "--build", folder, "--target", "xl_check", "xl_benchmark")
    return folder


def kernel(build: Path, artefact: Path) -> str:
    """The operators with which a program computes, after its check has passed."""
    assert printed_by(build / "check", artefact).endswith("passed\n")
    return str(json.loads(printed_by(build / "benchmark", artefact, 5, 1))["kernel"])


def test_a_program_uses_what_is_built_in(build: Path, artefacts: dict[str, Path]) -> None:
    assert kernel(build, artefacts["ring"]) == "fused"
    assert kernel(build, artefacts["shift"]) == "standard"


def test_it_needs_no_other_graph(
    build: Path, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fused_cpu.build()
    assert kernel(build, export(run, tmp_path / "artefact", storage="fused-ort", precision="int8")) == "fused"


def test_nothing_of_a_variant_runs_unless_it_is_chosen(build: Path) -> None:
    """Neither instead of another variant's function nor before main(): it would crash older processors."""
    for archive in (build / "fused").glob("libxl_export_fused_*.a"):
        symbols = printed_by("nm", "-g", "--defined-only", "--format=just-symbols", archive).split()
        name = archive.stem.removeprefix("libxl_export_fused_")
        assert [word for word in symbols if not word.endswith(":")] == [f"xl_export_register_{name}"]
        assert "init_array" not in printed_by("readelf", "-SW", archive)
