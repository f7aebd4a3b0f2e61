"""What kind of file something is, by its first bytes: archives, compressed files, NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from runtimes.base.files import open_file, reading

Kind = Literal["zip", "tar", "gzip", "bz2", "xz", "npy"]
COMPRESSED = ("gzip", "bz2", "xz")
START = 262  # bytes that show the kind of a file


def kind_of(path: Path) -> Kind | None:
    """The kind of a file, or None for another, such as a text. Raises UserError for an unreadable file."""
    with reading(path), open_file(path) as stream:
        return kind_by_start(stream.read(START))


def kind_by_start(start: bytes) -> Kind | None:
    """The kind of a file by its first bytes, of which `START` are enough."""
    if start[:4] in (b"PK\3\4", b"PK\5\6"):
        return "zip"
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    # The name alone could begin a text; the first block of the file, or its end, has a mark of its own.
    if start[:3] == b"BZh" and start[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bz2"
    if start[:6] == b"\xfd7zXZ\0":
        return "xz"
    if start[:6] == b"\x93NUMPY":
        return "npy"
    return "tar" if start[257:262] == b"ustar" else None
