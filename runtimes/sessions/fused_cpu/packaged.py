"""The libraries of the fused operator that came with the installed package.

A wheel holds one for each variant of its architecture (`variants.py`). An editable installation holds none,
nor does one that was made from the sources without a compiler.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

from runtimes.base.files import sha256
from runtimes.sessions.fused_cpu.processor import features
from runtimes.sessions.fused_cpu.trust import Fault, fault
from runtimes.sessions.fused_cpu.variants import HASHES, VARIANTS, Variant

LIBRARIES = Path(__file__).parent / "libraries"


def library() -> Path | None:
    """The package's best library for this processor; None if it has none, or if another user may have
    written it.

    A library whose content does not have the hash that the package recorded is left out.
    """
    folder = LIBRARIES.resolve()
    recorded = _recorded(folder)
    for variant in reversed(_served()):
        path = folder / variant.file
        if path.is_file() and not fault(path, folder=folder) and sha256(path) == recorded.get(variant.file):
            return path
    return None


def refused() -> Fault | None:
    """Why a library of the package is not loaded although this processor runs it; None for any other
    reason than that others may write it.
    """
    folder = LIBRARIES.resolve()
    paths = [folder / variant.file for variant in reversed(_served())]
    faults = [found for path in paths if path.is_file() and (found := fault(path, folder=folder))]
    return faults[0] if faults else None


def variant_of(path: Path) -> str | None:
    """The name of the variant, as `avx2`, of a library of the package; None for any other library."""
    names = (variant.name for variant in _served() if variant.file == path.name)
    return next(names, None) if path.parent == LIBRARIES.resolve() else None


def _served() -> list[Variant]:
    """The variants that this processor runs, the fastest last."""
    present = features()
    return [v for v in VARIANTS.get(platform.machine(), ()) if present.issuperset(v.features)]


def _recorded(folder: Path) -> dict[str, str]:
    """The SHA-256 of each library by its file name, as it was when the package was made."""
    try:
        recorded = json.loads((folder / HASHES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}
