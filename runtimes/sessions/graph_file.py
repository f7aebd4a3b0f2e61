"""Looks into an ONNX file before ONNX Runtime gets it: which files it refers to, whether it can loop, and
whether it holds compiled code.

Only the few fields of the format that answer these questions are read (onnx.proto: ModelProto,
GraphProto, NodeProto, TensorProto); the edge has no package that knows them all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from runtimes.base.errors import ArtefactError
from runtimes.base.files import Content

# How a field is stored.
VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5
# The fields of each message that are read: their numbers, and the messages in them.
MESSAGES = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {4: "operator", 5: "attribute"},
    "attribute": {
        5: "tensor",
        10: "tensor",
        6: "graph",
        11: "graph",
        22: "sparse",
        23: "sparse",
    },
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external data"},
    "external data": {1: "key", 2: "value"},
}
# The operators that run a part of the graph repeatedly, perhaps for ever. No graph of this project has one.
LOOPS = {b"Loop", b"Scan", b"SequenceMap"}
COMPILED = b"EPContext"  # the operator that holds what a provider has compiled, or names a file of it
DEEPEST = 16  # graphs within graphs


class _DamagedError(Exception):
    """The bytes are not a message of the format."""


@dataclass
class _Inside:
    """What was found: names of files that hold tensors, operators that loop, whether code is compiled."""

    files: set[bytes] = field(default_factory=set)
    loops: set[bytes] = field(default_factory=set)
    compiled: bool = False


def refuse_foreign_graph(data: Content, *, name: str, files: Collection[str]) -> None:
    """Raises ArtefactError unless an ONNX file reads its tensors only from itself and `files`, and has no
    loop and no compiled code.

    data: the file's content. name: of the file, for the message. files: names that the artefact's spec
    lists.
    """
    inside = _Inside()
    try:
        _read("model", memoryview(data), inside, depth=0)
    except (_DamagedError, RecursionError) as error:
        raise ArtefactError(
            f"{name} is not a readable ONNX file; copy or export the artefact again."
        ) from error
    known = {file.encode() for file in files}
    if other := inside.files - known:
        shown = ascii(min(other).decode("utf-8", "replace"))[:80]
        raise ArtefactError(
            f"{name} takes tensors from the file {shown}, which the artefact's spec does not list; "
            "export the artefact again."
        )
    if inside.compiled:
        raise ArtefactError(
            f"{name} has an {COMPILED.decode()} operator, which holds compiled code, and no artefact has "
            "one; export the artefact again."
        )
    if inside.loops:
        raise ArtefactError(
            f"{name} has a {min(inside.loops).decode()} operator, which may never end, and no step needs "
            "one; export the artefact again."
        )


def refuse_foreign_ort_graph(data: Content, *, name: str) -> None:
    """Raises ArtefactError if a graph in ONNX Runtime's own format has a loop or compiled code.

    The format is a flatbuffer, which stores the name of an operator with its length before it and a zero
    after it, so searching the bytes is enough. Such a file names no other files.
    """
    for operator in sorted((*LOOPS, COMPILED)):
        if re.search(re.escape(len(operator).to_bytes(4, "little") + operator + b"\0"), data):
            raise ArtefactError(
                f"{name} has an operator {operator.decode()}, which no artefact has; export the artefact "
                "again."
            )


def _read(message: str, data: memoryview, inside: _Inside, *, depth: int) -> None:
    """Notes what a message of the format holds. depth: of graphs around it."""
    if depth > DEEPEST:
        raise _DamagedError
    for name, value in _fields(data, MESSAGES[message]):
        if name == "operator":
            if (operator := bytes(value)) in LOOPS:
                inside.loops.add(operator)
            elif operator == COMPILED:
                inside.compiled = True
        elif name == "external data":
            entry = dict(_fields(value, MESSAGES[name]))
            if bytes(entry.get("key", b"")) == b"location":
                inside.files.add(bytes(entry.get("value", b"")))
        else:
            _read(name, value, inside, depth=depth + (message == "graph"))


def _fields(data: memoryview, wanted: Mapping[int, str]) -> Iterator[tuple[str, memoryview]]:
    """Name and content of the fields of a message that are wanted and stored as bytes, in order; the others
    are passed over.
    """
    at = 0
    while at < len(data):
        tag = data[at]
        at += 1
        if tag >= 0x80:  # nearly all tags and lengths are one byte, and there are thousands
            tag, at = _varint(data, at - 1)
        if tag >= 1 << 32:  # other readers drop what is beyond 32 bits, and would see another field
            raise _DamagedError
        kind = tag & 7
        name = wanted.get(tag >> 3)
        if kind == BYTES:
            length = data[at] if at < len(data) else 0x80
            at += 1
            if length >= 0x80:
                length, at = _varint(data, at - 1)
            if length > len(data) - at:
                raise _DamagedError
            if name is not None:
                yield name, data[at : at + length]
            at += length
        elif kind == VARINT:
            if at < len(data) and data[at] < 0x80:
                at += 1
            else:
                _, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise _DamagedError
    if at != len(data):
        raise _DamagedError


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _DamagedError
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise _DamagedError
