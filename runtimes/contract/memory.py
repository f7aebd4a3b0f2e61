"""The memory of B streams, which the caller owns and a session reads and updates, and its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.files import atomic_file

MAX_POSITION = 1 << 62


@dataclass
class Memory:
    """The state of B independent streams.

    positions: int64 [B], the stream position of each row's next token. Setting one to 0 starts a new text in
    that row. Nothing has to be cleared, and no row sees the past of another. A negative position -n makes the
    next n tokens of the row padding, which is invisible to all tokens after it; so rows of unequal length end
    together. tensors: the memory arrays by name. Their values are finite. `Session.step` updates them in
    place, and only `copy()` makes new ones. owner: the identity of the artefact or run that the numbers
    belong to. binding: what a session keeps over these arrays from step to step; it is neither copied nor
    saved.
    """

    positions: np.ndarray
    tensors: dict[str, np.ndarray]
    owner: str
    binding: Any = field(default=None, init=False, repr=False, compare=False)

    @property
    def batch(self) -> int:
        return len(self.positions)

    def copy(self) -> Memory:
        """An independent fork of all streams."""
        return Memory(
            self.positions.copy(), {name: array.copy() for name, array in self.tensors.items()}, self.owner
        )

    def __deepcopy__(self, _: dict[int, Any]) -> Memory:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "binding": None}


def save_memory(memory: Memory, path: Path | str) -> None:
    """Writes the streams to an `.npz` file, atomically. Streams from `load_memory` continue bit for bit."""
    with atomic_file(Path(path)) as temporary, open(temporary, "wb") as stream:
        arrays = {f"tensor/{name}": array for name, array in memory.tensors.items()}
        np.savez(stream, owner=np.array(memory.owner), positions=memory.positions, **arrays)
