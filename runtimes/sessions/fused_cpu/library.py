"""Builds the fused operator from its C++ sources and finds the library that was built.

The fused operator computes what about a dozen standard operators compute in a layer: the ring write, the
position scores, the shift, the mask, the softmax and the weighted values. Its scores never leave the
processor's cache. It is compiled once on the machine that runs the artefact, which needs a C++ compiler for
it.

Loading a library executes it. A library is therefore used only where nobody but this user and root can have
written it: the file and every folder above it must belong to one of them, and no other user may write there.
The folders are examined from the root downwards and without links, so nobody else can exchange a folder that
was examined. For the same reason nobody else can exchange the library between this check and the moment when
ONNX Runtime loads it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path

from runtimes.base.errors import MissingPackageError, UserError, first_line
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
    """The library for this processor and these sources; None where none is built, where the file was altered,
    or where another user may have written it.
    """
    return next(
        (
            library
            for library in _libraries()
            if _fault(library) is None and library.stem.endswith(sha256(library)[:DIGITS])
        ),
        None,
    )


def ignored() -> str | None:
    """One sentence that says why a library that lies in the cache is not loaded, and how to mend it.

    None where the library is used, where there is none, or where it is only damaged.
    """
    faults = [fault for library in _libraries() if (fault := _fault(library))]
    return None if built() or not faults else f"the fused operator in the cache is not loaded: {faults[0]}."


def build() -> Path:
    """The library for this processor, compiled into the user's cache unless it is there already.

    The compiler is the command in the variable CXX, or g++. Raises MissingPackageError where it cannot be
    started, and UserError where it fails or where another user may write the cache.
    """
    if library := built():
        return library
    cache, unused = _cache(), _libraries()
    if cache is None:
        raise UserError(
            "there is no home folder for the fused operator; name a folder in the variable XDG_CACHE_HOME."
        )
    compiler = _compiler()
    with writing(cache):
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)
        if fault := _fault(cache):
            raise UserError(f"the fused operator would not be loaded from {cache}: {fault}.")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            compiled = Path(folder) / "fused.so"
            _compile(compiler, compiled)
            compiled.chmod(0o700)  # the umask may let the group write
            library = cache / f"fused-{_key()}-{sha256(compiled)[:DIGITS]}.so"
            os.replace(compiled, library)
        for other in set(unused) - {library}:
            other.unlink(missing_ok=True)
    return library


def _compiler() -> list[str]:
    """The words of the variable CXX, or g++."""
    given = os.environ.get("CXX", "g++")
    try:
        return shlex.split(given) or ["g++"]
    except ValueError as error:  # a quotation mark that is not closed
        raise UserError(
            f"the variable CXX is {given!r:.80}, which is no command ({first_line(error)}); name GCC 9 or "
            "newer."
        ) from error


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
    """The folder of this user's libraries, without links; None for a user without a home folder, as in some
    containers.

    A relative XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification asks: the working folder may
    be a stranger's.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        parent = given if given.is_absolute() else Path.home() / ".cache"
        return (parent / "xl-export").resolve() if parent.is_absolute() else None
    except (RuntimeError, OSError):  # no home folder, or links in a circle
        return None


def _fault(path: Path) -> str | None:
    """Who else may write a file or folder or a folder above it, and how to mend it; None where nobody may.

    A folder above the cache may be one in which only the owner of a file can replace it, such as /tmp.
    """
    cache = _cache()
    for place in (*reversed(path.parents), path):
        try:
            facts = os.lstat(place)
        except OSError as error:
            return f"{place} cannot be examined ({error.strerror}); name another folder in XDG_CACHE_HOME"
        folder = stat.S_ISDIR(facts.st_mode)
        if not folder and not (place == path and stat.S_ISREG(facts.st_mode)):
            return f"{place} is no regular file; delete it and run `xl-export fused-kernel`"
        if facts.st_uid not in (os.geteuid(), 0):
            mend = "name a folder of your own in XDG_CACHE_HOME" if folder else "delete it"
            return f"{place} belongs to another user (number {facts.st_uid}); {mend}"
        above = cache is not None and place in cache.parents
        shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if shared and not (above and facts.st_mode & stat.S_ISVTX):
            mend = f"run `chmod go-w {shlex.quote(str(place))}`" if folder else "delete it"
            return f"other users may write {place}; {mend}, and run `xl-export fused-kernel`"
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
