"""Every command and snippet of the README runs, in a folder of its own; only lengths of training and measuring are cut."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORTER = {  # what the test adds to a command, so that it takes seconds
    "xl-export train": "--steps 20",
    "xl-export demo": "--steps 20",
    "python -m benchmarks run sliding-window": "--attention-lengths 16,32 --repeats 3 --history history.jsonl",
    "python -m benchmarks sliding-window": "--attention-lengths 16,32 --repeats 3 --history history.jsonl",
    "python -m benchmarks run memory-forms": "--config small --mem-len 64 --repeats 3 --history history.jsonl",
    "python -m benchmarks memory-forms": "--config small --mem-len 64 --repeats 3 --history history.jsonl",
    "python -m benchmarks run decode": "--attention-lengths 16,32 --repeats 3 --history history.jsonl",
    "python -m benchmarks run latency": "--mem-len 64 --repeats 50 --history history.jsonl",
}
PATH = "/usr/bin:/bin"
ELSEWHERE = (
    "git clone",
    "cd ",
    "make ",
    "pip install",
    "torchrun",
)  # run by continuous integration and other tests


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Lines of the console blocks that begin with `$ `."""
    return [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


def shortened(command: str) -> str:
    for start, extra in SHORTER.items():
        if command.startswith(start):
            return f"{command} {extra}"
    return command


@pytest.mark.timeout(600)
def test_every_command_and_snippet_runs_in_order(tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    ran = 0
    for command in commands():
        if command.startswith(ELSEWHERE):
            continue
        words = shlex.split(shortened(command))
        words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "xl_export"]
        if command == "xl-export fused-kernel" and shutil.which("g++", path=PATH) is None:
            continue  # tests/runtimes/sessions/test_fused_cpu.py skips with the reason
        cache = str(tmp_path / "cache")
        environment = {"PYTHONPATH": str(ROOT), "PATH": PATH, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache}
        result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        ran += 1
    assert ran >= 7
    for snippet in blocks("python"):
        result = subprocess.run(
            [sys.executable, "-c", snippet], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr


def test_every_make_target_of_the_readme_exists() -> None:
    targets = {word for command in commands() if command.startswith("make ") for word in command.split()[1:]}
    assert targets >= {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_every_file_that_the_documents_name_exists() -> None:
    documents = [
        README,
        *(
            path.read_text(encoding="utf-8")
            for path in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
        ),
    ]
    for text in documents:
        for name in re.findall(
            r"`((?:runtimes|trainer|xl_export|benchmarks|tests|docs)/[\w/]+\.(?:py|md|json))`", text
        ):
            assert (ROOT / name).is_file(), name
        for name in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name
