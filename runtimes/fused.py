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
from pathlib import Path

from runtimes.errors import MissingPackageError, UserError
from runtimes.files import atomic_file, writing

FOLDER = Path(__file__).parent / "kernel"
SOURCES = ("library.cpp", "ort.hpp", "attention.hpp", "block.hpp", "token.hpp", "head.hpp", "vectors.hpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fwrapv", "-shared", "-fPIC", "-w")
CPUINFO = Path("/proc/cpuinfo")


def built() -> Path | None:
    """The library for this processor and these sources, where `build` has made it."""
    library = _library()
    return library if library.is_file() else None


def build() -> Path:
    """Compiles the library for this processor into the user's cache, unless it is there already, and returns it.

    The compiler is $CXX, or g++. Raises MissingPackageError where there is none, UserError where it fails.
    """
    library = _library()
    if library.is_file():
        return library
    compiler = shlex.split(os.environ.get("CXX", "g++")) or ["g++"]
    with writing(library):
        library.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(library) as temporary:
        command = [*compiler, *FLAGS, str(FOLDER / SOURCES[0]), "-o", str(temporary)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise MissingPackageError(
                f"{compiler[0]} could not be started ({error.strerror}); install GCC, or name it in the variable CXX."
            ) from error
        if ended.returncode:
            said = next((line for line in ended.stderr.splitlines() if "error" in line), f"exit code {ended.returncode}")
            raise UserError(f"{compiler[0]} could not compile the fused kernel ({said:.200}); give GCC 9 or newer in CXX.")
    return library


def _library() -> Path:
    """Its file: named by sources, flags and processor, so that neither an older nor another machine's is ever loaded."""
    facts = [platform.machine(), *FLAGS, _processor(), *((FOLDER / name).read_text(encoding="utf-8") for name in SOURCES)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "xl-export" / f"fused-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    if not CPUINFO.is_file():
        return platform.processor()
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
