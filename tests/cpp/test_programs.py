"""CMake builds the examples and the C interface; the commands of the guide print what the guide shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from runtimes import check
from tests.cpp.program import CPP, ROOT, onnxruntime_library
from tests.docs.pages import blocks, difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
GUIDE = "docs/guides/cpp.md"
TALES = ROOT / "examples" / "stories" / "tales"
PROMPT = "Once upon a time"


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """What a program printed; it must succeed."""
    words = [str(word) for word in command]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=os.environ | environment)
    assert ended.returncode == 0, (words, ended.returncode, ended.stdout[-2000:], ended.stderr[-2000:])
    return ended.stdout


def built(folder: Path, *options: str, targets: tuple[str, ...] = ()) -> Path:
    """A build folder of CMake in which some targets, or all of them, were compiled."""
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("cmake or g++ is not installed")
    run("cmake", "-S", CPP, "-B", folder, f"-DONNXRUNTIME_LIBRARY={onnxruntime_library()}", *options)
    run("cmake", "--build", folder, *(word for target in targets for word in ("--target", target)))
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("cmake"))


def shown(first: str) -> dict[str, str]:
    """The commands of the guide's block that begins with a command, and what each prints there."""
    block = next(b for b in blocks(GUIDE) if b.language == "console" and b.commands[0][0].startswith(first))
    return dict(block.commands)


def test_the_example_continues_a_text_as_the_guide_shows(programs: Path) -> None:
    command, expected = next(
        pair for pair in shown("cmake").items() if pair[0].startswith("build/cpp/stream")
    )
    assert command == f'build/cpp/stream examples/stories/tales "{PROMPT}" 12 0'
    assert difference(expected, run(programs / "stream", TALES, PROMPT, 12, 0)) is None


def test_check_replays_the_reference(programs: Path, artefacts: dict[str, Path]) -> None:
    for folder in artefacts.values():
        assert run(programs / "check", folder).endswith("passed\n")
    assert "check(session)" in (ROOT / GUIDE).read_text(encoding="utf-8")
    assert check(artefacts["ring"]).passed


def test_the_benchmark_prints_one_line_of_json(programs: Path, artefacts: dict[str, Path]) -> None:
    (line,) = run(programs / "benchmark", artefacts["shift"], 20, 1).splitlines()
    told = json.loads(line)
    assert (told["form"], told["precision"], told["tokens"]) == ("shift", "fp32", 20)
    assert told["ms_per_token"] > 0
    assert told["late_ms_per_token"] > 0


def test_a_program_in_c_gets_sentences_and_text(programs: Path, tmp_path: Path) -> None:
    program, source = tmp_path / "plain", Path(__file__).with_name("plain.c")
    strict = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic")
    run(
        "gcc",
        *strict,
        f"-I{CPP}",
        source,
        "-o",
        program,
        programs / "libxl_export_c.so",
        f"-Wl,-rpath,{programs}",
    )
    expected = shown("cmake")[f'build/cpp/stream examples/stories/tales "{PROMPT}" 12 0']
    assert difference(expected, run(program, TALES, PROMPT)) is None


def test_a_program_in_rust_continues_the_same_text(programs: Path, tmp_path: Path) -> None:
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    variables = {"XL_EXPORT_LIB": str(programs), "CARGO_TARGET_DIR": str(tmp_path / "rust")}
    command = ("cargo", "run", "--release", "--quiet", "--offline", "--")
    folder = CPP / "examples" / "rust"
    printed = run(*command, TALES, PROMPT, 12, 0, cwd=folder, **variables)
    (expected,) = (text for words, text in shown("cd").items() if "cargo run" in words)
    assert difference(expected, printed) is None


def test_the_example_under_sanitizers(tmp_path: Path, artefacts: dict[str, Path]) -> None:
    folder = built(tmp_path / "sanitized", "-DXL_EXPORT_SANITIZE=ON", targets=("check",))
    for artefact in artefacts.values():
        assert run(folder / "check", artefact).endswith("passed\n")


def test_the_program_of_the_guide_compiles(programs: Path, tmp_path: Path) -> None:
    (body,) = (block.body for block in blocks(GUIDE) if block.language == "cpp")
    source = tmp_path / "program.cpp"
    source.write_text(body)
    includes = (f"-I{CPP}", f"-I{CPP / 'third_party' / 'onnxruntime'}")
    linked = (programs / "libonnxruntime.so.1", f"-Wl,-rpath,{programs}")
    run("g++", "-std=c++17", "-O0", *includes, source, "-o", tmp_path / "program", *linked)
    (tmp_path / "artefact").symlink_to(TALES)
    assert run(tmp_path / "program", cwd=tmp_path)
    assert (tmp_path / "text.stream").is_file()
