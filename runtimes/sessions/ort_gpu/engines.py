"""Engines that ONNX Runtime has built, kept in the user's cache.

An engine is an ONNX file with an EPContext node, named `engine-KEY-HASH.onnx`, where HASH is the beginning
of its own SHA-256. It is code that runs on the GPU, so it is used only where nobody but this user and root
can have written it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtimes.base.files import sha256, writing
from runtimes.base.progress import say_once
from runtimes.sessions.fused_cpu.library import cache_folder
from runtimes.sessions.fused_cpu.trust import fault

DIGITS = 16  # of a hash that are part of a file name


def key_of(*facts: object) -> str:
    """The part of a file's name that only an engine for the same facts has."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:DIGITS]


def kept_engine(key: str) -> bytes | None:
    """The content of the engine for a key; None where there is none, where it was altered, or where another
    user may have written it.
    """
    folder = _folder()
    for path in [] if folder is None else sorted(folder.glob(f"engine-{key}-*.onnx")):
        if found := fault(path, folder=folder or path.parent):
            say_once(f"an engine in the cache is not used: {found.says}.")
            continue
        content = path.read_bytes()
        if path.stem.endswith(hashlib.sha256(content).hexdigest()[:DIGITS]):
            return content
    return None


@contextmanager
def keeping_engine(key: str) -> Iterator[Path | None]:
    """A path for a new engine's file, which is kept, whole, when the block ends without an error.

    None where it cannot be kept: there is no home folder, or other users may write the cache.
    """
    folder = _folder()
    if folder is None:
        yield None
        return
    with writing(folder):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    if found := fault(folder, folder=folder):
        say_once(f"the engine is not kept: {found.says}.")
        yield None
        return
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "engine.onnx"
        yield path
        if path.is_file():
            path.chmod(0o600)  # the umask may let the group write
            for old in folder.glob(f"engine-{key}-*.onnx"):
                old.unlink(missing_ok=True)
            os.replace(path, folder / f"engine-{key}-{sha256(path)[:DIGITS]}.onnx")


def _folder() -> Path | None:
    cache = cache_folder()
    return None if cache is None else cache / "engines"
