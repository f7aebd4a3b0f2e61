"""Engines that ONNX Runtime has built, kept in the user's cache.

An engine is an ONNX file with an EPContext node, named `engine-KEY-HASH.onnx`, where HASH is the beginning
of its own SHA-256. It is code that runs on the GPU, so it is used only if no other user but root can have
written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtimes.base.files import sha256
from runtimes.base.progress import say_once
from runtimes.sessions.fused_cpu.library import cache_folder
from runtimes.sessions.fused_cpu.trust import fault

DIGITS = 16  # of a hash that are part of a file name


def key_of(*facts: object) -> str:
    """The part of a file's name that only an engine for the same facts has."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:DIGITS]


def kept_engine(key: str) -> bytes | None:
    """The content of the engine for a key; None if there is none, if it was altered, or if another user
    may have written it.
    """
    folder = _folder()
    for path in [] if folder is None else sorted(folder.glob(f"engine-{key}-*.onnx")):
        if found := fault(path, folder=folder or path.parent):
            say_once(f"an engine in the cache is not used: {found}.")
            continue
        with contextlib.suppress(OSError):  # another process may just have replaced it
            content = path.read_bytes()
            if path.stem.endswith(hashlib.sha256(content).hexdigest()[:DIGITS]):
                return content
    return None


@contextlib.contextmanager
def keeping_engine(key: str) -> Iterator[Path | None]:
    """A path for a new engine's file, which is kept, whole, when the block ends without an error.

    None if it cannot be kept: there is no home folder, or the cache cannot be written, or other users may
    write it. Then only this process uses the engine, and a warning says why.
    """
    with contextlib.ExitStack() as stack:
        folder = temporary = None
        try:
            if (folder := _made_folder()) is not None:
                temporary = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        except OSError as error:  # as in a container whose home folder is read-only
            _say_not_kept(error)
        if folder is None or temporary is None:
            yield None
            return
        path = Path(temporary) / "engine.onnx"
        yield path
        try:
            if path.is_file():
                path.chmod(0o600)  # the umask may let the group write
                for old in folder.glob(f"engine-{key}-*.onnx"):
                    old.unlink(missing_ok=True)
                os.replace(path, folder / f"engine-{key}-{sha256(path)[:DIGITS]}.onnx")
        except OSError as error:
            _say_not_kept(error)


def _made_folder() -> Path | None:
    """The folder of engines, which is created if necessary; None if nothing may be kept in it."""
    if (folder := _folder()) is None:
        return None
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if found := fault(folder, folder=folder):
        say_once(f"the engine is not kept: {found}.")
        return None
    return folder


def _say_not_kept(error: OSError) -> None:
    say_once(f"the engine is not kept: {error.filename} cannot be written ({error.strerror}).")


def _folder() -> Path | None:
    cache = cache_folder()
    return None if cache is None else cache / "engines"
