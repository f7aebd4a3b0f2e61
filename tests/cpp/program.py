"""Compiles programs with the library in cpp/ and ONNX Runtime's library in the wheel."""

from __future__ import annotations

import fcntl
import hashlib
import json
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
STRICT = ("-std=c++17", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror")
OPENSSL = Path("/usr/include/openssl/evp.h").exists()
# Flags of a library that verifies signatures; without OpenSSL's headers it refuses every key.
SIGNATURES = ("-DXL_EXPORT_SIGNATURES", "-Wl,--no-as-needed", "-lcrypto") if OPENSSL else ()
SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def onnxruntime_library() -> Path:
    """The library inside the wheel of ONNX Runtime."""
    found = find_spec("onnxruntime")
    assert found is not None
    assert found.origin is not None
    return next((Path(found.origin).parent / "capi").glob("libonnxruntime.so.*"))


def compiled(source: Path, *flags: str, compiler: str = "g++", library: Path | None = None) -> Path:
    """The program of a source, compiled with the library in cpp/ unless it is there already.

    Skips where there is no compiler. Several test processes may ask at once: one compiles, the others wait.
    """
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed, so nothing of cpp/ can be compiled")
    onnxruntime = library or onnxruntime_library()
    own = sorted(path for path in CPP.rglob("*") if path.suffix in (".hpp", ".h", ".cpp"))
    includes = (f"-I{CPP}", f"-isystem{CPP / 'third_party' / 'onnxruntime'}")
    command = (compiler, *STRICT, *flags, *includes)
    facts = repr([*command, *(path.read_text() for path in own)])
    objects = _made(facts, "objects", (*command, "-c", *sorted((CPP / "src").glob("*.cpp"))))
    linked = ("libonnxruntime.so.1", "-Wl,-rpath,$ORIGIN")
    whole = (*command, source, *objects.glob("*.o"), "-o", source.stem, *linked)
    facts += f"{onnxruntime} {source.read_text()}"
    return _made(facts, source.stem, whole, libonnxruntime=onnxruntime) / source.stem


def _made(facts: str, name: str, command: tuple[object, ...], libonnxruntime: Path | None = None) -> Path:
    """The folder of what a command makes from some facts."""
    folder = BUILD / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            if libonnxruntime:  # by the name that the library calls itself
                (folder / "libonnxruntime.so.1").unlink(missing_ok=True)
                (folder / "libonnxruntime.so.1").symlink_to(libonnxruntime)
            words = [str(word) for word in command]
            ended = subprocess.run(words, capture_output=True, text=True, cwd=folder)
            assert ended.returncode == 0, ended.stderr[-4000:]
            (folder / "complete").touch()
    return folder


def with_vocabulary(artefact: Path, folder: Path, vocabulary: dict[str, Any], **files: bytes) -> Path:
    """A copy of an artefact with another vocabulary, its hashes and its digest right."""
    shutil.copytree(artefact, folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_bytes(sealed(spec, folder, *spec["files"]))
    return folder
