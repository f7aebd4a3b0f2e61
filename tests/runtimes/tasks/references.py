"""The reference in a folder as arrays, read and written as a program in another language would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def read_reference(folder: Path) -> Arrays:
    document = json.loads((folder / "reference.json").read_text())
    arrays = {name: np.array(document[name]) for name in ("tokens", "segments", "restarts")}
    for name in ("log_probs", "last"):
        stored = document[name]
        count = int(np.prod(stored["shape"]))
        flat = np.fromfile(folder / stored["file"], "<f4", count, offset=stored["offset"])
        arrays[name] = flat.reshape(stored["shape"])
    return arrays


def write_reference(folder: Path, arrays: Arrays) -> None:
    """Writes arrays of any shapes, `log_probs` behind `last`, which readers must not mind."""
    document: dict[str, object] = {name: array.tolist() for name, array in arrays.items()}
    content = b""
    for name in sorted({"log_probs", "last"} & set(arrays)):
        document[name] = {
            "file": "reference.bin",
            "dtype": "float32",
            "shape": arrays[name].shape,
            "offset": len(content),
        }
        content += arrays[name].astype("<f4").tobytes()
    (folder / "reference.bin").write_bytes(content)
    (folder / "reference.json").write_text(json.dumps(document))
