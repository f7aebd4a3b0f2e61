"""The memory of B streams: what a session reads and updates, owned by the caller, and its file form."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtimes.errors import ArtefactError, StreamError
from runtimes.files import atomic_file, read_npz

if TYPE_CHECKING:
    from runtimes.session import Session

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
    binding: Any = field(default=None, init=False, repr=False, compare=False)  # a session's own cache over these arrays

    @property
    def batch(self) -> int:
        return len(self.positions)

    def copy(self) -> Memory:
        """An independent fork of all streams."""
        return Memory(self.positions.copy(), {name: array.copy() for name, array in self.tensors.items()}, self.owner)

    def __deepcopy__(self, _: dict[int, Any]) -> Memory:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "binding": None}


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
    tensors = {  # in this machine's layout, whatever the file's
        name.removeprefix("tensor/"): np.ascontiguousarray(array, array.dtype.newbyteorder("=")) for name, array in arrays.items()
    }
    memory = Memory(positions, tensors, owner)
    try:
        check_memory(session, memory)
    except StreamError as error:
        raise ArtefactError(f"{path} is damaged: {error}") from error
    if not all(np.isfinite(array).all() for array in tensors.values()):
        raise ArtefactError(f"{path} is damaged: it holds values that are not finite; start a new stream.")
    return memory


def check_memory(session: Session, memory: Memory) -> None:
    """Raises StreamError where a memory's arrays are not those of the session: names, types, shapes, positions."""
    positions = memory.positions
    if not isinstance(positions, np.ndarray) or positions.dtype != np.int64 or positions.ndim != 1 or len(positions) == 0:
        raise StreamError("the memory's positions are not an int64 array [batch]; use memory from start() or load_memory().")
    if np.abs(positions).max() > MAX_POSITION or positions.min() < -MAX_POSITION:
        raise StreamError(f"the memory's positions reach beyond {MAX_POSITION}; set them to 0 to start new texts.")
    expected = {tensor.name: (tensor.sizes(batch=len(positions)), tensor.dtype) for tensor in session.state}
    if {name: (array.shape, array.dtype.name) for name, array in memory.tensors.items()} != expected:
        raise StreamError(
            "the memory's arrays are not those of this session (names, types, shapes); use memory from start() or load_memory()."
        )
