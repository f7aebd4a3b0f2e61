"""Looks into an ONNX file before ONNX Runtime gets it: which files it refers to, whether it can loop, and
whether it holds compiled code.

Only the few fields of the format that answer these questions are read (onnx.proto: ModelProto,
GraphProto, NodeProto, TensorProto); the edge has no package that knows them all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from runtimes.base.errors import ArtefactError
from runtimes.base.files import Content

# How a field is stored.
VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5
MODEL = {"graph": 7, "functions": 25}
GRAPH = {"node": 1, "initializer": 5, "sparse_initializer": 15}
FUNCTION = {"node": 7, "attribute_proto": 11}
NODE = {"op_type": 4, "attribute": 5}
ATTRIBUTE = {"tensor": (5, 10), "graph": (6, 11), "sparse": (22, 23)}
SPARSE = (1, 2)  # values, indices
TENSOR_EXTERNAL = 13
ENTRY_KEY = 1
ENTRY_VALUE = 2
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


def refuse_foreign_graph(data: Content, *, name: str, files: Collection[str], compiled: bool = False) -> None:
    """Raises ArtefactError unless an ONNX file reads its tensors only from itself and `files`, and has no
    loop and no compiled code.

    data: the file's content. name: of the file, for the message. files: names that the artefact's spec
    lists. compiled: whether it may hold compiled code, which runs on the GPU unchecked: only if this user had
    it compiled.
    """
    inside = _Inside()
    try:
        _read_model(memoryview(data), inside)
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
    if inside.compiled and not compiled:
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


def _read_model(data: memoryview, inside: _Inside) -> None:
    for number, value in _fields(data):
        if number == MODEL["graph"]:
            _read_graph(value, inside, depth=0)
        elif number == MODEL["functions"]:
            for inner, content in _fields(value):
                if inner == FUNCTION["node"]:
                    _read_node(content, inside, depth=0)
                elif inner == FUNCTION["attribute_proto"]:
                    _read_attribute(content, inside, depth=0)


def _read_graph(data: memoryview, inside: _Inside, *, depth: int) -> None:
    if depth > DEEPEST:
        raise _DamagedError
    for number, value in _fields(data):
        if number == GRAPH["node"]:
            _read_node(value, inside, depth=depth)
        elif number == GRAPH["initializer"]:
            _read_tensor(value, inside)
        elif number == GRAPH["sparse_initializer"]:
            _read_sparse(value, inside)


def _read_node(data: memoryview, inside: _Inside, *, depth: int) -> None:
    for number, value in _fields(data):
        if number == NODE["op_type"] and bytes(value) in LOOPS:
            inside.loops.add(bytes(value))
        elif number == NODE["op_type"] and bytes(value) == COMPILED:
            inside.compiled = True
        elif number == NODE["attribute"]:
            _read_attribute(value, inside, depth=depth)


def _read_attribute(data: memoryview, inside: _Inside, *, depth: int) -> None:
    for number, value in _fields(data):
        if number in ATTRIBUTE["graph"]:
            _read_graph(value, inside, depth=depth + 1)
        elif number in ATTRIBUTE["tensor"]:
            _read_tensor(value, inside)
        elif number in ATTRIBUTE["sparse"]:
            _read_sparse(value, inside)


def _read_sparse(data: memoryview, inside: _Inside) -> None:
    for number, value in _fields(data):
        if number in SPARSE:
            _read_tensor(value, inside)


def _read_tensor(data: memoryview, inside: _Inside) -> None:
    for number, value in _fields(data):
        if number == TENSOR_EXTERNAL:
            entry = dict(_fields(value))
            if bytes(entry.get(ENTRY_KEY, b"")) == b"location":
                inside.files.add(bytes(entry.get(ENTRY_VALUE, b"")))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each field of a message that is stored as bytes; numbers are passed over."""
    at = 0
    while at < len(data):
        tag = data[at]
        at += 1
        if tag >= 0x80:  # nearly all tags and lengths are one byte, and there are thousands
            tag, at = _varint(data, at - 1)
        if tag >= 1 << 32:  # other readers drop what is beyond 32 bits, and would see another field
            raise _DamagedError
        kind = tag & 7
        number = tag >> 3
        if kind == BYTES:
            length = data[at] if at < len(data) else 0x80
            at += 1
            if length >= 0x80:
                length, at = _varint(data, at - 1)
            if length > len(data) - at:
                raise _DamagedError
            yield number, data[at : at + length]
            at += length
        elif kind == VARINT:
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
