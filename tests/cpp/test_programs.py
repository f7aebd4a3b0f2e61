"""CMake builds the examples and the C interface; the commands of the guide print what the guide shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtimes import check, open_session
from runtimes.contract.saved_streams import load_memory
from tests.cpp.program import CPP, DRIVER, ROOT, compiled, onnxruntime_library
from tests.docs.pages import blocks, difference
from tests.parity.operations import Program, Reference

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


def commands(first: str) -> dict[str, str]:
    """The commands of the guide's block that begins with a command, and what each prints there."""
    block = next(b for b in blocks(GUIDE) if b.language == "console" and b.commands[0][0].startswith(first))
    return dict(block.commands)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder in which the guide's first block was run as it stands, and what each command printed."""
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("cmake or g++ is not installed")
    folder = tmp_path_factory.mktemp("guide")
    for name in ("cpp", "examples"):
        (folder / name).symlink_to(ROOT / name)
    environment = {
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,  # where CMake looks for python3
        "PYTHONPATH": str(ROOT),
        "CMAKE_BUILD_TYPE": "Debug",  # as it compiles faster
    }
    return folder, {
        command: run("bash", "-c", command, cwd=folder, **environment) for command in commands("cmake")
    }


@pytest.fixture(scope="module")
def programs(printed: tuple[Path, dict[str, str]]) -> Path:
    return printed[0] / "build" / "cpp"


def test_the_commands_of_the_guide_print_what_it_shows(printed: tuple[Path, dict[str, str]]) -> None:
    shown = commands("cmake")
    assert f'build/cpp/stream examples/stories/tales "{PROMPT}" 12 0' in shown
    assert "build/cpp/check artefact" in shown
    for command, expected in shown.items():
        assert difference(expected, printed[1][command]) is None, command


def test_a_wrong_number_is_refused_before_anything_is_printed(programs: Path) -> None:
    for words in (("abc",), ("12", "cold"), ("12", "0", "x"), ("0",)):
        ended = subprocess.run(
            [programs / "stream", TALES, PROMPT, *words], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout) == (2, ""), words
        assert ended.stderr.count("\n") == 1


def test_clang_compiles_the_library_without_a_warning(artefacts: dict[str, Path], tmp_path: Path) -> None:
    program = Program(compiled(DRIVER, "-O1", compiler="clang++"), tolerance=1e-5)
    program.ask("open", model=str(artefacts["ring"]))
    for name in ("python", "own"):
        (tmp_path / name).mkdir()
    reference = Reference.of(artefacts["ring"], tmp_path / "python")
    assert "generate" in reference.check(program, tmp_path / "own")
    assert program.close() == 0


def test_check_replays_the_reference(programs: Path, artefacts: dict[str, Path]) -> None:
    for folder in artefacts.values():
        assert run(programs / "check", folder).endswith("passed\n")
    assert "check(session)" in (ROOT / GUIDE).read_text(encoding="utf-8")
    assert check(artefacts["ring"]).passed
    identity = open_session(artefacts["ring"]).identity
    assert run(programs / "check", artefacts["ring"], "--identity", identity).endswith("passed\n")
    for words in (
        ("--identity", "0" * 64),
        ("--public-key", "key.pem"),
        ("--library", "no.so"),
        ("--key", "x"),
    ):
        ended = subprocess.run(
            [programs / "check", artefacts["ring"], *words], capture_output=True, text=True
        )
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), words


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
        "-lm",
    )
    expected = commands("cmake")[f'build/cpp/stream examples/stories/tales "{PROMPT}" 12 0']
    three, one = tmp_path / "three", tmp_path / "one"
    assert difference(expected, run(program, TALES, PROMPT, three, one)) is None
    # What it saved is what Python has after the same step.
    session = open_session(TALES)
    memory = session.start(3)
    tokens = session.vocab.encode(PROMPT)
    session.predict(np.array([[tokens[row % len(tokens)]] for row in range(3)]), memory)
    saved = load_memory(three, session)
    assert saved.positions.tolist() == memory.positions.tolist() == [1, 1, 1]
    for name, array in memory.tensors.items():
        assert np.abs(array - saved.tensors[name]).max() < 1e-5
    # The twelfth token ended the text, so it was not fed.
    assert load_memory(one, session).positions.tolist() == [len(tokens) + 11]


def test_a_program_in_rust_continues_the_same_text(programs: Path, tmp_path: Path) -> None:
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    variables = {"XL_EXPORT_LIB": str(programs), "CARGO_TARGET_DIR": str(tmp_path / "rust")}
    command = ("cargo", "run", "--release", "--quiet", "--offline", "--")
    folder = CPP / "examples" / "rust"
    printed = run(*command, TALES, PROMPT, 12, 0, cwd=folder, **variables)
    (expected,) = (text for words, text in commands("cd").items() if "cargo run" in words)
    assert difference(expected, printed) is None
    # Nobody reads any more: the program ends, and no panic goes through frames of C++.
    words = [str(word) for word in (*command, TALES, PROMPT, 50, 0)]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=os.environ | variables,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 0, said
    process.stderr.close()


def test_the_program_of_the_guide_runs(printed: tuple[Path, dict[str, str]]) -> None:
    folder = printed[0]
    (body,) = (block.body for block in blocks(GUIDE) if block.language == "cpp" and "int main" in block.body)
    (folder / "program.cpp").write_text(body)
    (folder / "libonnxruntime.so.1").symlink_to(onnxruntime_library())
    for command in commands("g++"):
        told = run("bash", "-c", command, cwd=folder)
    assert told
    assert load_memory(folder / "text.stream", open_session(folder / "artefact")).positions[0] > 1


def test_another_project_may_include_the_folder(tmp_path: Path) -> None:
    """Its own targets may be called like the examples, and its warnings stay warnings."""
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("cmake or g++ is not installed")
    lines = (
        "cmake_minimum_required(VERSION 3.16)",
        "project(other C CXX)",
        "add_executable(check main.c)",
        f'add_subdirectory("{CPP}" cpp)',
        "target_link_libraries(check PRIVATE xl_export_c)",
        f'target_include_directories(check PRIVATE "{CPP}")',
    )
    (tmp_path / "CMakeLists.txt").write_text("\n".join(lines))
    (tmp_path / "main.c").write_text(
        '#include "xl_export_c.h"\nint main(void) { return xl_batch(0) != -1; }\n'
    )
    library = f"-DONNXRUNTIME_LIBRARY={onnxruntime_library()}"
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", library, "-DCMAKE_BUILD_TYPE=Debug")
    run("cmake", "--build", tmp_path / "build", "--target", "check")
    run(tmp_path / "build" / "check")
    assert not list((tmp_path / "build").rglob("xl_stream.dir"))
