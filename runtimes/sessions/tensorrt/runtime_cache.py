"""What TensorRT-RTX compiles when it opens an engine, kept in a folder that the user names.

TensorRT-RTX compiles an engine's kernels for the GPU when a context is made, and for shapes that it meets
later. The variable `XL_EXPORT_RTX_CACHE` names a folder in which that work is kept for the next process.
Without the variable nothing is kept. The files hold code for the GPU, so the folder must be the user's own.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from runtimes.base.errors import StreamError
from runtimes.base.files import atomic_file, read_bytes
from runtimes.contract.engine import Gpu

VARIABLE = "XL_EXPORT_RTX_CACHE"


class RuntimeCache:
    """The compiled kernels of one engine on one GPU: read when the engine is opened, written when it is
    closed.
    """

    def __init__(self, identity: str, gpu: Gpu) -> None:
        folder = os.environ.get(VARIABLE)
        self.path = Path(folder) / f"{identity:.16}-{gpu.compute_capability}.cache" if folder else None
        self._cache: Any = None
        if folder and not Path(folder).is_dir():
            raise StreamError(
                f"{VARIABLE} is {folder!r:.200}, which is no folder; make it, or unset the variable."
            )

    def use(self, runtime_config: Any) -> None:
        """Lets a context that is made with this configuration share the cache."""
        if self.path is None:
            return
        if self._cache is None:
            self._cache = runtime_config.create_runtime_cache()
            # A file that TensorRT-RTX does not take is of another release: everything is compiled again.
            if self.path.exists():
                self._cache.deserialize(read_bytes(self.path))
            weakref.finalize(self, _save, self._cache, self.path)
        runtime_config.set_runtime_cache(self._cache)


def _save(cache: Any, path: Path) -> None:
    content = bytes(memoryview(cache.serialize()))
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)
