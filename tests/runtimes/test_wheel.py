"""The wheel of this machine's architecture: built, installed where there is no compiler, and used."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import FUSED, VOCAB, load_spec
from runtimes.contract.vocabulary import load_vocab
from runtimes.sessions.fused_cpu.variants import VARIANTS, features
from runtimes.sessions.onnx_runtime import OrtSession
from tests.runtimes.sessions.both_kernels import refuse_other_memory
from tests.source_tree import copy_source
from tests.streams import feed, rows
from xl_export.artefact.export import export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # each library takes a compiler half a minute
ROOT = Path(__file__).parents[2]
SERVED = [v for v in VARIANTS.get(platform.machine(), ()) if features().issuperset(v.features)]
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None or not SERVED:
        pytest.skip("there is no g++ here, or no variant for this processor")
    base = tmp_path_factory.mktemp("wheel")
    source = copy_source(base / "source")
    environment = {"PATH": "/usr/bin:/bin", "XL_EXPORT_FUSED_KERNEL": "required"}
    command = [sys.executable, *PIP, "wheel", "--no-deps", "-w", base / "built", source]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = (base / "built").glob("*-py3-none-linux_*.whl")
    return wheel


@pytest.fixture(scope="module")
def libraries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's folder of libraries."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder / "runtimes" / "sessions" / "fused_cpu" / "libraries"


def test_a_device_without_a_compiler_gets_the_fast_path(
    wheel: Path, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    commands = tmp_path / "venv" / "bin"
    nothing = {"PATH": str(commands), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}

    def call(*command: object) -> str:
        words = [str(word) for word in command]
        ended = subprocess.run(words, capture_output=True, text=True, cwd="/", env=nothing)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    call(commands / "python", *PIP, "install", "-c", ROOT / "constraints.txt", f"{wheel}[cpu]")
    assert shutil.which("g++", path=nothing["PATH"]) is None
    best = SERVED[-1].name
    whole = call(commands / "python", ROOT / "tests" / "runtimes" / "sessions" / "wheel_is_whole.py")
    assert whole == f"the wheel holds the fused operator for {best}\n"
    assert "computed by: ONNX Runtime, fused operator\n" in call(
        commands / "xl-export", "check", artefacts["ring"]
    )
    told = call(commands / "xl-export", "info", artefacts["ring"])
    assert f"computed by ONNX Runtime, fused operator; the package's library for {best}\n" in told
    refused = subprocess.run(
        [commands / "xl-export", "fused-kernel"], capture_output=True, text=True, env=nothing
    )
    assert refused.returncode == 2
    assert "g++ could not be started" in refused.stderr


def test_the_page_of_xl_export_web_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    files = [path for part in ("page", "src") for path in (ROOT / "web" / part).rglob("*") if path.is_file()]
    assert len(files) > 40
    wanted = {f"xl_export/web/static/{path.relative_to(ROOT / 'web').as_posix()}" for path in files}
    assert wanted <= packed


def test_each_library_has_no_instruction_of_another(libraries: Path) -> None:
    for variant in VARIANTS[platform.machine()]:
        code = subprocess.run(
            ["objdump", "-d", libraries / variant.file], capture_output=True, text=True, check=True
        ).stdout
        if platform.machine() == "x86_64":
            assert bool(re.search(r"%ymm", code)) is ("avx" in variant.features), variant.name
            assert bool(re.search(r"%zmm", code)) is ("avx512f" in variant.features), variant.name


SIZES = [
    ({"head_dim": 64}, MemoryRule(mem_len=300, segment=150), {}),
    ({"head_dim": 41}, MemoryRule(mem_len=40, segment=30, mask="full"), {"memory_precision": "fp16"}),
    ({"head_dim": 32, "heads": 3}, MemoryRule(mem_len=60, segment=8, clamp_len=37), {"precision": "fp16"}),
    ({"head_dim": 41}, MemoryRule(mem_len=40, segment=30, mask="full"), {"memory_precision": "int8"}),
]


@pytest.mark.parametrize(("sizes", "rule", "options"), SIZES, ids=str)
def test_all_libraries_compute_the_same(
    sizes: dict,
    rule: MemoryRule,
    options: dict,
    libraries: Path,
    make_run: Callable[..., Path],
    tokens: np.ndarray,
    tmp_path: Path,
) -> None:
    """All are loaded into this one process, where none may take a function or a table of another."""
    artefact = export(make_run(**sizes, rule=rule), tmp_path / "artefact", **options)
    spec, segment = load_spec(artefact), rule.segment
    cuts = [segment, 1, segment - 1, 1, 1, segment, 3, 1, segment]
    standard, memory = feed(OrtSession.open(artefact, kernel="standard"), rows(tokens, 2, sum(cuts)), cuts)
    tolerance = 1e-4 if not options else 2e-3
    for variant in (*SERVED, *reversed(SERVED)):
        library = libraries / variant.file
        session = OrtSession(spec, load_vocab(artefact / VOCAB), artefact / FUSED, library=library)
        answers, kept = feed(session, rows(tokens, 2, sum(cuts)), cuts)
        assert 0 < np.abs(answers - standard).max() < tolerance, variant.name
        refuse_other_memory(memory.tensors, kept.tensors, 10 * tolerance)
