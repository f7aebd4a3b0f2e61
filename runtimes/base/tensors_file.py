"""Arrays in one file that any language can read: the layout of safetensors, with a SHA-256 of the numbers.

Eight bytes, little-endian, are the length of the header. The header is a JSON object: for each array its
`dtype`, `shape` and `data_offsets`, and under `__metadata__` texts by name. The numbers follow,
little-endian, without a gap.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.base.errors import ArtefactError, first_line
from runtimes.base.files import open_file, reading
from runtimes.base.records import json_text

NPY = b"\x93NUMPY"  # the first bytes of a .npy file
DTYPES = {kind.safetensors: kind.stored for kind in ELEMENT_TYPES.values() if kind.safetensors}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
SHA256 = "sha256"
LENGTH_BYTES = 8  # bytes of the header's length
MAX_HEADER = 1 << 26  # bytes
MAX_NUMBERS = 1 << 48  # of an array
FIELDS = {"dtype", "shape", "data_offsets"}


def write_tensors(stream: BinaryIO, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes arrays of int64, float32, float16 or int8, and texts, to a file that is open for writing."""
    digest = hashlib.sha256()
    header = dict[str, Any]()
    at = 0
    stored = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    stored = {name: array.astype(array.dtype.newbyteorder("<"), copy=False) for name, array in stored.items()}
    for name, array in stored.items():
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        digest.update(memoryview(array).cast("B") if array.size else b"")
        at += array.nbytes
    text = json_text({METADATA: {**metadata, SHA256: digest.hexdigest()}, **header}).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that the numbers begin at a multiple of 8 bytes
    stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for array in stored.values():
        stream.write(memoryview(array).cast("B") if array.size else b"")


def read_metadata(path: Path) -> dict[str, str]:
    """The texts in a file that `write_tensors` wrote; raises ArtefactError or OSError for any other."""
    with open_file(path) as stream:
        return _read_header(path, stream)[1]


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the texts in a file that `write_tensors` wrote, or another program in the same layout.

    Raises ArtefactError for anything else, and if the numbers do not have the SHA-256.
    """
    with reading(path), open_file(path) as stream:
        return tensors_in(stream, path)


def tensors_in(stream: BinaryIO, path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The same of a file that is open for reading; `path` is its name for messages."""
    header, metadata, begin = _read_header(path, stream)
    # Compared before anything is read: a file with holes may be longer than the memory of a machine.
    size = _size(header, stream.seek(0, os.SEEK_END) - begin, path)
    stream.seek(begin)
    data = memoryview(stream.read(size))
    if len(data) != size or hashlib.sha256(data).hexdigest() != metadata.get(SHA256):
        raise _damaged(path, "its numbers do not match its SHA-256")
    return _arrays(header, data), metadata


def tensors_in_bytes(content: bytes | bytearray, path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the texts in the bytes of such a file; a SHA-256 is not needed. `path` is its name for
    messages.
    """
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    begin = LENGTH_BYTES + length
    header, metadata = _parse(path, bytes(content[LENGTH_BYTES:begin]), length)
    _size(header, len(content) - begin, path)
    return _arrays(header, memoryview(content)[begin:]), metadata


def _size(header: dict[str, dict[str, Any]], length: int, path: Path) -> int:
    """The bytes of all arrays of a header; raises ArtefactError unless they follow each other without a gap
    and fill the file behind the header.
    """
    at = 0
    for name, facts in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        end = at + math.prod(facts["shape"]) * np.dtype(DTYPES[facts["dtype"]]).itemsize
        if facts["data_offsets"] != [at, end]:
            raise _damaged(path, f"its header puts {name!a:.60} where no such array lies")
        at = end
    if length != at:
        raise _damaged(path, f"{length:,} bytes follow its header, which describes {at:,}")
    return at


def _arrays(header: dict[str, dict[str, Any]], data: memoryview) -> dict[str, np.ndarray]:
    """The arrays of a header over the bytes after it."""
    arrays = {}
    for name, facts in header.items():
        first, end = facts["data_offsets"]
        arrays[name] = np.frombuffer(data[first:end], DTYPES[facts["dtype"]]).reshape(facts["shape"])
    return arrays


def _read_header(path: Path, stream: BinaryIO) -> tuple[dict[str, dict[str, Any]], dict[str, str], int]:
    """The entries and the texts of a header, and the byte of the file at which the numbers begin."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    return *_parse(path, stream.read(min(length, MAX_HEADER + 1)), length), LENGTH_BYTES + length


def _parse(path: Path, text: bytes, length: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The entries and the texts of a header; the types of all values are checked."""
    if length.to_bytes(LENGTH_BYTES, "little").startswith(NPY):
        raise ArtefactError(f"{path} is a .npy file of one array; give a file that `save_memory` wrote.")
    if not 2 <= length <= MAX_HEADER or text[:1] != b"{":
        raise ArtefactError(f"{path} is not a file that `save_memory` wrote; give one.")
    if len(text) != length:
        raise _damaged(path, f"its header has {len(text)} bytes for {length}")
    try:
        header = json.loads(text.decode("utf-8"))
        metadata = header.pop(METADATA, {})
        entries = all(_is_entry(facts) for facts in header.values())
        if not entries or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("an entry is no array of int64, float32, float16 or int8")
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, first_line(error)) from error
    return header, metadata


def _is_entry(facts: Any) -> bool:
    if not isinstance(facts, dict) or facts.keys() != FIELDS or facts["dtype"] not in DTYPES:
        return False
    numbers = facts["shape"], facts["data_offsets"]
    lists = all(isinstance(x, list) and all(type(n) is int and n >= 0 for n in x) for x in numbers)
    if not lists or len(facts["shape"]) > 8 or len(facts["data_offsets"]) != 2:
        return False
    # NumPy refuses sizes whose product is too large, even if another size is 0.
    return bool(math.prod(size or 1 for size in facts["shape"]) <= MAX_NUMBERS)


def _damaged(path: Path, what: str) -> ArtefactError:
    return ArtefactError(f"{path} is not a readable file of tensors ({what}); copy or make it again.")
