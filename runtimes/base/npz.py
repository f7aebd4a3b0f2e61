"""Reads `.npz` files, whose sizes are checked before memory is taken for them."""

from __future__ import annotations

import io
import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.lib import format as npy_format

from runtimes.base.errors import ArtefactError, first_line
from runtimes.base.files import open_file

# Everything that zipfile and NumPy raise for a damaged archive (an encrypted member is a RuntimeError,
# a header that is not a Python literal a SyntaxError, TypeError or TokenError).
NPZ_ERRORS = (
    ValueError,
    KeyError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    AttributeError,
    SyntaxError,
    OverflowError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Every array of an `.npz` file.

    Raises ArtefactError for a damaged archive, for pickled objects, for a duplicate name, and for headers
    that promise more data than the archive holds; nothing is allocated before that is known.
    """
    try:
        with open_file(path) as stream:
            size = stream.seek(0, io.SEEK_END)
            with zipfile.ZipFile(stream) as archive:
                members = archive.infolist()
                held = max(size, 1 << 20)
                claimed = sum(member.file_size for member in members)
                if claimed > 64 * held:
                    raise ValueError(f"it claims {claimed} bytes from {held}")
                if len({member.filename.removesuffix(".npy") for member in members}) < len(members):
                    raise ValueError("it has two arrays of one name")
                for member in members:
                    _check_npy_size(archive, member)
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError as error:
        raise ArtefactError(f"{path} does not exist; give the name of an .npz file that is there.") from error
    except (*NPZ_ERRORS, OSError) as error:
        raise ArtefactError(
            f"{path} is not a readable .npz file ({first_line(error)}); copy or make it again."
        ) from error


def _check_npy_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} has compression type {member.compress_type}")
    with archive.open(member) as stream:
        version = npy_format.read_magic(stream)
        reader = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}.get(
            version
        )
        if reader is None:
            raise ValueError(f"{member.filename} has npy version {version}")
        shape, _, dtype = reader(stream)
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != member.file_size - stream.tell():
            raise ValueError(f"{member.filename} does not hold the array that its header describes")
