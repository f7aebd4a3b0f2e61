"""Every command and snippet of the documents runs, and prints what the document shows.

Pages start in a copy of the folder that the tutorial leaves, with `run` and `artefact`. For those in `QUICK`,
`artefact` is one of the examples. `tests/docs/pages.py` says how outputs are compared, and how a block is
marked that does not run.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from benchmarks.__main__ import main as benchmarks_main
from tests.docs.pages import PAGES, ROOT, blocks, difference
from tests.once import made_once
from xl_export.cli.main import main as xl_export_main

TUTORIAL = "docs/tutorial.md"
FLEET = "docs/guides/fleet.md"
RUNS = [
    page for page in PAGES if any(b.language in ("console", "python") and not b.reason for b in blocks(page))
]
# Any artefact will do for these. The others wait for the tutorial's training and run nightly.
QUICK = ("README.md", "docs/index.md", "docs/guides/install.md", "docs/guides/sizing.md", FLEET)


def link_sources(folder: Path) -> None:
    for name in ("tests", "examples"):
        (folder / name).symlink_to(ROOT / name)


@pytest.fixture(scope="session")
def after_tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the tutorial leaves, made once for all processes of the test run."""

    def follow(folder: Path) -> None:
        link_sources(folder)
        run_page(TUTORIAL, folder)

    return made_once(tmp_path_factory, "tutorial", follow)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in QUICK else pytest.mark.slow) for page in RUNS]
)
def test_commands_and_snippets_print_what_the_page_shows(
    page: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tmp_path / "page"
    if page == FLEET:
        pytest.importorskip("cryptography")  # of the extra `sign`
    if page in QUICK:
        folder.mkdir()
        link_sources(folder)
        shutil.copytree(ROOT / "examples" / "stories" / "tales", folder / "artefact")
    else:
        shutil.copytree(request.getfixturevalue("after_tutorial"), folder, symlinks=True)
    if page != TUTORIAL:  # it ran, and its outputs were compared, for the folder of the others
        run_page(page, folder)


def run_page(page: str, folder: Path) -> None:
    """Runs the blocks of a page in a folder, in order; fails at the first that prints something else."""
    environment = make_environment(folder)
    printed = ""
    for block in blocks(page):
        if block.reason is not None:
            continue
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.body)
            (folder / block.mark.removeprefix("file: ")).chmod(0o755)
        elif block.mark == "output":
            check(block.name, block.body, printed)
        elif block.language == "python":
            printed = execute([sys.executable, "-c", block.body], block.name, folder, environment)
        elif block.language == "console":
            for command, shown in block.commands:
                instead = block.mark.removeprefix("instead: ") if block.mark.startswith("instead: ") else ""
                printed = execute(["bash", "-c", instead or command], block.name, folder, environment)
                if shown:
                    check(f"{block.name}: {command}", shown, printed, shape_only=bool(instead))


def make_environment(folder: Path) -> dict[str, str]:
    """Variables for commands: `xl-export` and `python` are those of this test run, in a home of their own."""
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    command = programs / "xl-export"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xl_export "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    if not (programs / "python").exists():
        (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / "python").chmod(0o755)
    return {
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "MPLCONFIGDIR": os.environ["MPLCONFIGDIR"],
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


def execute(words: list[str], name: str, folder: Path, environment: dict[str, str]) -> str:
    """What a command prints on standard output; fails with its errors where it does not succeed."""
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{name} failed:\n{words[-1]}\n{result.stderr[-3000:]}"
    return result.stdout


def check(name: str, shown: str, printed: str, *, shape_only: bool = False) -> None:
    wrong = difference(shown, printed, shape_only=shape_only)
    assert wrong is None, f"{name} prints something else: {wrong}\n\nthe whole output:\n{printed}"


def test_every_make_target_of_the_documents_exists() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^\$ )make ([\w-]+)", text, re.M))
    assert targets >= {"demo", "test", "docs"}
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


PROGRAMS: dict[str, click.Group] = {"xl-export": xl_export_main, "python -m benchmarks": benchmarks_main}
# A program with what follows it, at most to the end of the line; a quote or prompt before it says that it is
# a command and not prose. `xl-export stream 1` is the format of saved streams.
MENTION = re.compile(rf"(`|\$ )?(?<![\w./-])({'|'.join(PROGRAMS)}) (?!stream \d)([^`\n|;&>#]*)")
PACKAGES = ("runtimes", "trainer", "xl_export", "benchmarks", "examples")


def test_every_command_and_option_that_is_named_exists() -> None:
    """In the documents, in comments, and in every string of the code, error messages among them."""
    sources = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    others = [
        path
        for folder in ("cpp", "deploy", "web/src", "web/page")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".hpp", ".cpp", ".js", ".html", ".yaml", ".service")
    ]
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in (*PAGES, "SECURITY.md", "web/README.md")]
    texts += [path.read_text(encoding="utf-8") for path in others]
    found = [mention for text in texts for mention in MENTION.findall(re.sub(r"\\\n(?:> )?", " ", text))]
    found += [mention for path in sources for text in strings(path) for mention in MENTION.findall(text)]
    assert found
    assert sorted({fault for mention in found if (fault := fault_of(*mention))}) == []


def strings(path: Path) -> Iterator[str]:
    """Every string of a Python file that may name a program; values within an f-string are placeholders."""
    source = path.read_text(encoding="utf-8")
    if "xl-export" not in source and "benchmarks" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def fault_of(mark: str, program: str, rest: str) -> str | None:
    """What does not exist of a command line; None if all of it does, and for prose."""
    command: click.Command | None = PROGRAMS[program]
    words = rest.split()
    try:
        while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z0-9-]*", words[0]):
            _, command, words = command.resolve_command(click.Context(command), words)
    except click.ClickException as error:
        return f"{program} {rest}: {error.message}" if mark else None
    assert command is not None
    if not mark and (command.hidden or command is PROGRAMS[program]):
        return None
    if command.hidden:
        return f"{program} {rest}: an old name"
    # A group before a placeholder, as in `prepare NAME --from …`, has the options of its commands.
    commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    known = {name for each in commands for param in each.params for name in param.opts + param.secondary_opts}
    given = {option for word in words for option in re.findall(r"^--?[a-z][\w-]*", word)}
    unknown = ", ".join(sorted(given - known - {"-h", "--help"}))
    return f"{program} {rest}: no option {unknown}" if unknown else None


def test_every_file_that_the_documents_name_exists() -> None:
    """Files in backquotes by their path from the top or from a folder in their row, and targets of links."""
    missing = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(
            r"`((?:runtimes|trainer|xl_export|benchmarks|tests|docs|examples)/[\w/.-]*\w(?:/|\.\w+))`", text
        ):
            if not (ROOT / name).exists():
                missing.append(f"{page}: {name}")
        for line in text.splitlines():  # a row of a table with a folder and names in it
            rooms = re.findall(r"`((?:runtimes|trainer|xl_export|benchmarks)/[\w/]*/)`", line)
            for name in re.findall(r"`(\w[\w/]*(?:\.(?:py|cpp|hpp)|/))`", line) if line[:1] == "|" else ():
                if rooms and not any((ROOT / room / name).exists() for room in ("", *rooms)):
                    missing.append(f"{page}: {name} in {' or '.join(rooms)}")
        prose = prose_of(ROOT / page)  # without code, in which `[](` is C++ too
        for name in re.findall(r"(?:\]\(|(?:href|src)=\")(?!https?:)([^)#\s\"]+)", prose):
            if not ((ROOT / page).parent / name).exists():
                missing.append(f"{page}: link to {name}")
    assert missing == []


def test_every_heading_that_a_link_leads_to_exists() -> None:
    missing = []
    for page in PAGES:
        for name, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", prose_of(ROOT / page)):
            target = (ROOT / page).parent / name if name else ROOT / page
            if target.suffix == ".md" and anchor not in anchors(target):
                missing.append(f"{page}: link to {name}#{anchor}")
    assert missing == []


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.*)$", prose_of(page), re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", word.strip().lower()).replace(" ", "-") for word in words}


def test_every_example_is_run_by_a_page() -> None:
    commands = [
        command
        for page in PAGES
        for block in blocks(page)
        if block.language == "console" and not block.reason
        for command, _ in block.commands
    ]
    examples = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py"))
    assert len(examples) >= 4
    # Other tests run the client of Triton Inference Server, and the loop in MNN.
    assert [name for name in examples if not any(name in command for command in commands)] == [
        "examples/run_in_mnn.py",
        "examples/triton_client.py",
    ]
