"""The memory of B streams: what a session reads and updates, owned by the caller, and its file form."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.files import atomic_file

MAX_POSITION = 1 << 62


@dataclass
class Memory:
    """State of B independent streams.

    positions: int64 [B], the stream position of each row's next token. Setting one to 0 starts that row on
    a new text: nothing has to be cleared, no row sees another's past. A negative position -n makes the
    row's next n tokens padding, invisible to all that follows; so rows of unequal length end together.
    tensors: the memory arrays by name, finite, updated in place by `Session.step`; only `copy()` makes others.
    owner: identity of the artefact or run that the numbers belong to.
    """

    positions: np.ndarray
    tensors: dict[str, np.ndarray]
    owner: str
    binding: Any = field(
        default=None, init=False, repr=False, compare=False
    )  # a session's own cache over these arrays

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
    """Writes the streams to an `.npz` file, atomically; `load_memory` continues them bit for bit."""
    with atomic_file(Path(path)) as temporary, open(temporary, "wb") as stream:
        arrays = {f"tensor/{name}": array for name, array in memory.tensors.items()}
        np.savez(stream, owner=np.array(memory.owner), positions=memory.positions, **arrays)
