"""Compiles programs against the headers in cpp/ and the library in ONNX Runtime's wheel."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.sealing import sealed

ROOT = Path(__file__).resolve().parents[2]
CPP = ROOT / "cpp"
DRIVER = ROOT / "tests" / "parity" / "driver.cpp"
BUILD = ROOT / "build" / "cpp"  # what was compiled stays there, under a hash of what it was compiled from
STRICT = ("-std=c++17", "-Wall", "-Wextra", "-Werror")
SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def onnxruntime_library() -> Path:
    """The library inside the wheel of ONNX Runtime."""
    found = find_spec("onnxruntime")
    assert found is not None
    assert found.origin is not None
    return next((Path(found.origin).parent / "capi").glob("libonnxruntime.so.*"))


def compiled(source: Path, *flags: str, compiler: str = "g++", library: Path | None = None) -> Path:
    """The program of a source, compiled unless it is there already; skips where there is no compiler.

    Several test processes may ask at once: one compiles, and the others wait for it.
    """
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed, so nothing of cpp/ can be compiled")
    library = library or onnxruntime_library()
    headers = sorted(path for path in CPP.rglob("*") if path.suffix in (".hpp", ".h", ".cpp"))
    facts = [compiler, *flags, str(library), *(path.read_text() for path in (source, *headers))]
    folder = BUILD / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / source.stem
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.is_file():
            (folder / "libonnxruntime.so.1").unlink(missing_ok=True)
            (folder / "libonnxruntime.so.1").symlink_to(library)  # the name that the library calls itself
            includes = (f"-I{CPP}", f"-I{CPP / 'third_party' / 'onnxruntime'}")
            linked = (str(folder / "libonnxruntime.so.1"), f"-Wl,-rpath,{folder}")
            command = (compiler, *STRICT, *flags, *includes, str(source), "-o", f"{program}.new", *linked)
            ended = subprocess.run(command, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr[-4000:]
            os.replace(f"{program}.new", program)
    return program


def with_vocabulary(artefact: Path, folder: Path, vocabulary: dict[str, Any], **files: bytes) -> Path:
    """A copy of an artefact with another vocabulary, its hashes and its digest right."""
    shutil.copytree(artefact, folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_bytes(sealed(spec, folder, *spec["files"]))
    return folder
