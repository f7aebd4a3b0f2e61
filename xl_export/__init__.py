"""Takes a trained run to an artefact that runs without PyTorch: `export(run, out)`."""

from __future__ import annotations

from typing import Any

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    """`xl_export.export`, imported when first used: it needs torch and onnx, and the command line may not."""
    if name == "export":
        from xl_export.shadow import shadowed

        if sentence := shadowed():
            raise ImportError(sentence)
        from runtimes.base.startup import prepare_libraries

        prepare_libraries()  # before PyTorch and ONNX Runtime load
        from xl_export.artefact.export import export

        return export
    raise AttributeError(f"module 'xl_export' has no attribute {name!r}")
