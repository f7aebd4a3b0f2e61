"""The modules of an example import each other by their plain names, as scripts do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
