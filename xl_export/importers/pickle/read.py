"""Reads checkpoints and vocabularies of other projects as plain data: `read_pickle(path)`.

Nothing in a file is run. `interpreter.py` explains how opcodes are followed, `allowed_names.py` which
names are allowed, and `containers.py` which files are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtimes.base.errors import UserError
from runtimes.base.files import unreadable
from xl_export.importers.pickle.compressed import Budget, open_content
from xl_export.importers.pickle.containers import ZIP_MAGIC, ContainerError, read_stream, read_zip
from xl_export.importers.pickle.values import Foreign, Named, PickleError

__all__ = ["CheckpointError", "Foreign", "Named", "read_pickle"]


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
        raise CheckpointError(
            f"{path} was not read, and nothing in it was run: the pickle {error}; give the file "
            "that torch.save or pickle wrote, unpacked from its archive, or copy it again."
        ) from error
    except ContainerError as error:
        raise CheckpointError(f"{path} {error}; copy it again, or save it again with torch.save.") from error
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
