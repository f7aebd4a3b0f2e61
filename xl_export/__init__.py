"""Takes a model to an artefact that runs without PyTorch: `export(run, out)` and `trace(module, out, …)`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "ByteVocab",
    "CharVocab",
    "IdsVocab",
    "MemoryRule",
    "Sizes",
    "constant",
    "export",
    "features",
    "ids",
    "ring_distances",
    "ring_write",
    "trace",
]

# The module of each name, which is imported when it is first used: these need torch and onnx, and the command
# line must not. Only `export` imports the package `trainer`, whose name many a user's file has too.
_HOME = {
    "export": "xl_export.artefact.export",
    "trace": "xl_export.artefact.traced",
    "ByteVocab": "runtimes.contract.vocabulary",
    "CharVocab": "runtimes.contract.vocabulary",
    "IdsVocab": "runtimes.contract.vocabulary",
    "MemoryRule": "runtimes.contract.rule",
    "Sizes": "xl_export.tracing.module",
    "constant": "xl_export.tracing.module",
    "features": "xl_export.tracing.module",
    "ids": "xl_export.tracing.module",
    "ring_write": "xl_export.tracing.ring",
    "ring_distances": "xl_export.tracing.ring",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """A name of `__all__`, imported when first used."""
    if name in _HOME:
        from xl_export.shadow import PACKAGES, shadowed

        if sentence := shadowed(PACKAGES if name == "export" else ("runtimes",)):
            raise ImportError(sentence)
        from runtimes.base.startup import prepare_libraries

        prepare_libraries()  # before PyTorch and ONNX Runtime load
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'xl_export' has no attribute {name!r}")
