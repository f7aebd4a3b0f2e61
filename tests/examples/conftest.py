"""Loads and runs the examples, whose modules import each other by their plain names, as scripts do."""

from __future__ import annotations

import importlib.util
import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Music stands first: both have a prepare.py, and those of stories are loaded by load_example.
sys.path[:0] = [str(EXAMPLES / "music"), str(EXAMPLES / "stories")]


def load_example(example: str, name: str) -> ModuleType:
    """A module of an example, where another example has a module of the same name."""
    spec = importlib.util.spec_from_file_location(f"{example}_{name}", EXAMPLES / example / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run(name: str, *words: object, text: str | bytes = "") -> Ended:
    """Runs a program in this process, which has imported what it needs."""
    stdin = io.TextIOWrapper(io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [name, *map(str, words)])
        patch.setattr(sys, "stdin", stdin)
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())
