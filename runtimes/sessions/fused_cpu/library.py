"""Builds the fused operator from its C++ sources and finds the library that was built.

The fused operator computes what about a dozen standard operators compute in a layer: the ring write, the
position scores, the shift, the mask, the softmax and the weighted values. Its scores never leave the
processor's cache. It is compiled once on the machine that runs the artefact, which needs a C++ compiler for
it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

from runtimes.base.errors import MissingPackageError, UserError
from runtimes.base.files import sha256, writing

FOLDER = Path(__file__).parent
SOURCES = (
    "library.cpp",
    "vendor/onnxruntime/onnxruntime_c_api.h",
    "attention.hpp",
    "block.hpp",
    "token.hpp",
    "head.hpp",
    "half.hpp",
    "vectors.hpp",
)
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fwrapv", "-shared", "-fPIC", "-w")
CPUINFO = Path("/proc/cpuinfo")
DIGITS = 16  # of a hash that are part of a file name


def built() -> Path | None:
    """The library for this processor and these sources; None where none is built or the file was altered."""
    return next(
        (library for library in _libraries() if library.stem.endswith(sha256(library)[:DIGITS])), None
    )


def build() -> Path:
    """The library for this processor, compiled into the user's cache unless it is there already.

    The compiler is the command in the variable CXX, or g++. Raises MissingPackageError where it cannot be
    started and UserError where it fails.
    """
    if library := built():
        return library
    cache, damaged = _cache(), _libraries()
    if cache is None:
        raise UserError(
            "there is no home folder for the fused operator; name a folder in the variable XDG_CACHE_HOME."
        )
    compiler = shlex.split(os.environ.get("CXX", "g++")) or ["g++"]
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            compiled = Path(folder) / "fused.so"
            _compile(compiler, compiled)
            library = cache / f"fused-{_key()}-{sha256(compiled)[:DIGITS]}.so"
            os.replace(compiled, library)
        for other in set(damaged) - {library}:
            other.unlink(missing_ok=True)
    return library


def _compile(compiler: list[str], library: Path) -> None:
    command = [*compiler, *FLAGS, str(FOLDER / SOURCES[0]), "-o", str(library)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise MissingPackageError(
            f"{compiler[0]} could not be started ({error.strerror}); install GCC, or name a compiler in "
            "the variable CXX."
        ) from error
    if ended.returncode:
        message = next(
            (line for line in ended.stderr.splitlines() if "error" in line), f"exit code {ended.returncode}"
        )
        raise UserError(
            f"{compiler[0]} could not compile the fused operator ({message:.200}); "
            "name GCC 9 or newer in the variable CXX."
        )
    if not library.is_file():
        raise UserError(f"{compiler[0]} wrote no library; name GCC 9 or newer in the variable CXX.")


def _libraries() -> list[Path]:
    """The files in the cache for this processor and these sources, damaged ones included.

    A file is named `fused-KEY-HASH.so`, where HASH is the beginning of its own SHA-256: loading a damaged
    library can end the process, so a file whose name does not fit its content is never loaded.
    """
    cache = _cache()
    return [] if cache is None else sorted(cache.glob(f"fused-{_key()}-*.so"))


def _cache() -> Path | None:
    """The folder of this user's libraries; None for a user without a home folder, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xl-export"
    except RuntimeError:
        return None


def _key() -> str:
    """A hash of sources, flags and processor, so that no other version's library is ever loaded."""
    facts = [
        platform.machine(),
        *FLAGS,
        _processor(),
        *((FOLDER / name).read_text(encoding="utf-8") for name in SOURCES),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:DIGITS]


def _processor() -> str:
    """The processor's instruction sets, as the operating system lists them."""
    if not CPUINFO.is_file():
        return platform.processor()
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
