"""Engines that ONNX Runtime has built, kept in the user's cache.

An engine is an ONNX file with an EPContext node. It is code that runs on the GPU, so it is used only if no
other user but root can have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from runtimes.base.progress import say_once
from runtimes.sessions.fused_cpu.library import cache_folder
from runtimes.sessions.fused_cpu.trust import fault, private_file

DIGITS = 16  # of a hash that are a file's name


def path_of(*facts: object) -> Path | None:
    """Where the cache has the engine for some facts, or will have it; None if there is no cache."""
    cache = cache_folder()
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:DIGITS]
    return None if cache is None else cache / "engines" / f"engine-{key}.onnx"


def kept_engine(path: Path | None) -> bytes | None:
    """The content of an engine; None if there is none, or if another user may have written it."""
    if path is None or not os.path.exists(path):
        return None
    if found := fault(path, folder=path.parent):
        say_once(f"an engine in the cache is not used: {found}.")
        return None
    return path.read_bytes()


@contextlib.contextmanager
def keeping_engine(path: Path | None) -> Iterator[Path | None]:
    """A temporary path for a new engine, which is kept, whole, when the block ends without an error.

    None if it cannot be kept: there is no home folder, or the cache cannot be written, or other users may
    write it. Then only this process uses the engine, and a warning says why.
    """
    with contextlib.ExitStack() as stack:
        temporary = None
        try:
            if path is not None and _made(path.parent):
                temporary = stack.enter_context(private_file(path))
        except OSError as error:  # as in a container whose home folder is read-only
            _say_not_kept(error)
        yield temporary
        try:
            stack.close()
        except OSError as error:
            _say_not_kept(error)


def _made(folder: Path) -> bool:
    """Creates the folder of engines if necessary; returns whether one may be kept in it."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if found := fault(folder, folder=folder):
        say_once(f"the engine is not kept: {found}.")
    return not found


def _say_not_kept(error: OSError) -> None:
    say_once(f"the engine is not kept: {error.filename} cannot be written ({error.strerror}).")
