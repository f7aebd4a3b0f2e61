"""Pickles and containers written by hand: what a stranger could put into a file."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping

from xl_export.importers.pickle.read import LEGACY_MAGIC

SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def text(value: str) -> bytes:
    """The opcode that pushes a text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(full: str) -> bytes:
    """The opcode that pushes a global; its name is what follows the last dot."""
    module, _, attribute = full.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def call(full: str, *args: bytes) -> bytes:
    """Opcodes that call a global with the arguments that other opcodes push."""
    return name(full) + b"(" + b"".join(args) + b"tR"


def program(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def numbers(*values: int) -> bytes:
    """Opcodes that push a tuple of whole numbers."""
    return b"(" + b"".join(number(value) for value in values) + b"t"


def storage(
    count: int, *, kind: str = "torch.FloatStorage", key: str = "0", device: str = "cpu", more: bytes = b""
) -> bytes:
    """Opcodes that push a storage."""
    return b"(" + text("storage") + name(kind) + text(key) + text(device) + number(count) + more + b"tQ"


def tensor(flat: bytes, shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0) -> bytes:
    """Opcodes that push a tensor over a storage."""
    return call(
        "torch._utils._rebuild_tensor_v2",
        flat,
        number(offset),
        numbers(*shape),
        numbers(*strides),
        b"\x89",
        b"N",
    )


def zip_container(
    data: bytes, storages: Mapping[str, bytes] | None = None, *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """PyTorch's zip container around a pickle, with right sizes and CRCs."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("forged/data.pkl", data)
        archive.writestr("forged/byteorder", "little")
        for key, content in (storages or {}).items():
            archive.writestr(f"forged/data/{key}", content)
        archive.writestr("forged/version", "3\n")
    return stream.getvalue()


def legacy_container(
    data: bytes,
    storages: Mapping[str, tuple[int, bytes]] | None = None,
    *,
    magic: int = LEGACY_MAGIC,
    protocol: object = 1001,
    system: object = SYSTEM,
) -> bytes:
    """PyTorch's legacy container around a pickle; storages: the number of elements to claim, and the
    bytes."""
    storages = storages or {}
    head = b"".join(pickle.dumps(part, 2) for part in (magic, protocol, system))
    tail = b"".join(struct.pack("<q", count) + content for count, content in storages.values())
    return head + data + pickle.dumps(list(storages), 2) + tail


def in_every_container(data: bytes) -> dict[str, bytes]:
    """A pickle without tensors, as each kind of file."""
    return {"bare": data, "zip": zip_container(data), "legacy": legacy_container(data)}
