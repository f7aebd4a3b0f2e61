"""The fused attention operator: built from source once on a machine, then used for every artefact that has a graph for it.

One operator does what a layer's ring write, position scores, shift, mask, softmax and values do as a dozen standard
ones, and no score leaves the processor's cache. It needs a C++ compiler on the machine that runs the artefact, nothing else.
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
    "ort.hpp",
    "attention.hpp",
    "block.hpp",
    "token.hpp",
    "head.hpp",
    "half.hpp",
    "vectors.hpp",
)
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fwrapv", "-shared", "-fPIC", "-w")
CPUINFO = Path("/proc/cpuinfo")
DIGITS = 16  # of a hash, in a file name


def built() -> Path | None:
    """The library for this processor and these sources, where `build` has made it and it is as it was made."""
    return next(
        (library for library in _libraries() if library.stem.endswith(sha256(library)[:DIGITS])), None
    )


def build() -> Path:
    """Compiles the library for this processor into the user's cache, unless it is there already, and returns it.

    The compiler is $CXX, or g++. Raises MissingPackageError where there is none, UserError where it fails.
    """
    if library := built():
        return library
    cache, damaged = _cache(), _libraries()
    if cache is None:
        raise UserError(
            "there is no home folder to keep the fused kernel in; name a folder in the variable XDG_CACHE_HOME."
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
            f"{compiler[0]} could not be started ({error.strerror}); install GCC, or name it in the variable CXX."
        ) from error
    if ended.returncode:
        said = next(
            (line for line in ended.stderr.splitlines() if "error" in line), f"exit code {ended.returncode}"
        )
        raise UserError(
            f"{compiler[0]} could not compile the fused kernel ({said:.200}); give GCC 9 or newer in CXX."
        )
    if not library.is_file():
        raise UserError(f"{compiler[0]} wrote no fused kernel; give GCC 9 or newer in CXX.")


def _libraries() -> list[Path]:
    """What is there for this processor and these sources: `fused-KEY-HASH.so`, where HASH begins the file's own SHA-256.

    A damaged library can end the process that loads it, so one that its name does not fit is never loaded.
    """
    cache = _cache()
    return [] if cache is None else sorted(cache.glob(f"fused-{_key()}-*.so"))


def _cache() -> Path | None:
    """The folder of this user's libraries; None for a user without a home, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xl-export"
    except RuntimeError:
        return None


def _key() -> str:
    """Of sources, flags and processor, so that neither an older nor another machine's library is ever loaded."""
    facts = [
        platform.machine(),
        *FLAGS,
        _processor(),
        *((FOLDER / name).read_text(encoding="utf-8") for name in SOURCES),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:DIGITS]


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    if not CPUINFO.is_file():
        return platform.processor()
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
