"""The memory of B streams: what a session reads and updates, owned by the caller, and its file form."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtimes.errors import ArtefactError, StreamError
from runtimes.files import atomic_file, read_npz

if TYPE_CHECKING:
    from runtimes.session import Session


@dataclass
class Memory:
    """State of B independent streams.

    positions: int64 [B], the stream position of each row's next token. Setting one to 0 starts that row on
    a new text: nothing has to be cleared, no row sees another's past. A negative position -n makes the
    row's next n tokens padding, invisible to all that follows; so rows of unequal length end together.
    tensors: the memory arrays by name, updated in place by `Session.step`.
    owner: identity of the artefact or run that the numbers belong to.
    """

    positions: np.ndarray
    tensors: dict[str, np.ndarray]
    owner: str
    binding: Any = field(default=None, repr=False, compare=False)  # a session's own cache over these arrays

    @property
    def batch(self) -> int:
        return len(self.positions)

    def copy(self) -> Memory:
        """An independent fork of all streams."""
        return Memory(self.positions.copy(), copy.deepcopy(self.tensors), self.owner)


def save_memory(memory: Memory, path: Path | str) -> None:
    """Writes the streams to an `.npz` file, atomically; `load_memory` continues them bit for bit."""
    with atomic_file(Path(path)) as temporary, open(temporary, "wb") as stream:
        arrays = {f"tensor/{name}": array for name, array in memory.tensors.items()}
        np.savez(stream, owner=np.array(memory.owner), positions=memory.positions, **arrays)


def load_memory(path: Path | str, session: Session) -> Memory:
    """The streams in a file that `save_memory` wrote, for the session's own artefact.

    Raises StreamError when they belong to another artefact, ArtefactError when the file is damaged.
    """
    arrays = read_npz(Path(path))
    if not {"owner", "positions"} <= set(arrays):
        raise ArtefactError(f"{path} holds no stream memory; expected a file written by save_memory.")
    owner, positions = str(arrays.pop("owner")), arrays.pop("positions")
    if owner != session.identity:
        raise StreamError(
            f"{path} holds memory of the artefact {owner:.12}, and this one is {session.identity:.12}; "
            "open the artefact that the stream was started on, or start a new stream."
        )
    if positions.dtype != np.int64 or positions.ndim != 1 or len(positions) == 0:
        raise ArtefactError(f"{path} is damaged: its positions are {positions.dtype} {list(positions.shape)}.")
    tensors = {  # in this machine's layout, whatever the file's
        name.removeprefix("tensor/"): np.ascontiguousarray(array, array.dtype.newbyteorder("=")) for name, array in arrays.items()
    }
    expected = {tensor.name: (tensor.sizes(batch=len(positions)), tensor.dtype) for tensor in session.state}
    if {name: (array.shape, array.dtype.name) for name, array in tensors.items()} != expected:
        raise ArtefactError(f"{path} is damaged: its arrays do not have the names, types and shapes of this artefact's memory.")
    return Memory(positions, tensors, owner)
