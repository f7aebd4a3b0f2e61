"""Reads checkpoints and vocabularies of other projects as plain data: `read_pickle(path)`.

Nothing in a file is run. `interpreter.py` explains how opcodes are followed, `allowed_names.py` which
names are allowed, and `containers.py` which files are read.
"""

from __future__ import annotations

from pathlib import Path
from pickletools import opcodes
from typing import Any

from runtimes.base.errors import UserError
from runtimes.base.files import unreadable
from xl_export.importers.pickle.compressed import Budget, open_content
from xl_export.importers.pickle.containers import ZIP_MAGIC, ContainerError, read_stream, read_zip
from xl_export.importers.pickle.values import Foreign, Named, PickleError

__all__ = ["CheckpointError", "Foreign", "Named", "read_pickle"]
OPCODES = frozenset(opcode.code for opcode in opcodes)
PROTOCOL = 0x80  # the first byte of a pickle of protocol 2 or newer
OTHER_STARTS = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"%PDF": "a PDF document",
    b"\x89HDF": "an HDF5 file",
    b"\x7fELF": "a program",
    b"RIFF": "a WAV file",
    b"MThd": "a MIDI file",
    b"GGUF": "a GGUF model",
    **{bytes((8, version, 18)): "an ONNX model" for version in range(1, 32)},
}
SAMPLE = 1 << 12  # bytes that distinguish a text from a pickle


class CheckpointError(UserError):
    """A checkpoint or vocabulary of another project is damaged, unknown, or would run code."""


def read_pickle(path: Path, budget: Budget | None = None) -> Any:
    """Returns the content of a PyTorch checkpoint or of a bare pickle, without running any of it.

    A checkpoint is a zip container or a legacy container, and its file may be compressed. The content
    consists of dict, list, tuple, set, frozenset, str, bytes, int, float, bool and None; of CPU tensors,
    which share memory where they do in the file (parameters are plain tensors); of Foreign for instances of
    foreign classes; and of Named if a class itself is a value. It has no cycles and is at most 200 levels
    deep.

    budget: of the compressed files that are read together; without one, the file has its own.

    Raises CheckpointError, which names the file and, if there is one, the name that is not allowed. The
    memory in use is bounded by a small multiple of the size of the decompressed file.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint or a vocabulary.")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; expected a checkpoint or a vocabulary.")
    try:
        with open_content(path, budget) as (stream, size):
            if size == 0:
                raise CheckpointError(f"{path} is empty; copy it again.")
            magic = stream.read(len(ZIP_MAGIC))
            stream.seek(0)
            return read_zip(stream, size) if magic == ZIP_MAGIC else read_stream(stream, size)
    except PickleError as error:
        if _is_text(path):
            raise CheckpointError(
                f"{path} is a text; give the checkpoint or vocabulary that torch.save or pickle wrote."
            ) from error
        if (start := _start_of_no_pickle(path)) is not None:
            raise CheckpointError(
                f"{path} is not a checkpoint of PyTorch: it is neither a zip archive nor a pickle ({start}); "
                "give the file that torch.save wrote."
            ) from error
        raise CheckpointError(
            f"{path} was not read, and nothing in it was run: the pickle {error}; copy it again, or give "
            f"another checkpoint."
        ) from error
    except ContainerError as error:
        raise CheckpointError(f"{path} {error}; copy it again, or save it again with torch.save.") from error
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error


def _start_of_no_pickle(path: Path) -> str | None:
    """How a file begins that is not a pickle; None for one that may be a pickle, whole or damaged."""
    with open_content(path) as (stream, _):
        head = stream.read(8)
        stream.seek(-1, 2)
        last = stream.read(1)
    if head.startswith(ZIP_MAGIC):
        return None  # the pickle is inside
    for magic, kind in OTHER_STARTS.items():
        if head.startswith(magic):
            return f"it begins like {kind}"
    # Old protocols begin with any opcode, and every pickle ends with STOP.
    begins = head[0] == PROTOCOL or (chr(head[0]) in OPCODES and last == b".")
    return None if begins else f"its first bytes are {head[:4].hex(' ')}"


def _is_text(path: Path) -> bool:
    """Whether a file that is not a pickle seems to be a text.

    It has no control characters then, and no STOP opcode at its end.
    """
    with open_content(path) as (stream, _):
        head = stream.read(SAMPLE)
        stream.seek(-1, 2)
        last = stream.read(1)
    control = set(range(32)) - set(b"\t\n\f\r")
    return last != b"." and head[0] != 0x80 and control.isdisjoint(head)
