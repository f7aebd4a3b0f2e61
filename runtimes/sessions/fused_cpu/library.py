"""Finds the library of the fused operator, or compiles it from its C++ sources for this processor.

The fused operator computes what about a dozen standard operators compute in a layer: the ring write, the
position scores, the shift, the mask, the softmax and the weighted values. Its scores never leave the
processor's cache. A library that was compiled on this machine, for this very processor, is in the user's
cache and comes first. Then come the libraries of the installed package: a wheel holds one for each variant of
its architecture (`variants.py`), an editable installation none, nor one that was made from the sources
without a compiler.

Loading a library executes it. A library is therefore used only if no other user but root can have written
it (`trust.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from runtimes.base.errors import MissingPackageError, UserError
from runtimes.base.files import writing
from runtimes.sessions.fused_cpu.trust import fault, private_file
from runtimes.sessions.fused_cpu.variants import (
    FLAGS,
    NATIVE,
    SOURCES,
    VARIANTS,
    features,
    listed,
)

FOLDER = Path(__file__).parent
LIBRARIES = FOLDER / "libraries"  # of the package
DIGITS = 16  # of the hash in a file name
FIX = (
    "let only your user own and write it, or name a folder of your own in XDG_CACHE_HOME, and run `xl-export "
    "fused-kernel`"
)


def built() -> Path | None:
    """The library that sessions load: the one compiled on this machine, or else the package's best one for
    this processor.

    None if there is neither, or if another user may have written it.
    """
    return compiled() or packaged()


def compiled() -> Path | None:
    """The library in the cache for this processor and these sources; None as for `built`."""
    library = _library()
    return library if library and _fault(library) is None else None


def packaged() -> Path | None:
    """The package's best library for this processor; None if it has none, or if another user may have
    written it.
    """
    folder = LIBRARIES.resolve()
    return next((path for path in _served(folder) if not fault(path, folder=folder)), None)


def _served(folder: Path) -> list[Path]:
    """The package's libraries that this processor runs, the fastest first."""
    present = features()
    variants = reversed(VARIANTS.get(platform.machine(), ()))
    paths = (folder / variant.file for variant in variants if present.issuperset(variant.features))
    return [path for path in paths if path.is_file()]


def variant() -> str | None:
    """What the library of `built` was compiled for: `native`, or the name of the package's variant."""
    library = built()
    if library is None:
        return None
    in_package = library.parent == LIBRARIES.resolve()
    return library.stem.removeprefix("fused-") if in_package else "native"


def scorer(library: Path, logits: np.ndarray, targets: np.ndarray) -> Callable[[], np.ndarray]:
    """A function that returns log p(target) [B, T] of what these contiguous arrays hold when it is called.

    logits: float32 [B, T, V]. targets: int64 [B, T]; a target of -1 gives 0.
    NumPy takes several times as long.
    """
    assert logits.flags.c_contiguous
    assert targets.flags.c_contiguous
    log_probs = np.empty(targets.shape, np.float32)
    logits_at, targets_at, log_probs_at = (
        array.ctypes.data_as(ctypes.c_void_p)
        for array in (logits, targets, log_probs)  # keeps the arrays
    )
    rows, size = map(ctypes.c_int64, (targets.size, logits.shape[-1]))
    compute = _loaded(library).xl_export_log_probabilities

    def score() -> np.ndarray:
        compute(logits_at, rows, size, targets_at, log_probs_at)
        return log_probs.copy()

    return score


@cache
def _loaded(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


def ignored() -> str | None:
    """A warning: why a library in the cache or in the package is not loaded, and how to fix it.

    None if the better one is used, or if there is none.
    """
    library = _library()
    if library and os.path.exists(library):  # False also in a folder that may not be read
        found = _fault(library)
        return f"the fused operator in the cache is not loaded: {found}; {FIX}." if found else None
    folder = LIBRARIES.resolve()
    faults = (fault(path, folder=folder) for path in _served(folder))
    if packaged() or not (found := next(filter(None, faults), None)):
        return None
    return (
        f"the fused operator of the package is not loaded: {found}; install the package where only you "
        "may write, or run `xl-export fused-kernel`."
    )


def build() -> Path:
    """The library for this processor, compiled into the user's cache unless it is there already.

    The compiler is the command in the variable CXX, or g++. Raises MissingPackageError if it cannot be
    started, and UserError if it fails or if another user may write the cache.
    """
    if library := compiled():
        return library
    library = _library()
    if library is None:
        raise UserError(
            "there is no home folder for the fused operator; name a folder in the variable XDG_CACHE_HOME."
        )
    cache = library.parent
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    with writing(cache):
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)
        if found := _fault(cache):
            raise UserError(f"the fused operator would not be loaded from {cache}: {found}; {FIX}.")
        with private_file(library, mode=0o700) as temporary:
            _compile(compiler, temporary)
    return library


def _compile(compiler: list[str], library: Path) -> None:
    import subprocess  # takes milliseconds, and sessions do not need it

    command = [*compiler, *FLAGS, *NATIVE, "-shared", str(FOLDER / SOURCES[0]), "-o", str(library), "-ldl"]
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


def _library() -> Path | None:
    """Where the cache has the library for this processor and these sources, whether it is there or not."""
    cache = cache_folder()
    return None if cache is None else cache / f"fused-{_key()}.so"


def cache_folder() -> Path | None:
    """The folder of this user's libraries, without links; None for a user without a home folder, as in some
    containers.

    A relative XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification requires: the working folder
    may belong to another user.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        parent = given if given.is_absolute() else Path.home() / ".cache"
        return (parent / "xl-export").resolve() if parent.is_absolute() else None
    except (RuntimeError, OSError):  # no home folder, or links in a circle
        return None


def _fault(path: Path) -> str | None:
    """See `trust.fault`, for a path in the cache or the cache itself."""
    return fault(path, folder=cache_folder() or path.parent)


def _key() -> str:
    """A hash of sources, flags and processor, so that no other version's library is ever loaded."""
    digest = hashlib.sha256(repr([platform.machine(), *FLAGS, *NATIVE, listed()]).encode())
    for name in SOURCES:
        content = (FOLDER / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:DIGITS]
