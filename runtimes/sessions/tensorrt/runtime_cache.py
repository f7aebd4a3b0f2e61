"""What TensorRT-RTX compiles when it opens an engine, kept in a folder that the user names.

TensorRT-RTX compiles an engine's kernels for the GPU when a context is made, and for shapes that it meets
later. The variable `XL_EXPORT_RTX_CACHE` names a folder in which that work is kept for the next process.
Without the variable nothing is kept. The files hold code for the GPU, so they are read only if no other user
but root can have written them.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from runtimes.base.errors import StreamError
from runtimes.base.files import read_bytes
from runtimes.base.progress import say_once
from runtimes.contract.engine import Gpu
from runtimes.sessions.fused_cpu.trust import fault, private_file

VARIABLE = "XL_EXPORT_RTX_CACHE"


class RuntimeCache:
    """The compiled kernels of one engine on one GPU: read when the engine is opened, written when it is
    closed.
    """

    def __init__(self, identity: str, gpu: Gpu) -> None:
        given = os.environ.get(VARIABLE)
        self.path: Path | None = None
        self._cache: Any = None
        if not given:
            return
        if not Path(given).is_dir():
            raise StreamError(
                f"{VARIABLE} is {given!r:.200}, which is no folder; make it, or unset the variable."
            )
        folder = Path(given).resolve()
        self.path = folder / f"{identity:.16}-{gpu.compute_capability}.cache"
        if found := fault(self.path if self.path.exists() else folder, folder=folder):
            raise StreamError(
                f"{VARIABLE} is {given!r:.200}, and {found}; name a folder where only you may write."
            )

    def use(self, runtime_config: Any) -> None:
        """Lets a context that is made with this configuration share the cache."""
        if self.path is None:
            return
        if self._cache is None:
            self._cache = runtime_config.create_runtime_cache()
            # A file that TensorRT-RTX rejects is of another release: everything is compiled again.
            if self.path.exists():
                self._cache.deserialize(read_bytes(self.path))
            weakref.finalize(self, _save, self._cache, self.path)
        runtime_config.set_runtime_cache(self._cache)


def _save(cache: Any, path: Path) -> None:
    """Writes the cache for its user only. It runs when a session ends, so a failure is only printed."""
    content = bytes(memoryview(cache.serialize()))
    try:
        with private_file(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        say_once(f"what TensorRT-RTX compiled is not kept: {path} could not be written ({error.strerror}).")
