"""Reads checkpoints and vocabularies of other projects as plain data: `read_pickle(path)`.

Nothing in a file is run. `interpreter.py` explains how opcodes are followed, and `allowed_names.py` which
names are allowed. Three kinds of files hold a pickle and the storages of its tensors:

- PyTorch's zip container (since 1.6) holds the pickle `NAME/data.pkl`, and each storage as `NAME/data/KEY`.
- PyTorch's legacy container holds pickles of a magic number, the protocol and the system; then the pickle
  itself, and a pickle of the storages' keys; then each storage as its number of elements (int64) and its
  elements.
- A bare pickle holds no tensors.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from runtimes.base.errors import ArtefactError
from runtimes.base.files import open_file, reading
from xl_export.importers.pickle.interpreter import Interpreter
from xl_export.importers.pickle.tensors import Storages, fill
from xl_export.importers.pickle.values import PickleError, clean, described

ZIP_MAGIC = b"PK\x03\x04"
PROTO = b"\x80"  # the first opcode of a pickle since protocol 2
ZIP_ERRORS = (
    zipfile.BadZipFile,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
)
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001


class ContainerError(Exception):
    """The reason why a file is not read, as the end of a sentence about it: `lacks data.pkl`."""


def read_pickle(path: Path) -> Any:
    """Returns the content of a PyTorch checkpoint or of a bare pickle, without running any of it.

    A checkpoint is a zip container or a legacy container. The content consists of dict, list, tuple, set,
    frozenset, str, bytes, int, float, bool and None; of CPU tensors, which share memory where they do in the
    file (parameters are plain tensors); of Foreign for instances of foreign classes; and of Named if a class
    itself is a value. It has no cycles and is at most 200 levels deep.

    Raises UserError, which names the file and, if there is one, the name that is not allowed. The
    memory in use is bounded by a small multiple of the size of the file.
    """
    try:
        with reading(path), open_file(path) as stream:
            size = stream.seek(0, io.SEEK_END)
            stream.seek(0)
            if size == 0:
                raise ArtefactError(f"{path} is empty; copy it again.")
            magic = stream.read(len(ZIP_MAGIC))
            stream.seek(0)
            return read_zip(stream, size) if magic == ZIP_MAGIC else read_stream(stream, size)
    except PickleError as error:
        reason = "was not read, and nothing in it was run: the pickle"
        if magic != ZIP_MAGIC and not magic.startswith(PROTO):  # most likely a text
            reason = (
                "is no checkpoint, and nothing in it was run: it begins neither as a zip archive nor as a "
                "pickle since protocol 2, and as an older pickle it"
            )
        raise ArtefactError(
            f"{path} {reason} {error}; give the file that torch.save or pickle wrote, unpacked from its "
            "archive, or copy it again."
        ) from error
    except ContainerError as error:
        raise ArtefactError(f"{path} {error}; copy it again, or save it again with torch.save.") from error


def read_zip(stream: BinaryIO, size: int) -> Any:
    """Returns the content of PyTorch's zip container; the CRC of every member that is used is checked."""
    with _damage():
        archive = zipfile.ZipFile(stream)
    members = _members(archive, size)
    prefix = _prefix(members)
    with _damage(f"{prefix}byteorder: "):
        order = archive.read(f"{prefix}byteorder") if f"{prefix}byteorder" in members else b"little"
    if order != b"little":
        raise ContainerError(f"has numbers in the byte order {clean(repr(order))}; expected little")
    with _damage(f"{prefix}data.pkl: "):
        pickle = archive.read(f"{prefix}data.pkl")
    storages = Storages(size)
    content = Interpreter(io.BytesIO(pickle), len(pickle), storages).run()
    for key, flat in storages.flat.items():
        name = f"{prefix}data/{key}"
        if name not in members:
            raise ContainerError(f"lacks the member {clean(name)}, a storage that its pickle mentions")
        if members[name].file_size != flat.numel() * flat.element_size():
            raise ContainerError(
                f"has {members[name].file_size} bytes in {clean(name)}; its pickle says {len(flat)} "
                f"{flat.dtype}"
            )
        with _damage(f"{name}: "), archive.open(name) as data:
            fill(flat, data, key)  # with its last byte the CRC is checked
    return content


def read_stream(stream: BinaryIO, size: int) -> Any:
    """Returns the content of PyTorch's legacy container or of a bare pickle.

    The content of the first pickle shows which of the two the file is.
    """
    storages = Storages(size)
    machine = Interpreter(stream, size, storages)
    content = machine.run()
    if type(content) is not int or content != LEGACY_MAGIC:
        if storages.flat:
            raise ContainerError("is a bare pickle that mentions tensors' storages and holds none")
        return content
    protocol = machine.run()
    system = machine.run()
    if type(protocol) is not int or protocol != LEGACY_PROTOCOL:
        raise ContainerError(
            f"is a PyTorch file of protocol {described(protocol)}; expected {LEGACY_PROTOCOL}"
        )
    if type(system) is not dict or system.get("little_endian") is not True:
        raise ContainerError("does not say that its numbers are little-endian")
    content = machine.run()
    keys = machine.run()
    if (
        type(keys) is not list
        or not all(type(key) is str for key in keys)
        or sorted(keys) != sorted(storages.flat)
    ):
        raise ContainerError("lists other storages than its pickle mentions")
    for key in keys:
        flat = storages.flat[key]
        head = stream.read(8)
        if len(head) != 8 or struct.unpack("<q", head) != (flat.numel(),):
            raise ContainerError(
                f"does not hold the storage {clean(key)} of {len(flat)} elements where it should"
            )
        fill(flat, stream, key)
    return content


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Returns the members of an archive by name.

    Members must be stored without compression or encryption, and each name must be there once. Together they
    cannot be larger than the file.
    """
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        if member.filename in members:
            raise ContainerError(f"has the member {clean(member.filename)} twice")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise ContainerError(
                f"has the compressed member {clean(member.filename)}; PyTorch stores its members as they are"
            )
        members[member.filename] = member
    if sum(member.file_size for member in members.values()) > size:
        raise ContainerError("claims members of more bytes than it has")
    return members


def _prefix(members: dict[str, zipfile.ZipInfo]) -> str:
    found = [
        name.removesuffix("data.pkl")
        for name in members
        if name.endswith("/data.pkl") and name.count("/") == 1
    ]
    if len(found) != 1:
        raise ContainerError("is a zip archive without one NAME/data.pkl; expected what torch.save writes")
    return found[0]


@contextlib.contextmanager
def _damage(what: str = "") -> Iterator[None]:
    """Turns every error of `zipfile` for a damaged archive into one ContainerError.

    An encrypted member raises a RuntimeError there.
    """
    try:
        yield
    except ZIP_ERRORS as error:
        # Python's message for a file that begins as an archive and has no list of contents at its end.
        cut = str(error) == "File is not a zip file"
        reason = "its end is missing" if cut else clean(what + str(error)) or type(error).__name__
        raise ContainerError(f"is a damaged zip archive ({reason})") from error
