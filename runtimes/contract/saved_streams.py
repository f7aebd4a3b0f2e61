"""Saved streams: the file of a memory, and which sessions continue it (docs/reference/saved-streams.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.files import atomic_file
from runtimes.base.sealed import SHA256
from runtimes.base.tensors_file import read_metadata, read_tensors, write_tensors
from runtimes.contract.checks import check_memory, owner_of
from runtimes.contract.conversion import converted
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session

STREAMS = "xl-export stream 1"  # what a file of saved streams calls itself


def save_memory(memory: Memory, path: Path | str) -> None:
    """Writes the streams to a file, atomically. Streams from `load_memory` continue bit for bit.

    The file has the layout of safetensors, which other languages read and write too: see
    docs/reference/saved-streams.md. Raises StreamError if a row that has begun holds values that are not
    finite: it could not be loaded.
    """
    with memory.in_use(), atomic_file(Path(path)) as temporary, open(temporary, "wb") as stream:
        write_memory(memory, stream)


def write_memory(memory: Memory, stream: BinaryIO, notes: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes the streams, as `save_memory` does, to a file that is open for writing.

    notes: texts by name, which come first in the header; readers of the memory pass over them.
    """
    owner = memory.owner
    facts = {
        **notes,
        "format": STREAMS,
        "layout": owner.memory.layout,
        "weights": owner.memory.weights,
        "artefact": owner.artefact,
    }
    if any(memory.adopted):
        facts["adopted"] = ",".join(memory.adopted)
    write_tensors(stream, {"positions": memory.positions, **_arrays_to_save(memory)}, facts)


def _arrays_to_save(memory: Memory) -> dict[str, np.ndarray]:
    """The memory tensors, in which rows that start again are cleared of what is not finite."""
    arrays = {name: np.asarray(array) for name, array in memory.tensors.items()}
    for name, array in arrays.items():
        finite = np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
        if (bad := np.flatnonzero(~finite & (memory.positions > 0))).size:
            raise StreamError(
                f"row {bad[0]} of the memory holds values that are not finite; start a new text in it "
                "(position 0) or take it out before saving."
            )
        if not finite.all():  # rows that start again see nothing of what they held
            arrays[name] = np.where(finite.reshape(-1, *[1] * (array.ndim - 1)), array, array.dtype.type(0))
    return arrays


def holds_streams(path: Path) -> bool:
    """Whether a file is what `save_memory` writes, as far as its beginning says."""
    try:
        if not path.is_file():  # reading from a pipe would wait for its other end
            return False
        return read_metadata(path).get("format") == STREAMS
    except (ArtefactError, OSError):
        return False


def load_memory(path: Path | str, session: Session, *, adopt: bool = False) -> Memory:
    """The memory in a file that `save_memory` wrote, ready for the session to continue its streams.

    The session may be of another artefact, engine or run with the same `memory_identity`. A memory of another
    precision is converted. adopt: also continues streams that other weights computed, of a model with the
    same memory layout; `Memory.adopted` records it. Raises StreamError if the session cannot continue the
    streams, and ArtefactError if the file is damaged.
    """
    facts, arrays = _saved_arrays(Path(path))
    return memory_of(facts, arrays, session, path, adopt=adopt)


def memory_of(
    facts: Mapping[str, str],
    arrays: Mapping[str, np.ndarray],
    session: Session,
    path: Path | str,
    *,
    adopt: bool = False,
) -> Memory:
    """The memory in a file of streams that was read already, with the checks of `load_memory`.

    facts: the texts in the file's header. arrays: `positions` and the memory tensors. path: of the file, for
    messages.
    """
    _refuse_other_memory(facts, arrays, session, path, adopt=adopt)
    # In the byte order of this machine, whatever the file has.
    stored = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}
    positions = np.array(stored.pop("positions"), order="C")
    memory = Memory(positions, converted(stored, session.state, path), owner_of(session))
    try:
        check_memory(session, memory)
    except StreamError as error:
        raise ArtefactError(f"{path} is damaged: {error}") from error
    memory.note_adopted(_adopted_rows(facts, memory.batch, path))
    if facts["weights"] != session.memory_identity.weights:
        memory.note_adopted([f"{before} {facts['weights']}".strip() for before in memory.adopted])
    memory.unsure = False
    return memory


def _refuse_other_memory(
    facts: Mapping[str, str],
    arrays: Mapping[str, np.ndarray],
    session: Session,
    path: Path | str,
    *,
    adopt: bool,
) -> None:
    """Raises StreamError if a file's streams have another layout, or other weights that are not adopted."""
    mine = session.memory_identity
    if facts["layout"] != mine.layout:
        raise StreamError(
            f"{path} holds streams with another memory: {_difference(arrays, session)}; open an artefact "
            "with the same memory form, rule and vocabulary, or start a new stream."
        )
    if facts["weights"] != mine.weights and not adopt:
        raise StreamError(
            f"{path} holds streams that other weights computed ({facts['weights']:.12}, and this model has "
            f"{mine.weights:.12}); give --adopt-streams (adopt=True) to continue them with this model, whose "
            "answers depend on both, or open a model with those weights."
        )


def _difference(arrays: Mapping[str, np.ndarray], session: Session) -> str:
    """The first difference between the memory in a file and a session's memory, in words."""
    for tensor in session.state:
        if tensor.is_scale:
            continue
        row = list(tensor.row)
        if tensor.name not in arrays:
            return f"it has no {tensor.name}, which this model needs"
        if (found := list(arrays[tensor.name].shape[1:])) != row:
            return f"{tensor.name} has the shape {found} in a row, and {row} in this model"
    return "the memory rule or the vocabulary differs"


def _adopted_rows(facts: Mapping[str, str], batch: int, path: Path | str) -> list[str]:
    """What the header says about each row in `adopted`."""
    rows = facts["adopted"].split(",") if "adopted" in facts else [""] * batch
    if len(rows) != batch or not all(word in SHA256 for row in rows for word in row.split()):
        raise ArtefactError(f"{path} is damaged: `adopted` does not have the hashes of {batch} streams.")
    return rows


def describe_streams(path: Path) -> dict[str, Any]:
    """The facts of a file of saved streams, for `info`."""
    facts, arrays = _saved_arrays(path)
    positions = arrays["positions"].tolist()
    adopted = [row.split() for row in _adopted_rows(facts, len(positions), path)]
    return {
        "kind": "streams",
        "artefact": facts.get("artefact"),
        "memory_identity": {"layout": facts["layout"], "weights": facts["weights"]},
        "adopted": adopted,
        "positions": positions,
        "bytes": path.stat().st_size,
    }


def _saved_arrays(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The texts in the header and the arrays of a file that `save_memory` wrote."""
    arrays, facts = read_tensors(path)
    refuse_no_streams(facts, arrays, path)
    return facts, arrays


def refuse_no_streams(facts: Mapping[str, str], arrays: Mapping[str, np.ndarray], path: Path | str) -> None:
    """Raises ArtefactError unless these are header and arrays of a file that `save_memory` wrote."""
    whole = {"layout", "weights"} <= facts.keys() and "positions" in arrays
    if facts.get("format") != STREAMS or not whole:
        raise ArtefactError(f"{path} holds no stream memory; expected a file written by save_memory.")
