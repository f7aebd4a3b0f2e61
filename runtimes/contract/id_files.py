"""Files of token ids: `.npy` arrays, raw `.bin` files, `.jsonl` files with one list of ids a line, and `.txt`
files of numbers.

Arrays are memory-mapped, lists are read line by line, and numbers block by block, so a file may be larger
than memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from runtimes.base.errors import TextError, first_line, json_fault
from runtimes.base.files import open_file, reading
from runtimes.base.text import byte_lines, text_lines, text_pieces

IdType = Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
ID_TYPES: tuple[IdType, ...] = get_args(IdType)
ID_SUFFIXES = (".npy", ".bin", ".jsonl")  # without .txt, which is accepted where only ids are possible
TEXT_BLOCK_BYTES = 1 << 22  # bytes of a `.txt` file that are read at a time
INTEGERS = (
    'expected token ids, which are integers: convert the array with `.astype("int64")` and save it again'
)
LONGEST_NUMBER = 100  # bytes, many of which may be leading zeros
IDS_PER_CHECK = 1 << 22  # ids that are checked at a time
LARGEST_ID = 1 << 62  # fits into int64 with anything added to it


def open_ids(path: Path, *, dtype: str | None = None) -> np.ndarray:
    """The token ids [N] of a `.npy` or `.bin` file, memory-mapped and read-only, or of a `.txt` file, read.

    A `.npy` file may also hold ids [documents, N].
    dtype: of the ids of a `.bin` file, which are little-endian; it must be None for a `.npy` file. The range
    of the ids is not checked (see `refuse_outside`). Raises TextError for a file that is missing, damaged or
    holds something else.
    """
    from runtimes.base.npz import NPZ_ERRORS  # texts need no files of ids, and importing it takes time

    if path.suffix == ".bin":
        return _raw(path, dtype)
    if path.suffix == ".txt":
        _refuse_dtype(path, dtype)
        return np.concatenate([np.zeros(0, np.int64), *number_blocks(path)])
    if path.suffix != ".npy":
        refuse_archive(path)
        raise TextError(
            f"{path} is no file of token ids; give a .npy, .jsonl or .txt file, or a .bin file of raw "
            "little-endian integers."
        )
    _refuse_dtype(path, dtype)
    _refuse_no_file(path, "a .npy file of token ids")
    try:
        ids: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise TextError(
            f"{path} could not be read as a .npy file of token ids: {error.strerror or first_line(error)}."
        ) from error
    except NPZ_ERRORS as error:
        if "Python objects" in str(error):  # NumPy has no error class for them
            raise TextError(f"{path} holds Python objects; {INTEGERS}.") from error
        raise TextError(
            f"{path} is no whole .npy file; copy it again, or make it with `numpy.save`."
        ) from error
    if ids.dtype.kind not in "iu":
        raise TextError(f"{path} holds {ids.dtype} {list(ids.shape)}; {INTEGERS}.")
    if ids.ndim not in (1, 2):
        raise TextError(
            f"{path} holds {ids.dtype} {list(ids.shape)}; expected token ids, integers [N] or "
            "[documents, N]: give one row, or a .jsonl file."
        )
    return ids


def documents(
    path: Path, *, dtype: str | None = None, tick: Callable[[int], object] | None = None
) -> Iterator[np.ndarray]:
    """The documents of a file of ids, one after the other, each ids [N].

    They are the lines of a `.jsonl` file, the rows of a two-dimensional `.npy` file, or the whole of any
    other file. tick: called with the number of bytes of each line that was read. Raises TextError as
    `open_ids` does, and for a line that is not a list of integers.
    """
    if path.suffix != ".jsonl":
        ids = open_ids(path, dtype=dtype)
        yield from (ids if ids.ndim == 2 else [ids])
        return
    _refuse_dtype(path, dtype)
    _refuse_no_file(path, "a .jsonl file of token ids")
    with reading(path), open_file(path) as stream:
        pieces = ticked(byte_lines(stream, str(path)), tick)
        for number, line in enumerate(text_lines(pieces, str(path)), 1):
            if line.strip():
                yield _document(line, f"{path}: line {number}")


def ticked(pieces: Iterable[bytes], tick: Callable[[int], object] | None) -> Iterator[bytes]:
    """The pieces of a file; `tick` is called with the number of bytes of each."""
    for piece in pieces:
        if tick is not None:
            tick(len(piece))
        yield piece


def number_blocks(
    path: Path, *, tick: Callable[[int], object] | None = None, fix: str = "give a file of token ids"
) -> Iterator[np.ndarray]:
    """The ids of a `.txt` file of whole numbers with white space or commas between them, block by block.

    tick: called with the number of bytes of each block. fix: how to fix it, the end of the message for a
    file that has something else. Raises TextError with the first word that is not a token id.
    """
    _refuse_no_file(path, "a .txt file of token ids")
    with reading(path), open_file(path) as stream:
        rest = ""
        before = 0  # the number of words in earlier blocks
        blocks = ticked(iter(lambda: stream.read(TEXT_BLOCK_BYTES), b""), tick)
        for block in text_pieces(blocks, str(path)):
            text = rest + block.replace(",", " ")
            words = text.split()
            # The last word may continue in the next block, unless it is longer than any number.
            goes_on = len(words) > 0 and not text[-1:].isspace() and len(words[-1]) <= LONGEST_NUMBER
            rest = words.pop() if goes_on else ""
            yield _numbers(words, path, before, fix)
            before += len(words)
        yield _numbers(rest.split(), path, before, fix)


def refuse_archive(path: Path) -> None:
    """Raises TextError for an `.npz` file, which holds several arrays, and says how to extract one."""
    if path.suffix == ".npz":
        raise TextError(
            f"{path} is an archive of arrays; save one of them as a .npy file, such as the first with "
            f"`python -c \"import numpy; a = numpy.load('{path}'); numpy.save('ids.npy', a[a.files[0]])\"`."
        )


def refuse_outside(ids: np.ndarray, where: object, size: int, *, fix: str, start: int = 0) -> None:
    """Raises TextError with file and index of the first id that is not from 0 to size - 1.

    where: the file, for the message. start: index of the first of these ids in it. fix: how to fix it,
    the end of the message.
    """
    for at in range(0, len(ids), IDS_PER_CHECK):
        block = ids[at : at + IDS_PER_CHECK]
        if block.min() >= 0 and block.max() < size:
            continue
        first = int(np.argmax((block < 0) | (block >= size)))
        raise TextError(
            f"{where} has the token id {block[first]} at index {start + at + first}, outside the vocabulary "
            f"(0 to {size - 1}); {fix}."
        )


def is_id_list(data: Any) -> bool:
    """Whether what was read from JSON is a list of integers, which may be token ids of some vocabulary."""
    return isinstance(data, list) and all(type(token) is int and abs(token) < LARGEST_ID for token in data)


def _raw(path: Path, dtype: str | None) -> np.ndarray:
    if dtype not in ID_TYPES:
        given = "no type was given" if dtype is None else f"the type given is {dtype!r:.40}"
        raise TextError(
            f"{path} holds raw integers, and {given}; say what they are with --dtype, one of "
            f"{', '.join(ID_TYPES)}."
        )
    _refuse_no_file(path, "a .bin file of token ids")
    with reading(path), open_file(path) as stream:
        size = stream.seek(0, 2)
    little_endian = np.dtype(dtype).newbyteorder("<")
    if size % little_endian.itemsize:
        raise TextError(
            f"{path} has {size:,} bytes, which is no multiple of the {little_endian.itemsize} bytes of an "
            f"{dtype}; give another --dtype, or copy the file again."
        )
    if size == 0:
        return np.empty(0, little_endian)
    return np.memmap(path, little_endian, mode="r")


def _numbers(words: list[str], path: Path, before: int, fix: str) -> np.ndarray:
    """The ids that are written as words. before: the number of words before these, for the message."""
    for number, word in enumerate(words, before + 1):
        digits = word.isascii() and word.isdigit() and len(word) <= LONGEST_NUMBER
        if not digits or int(word) >= LARGEST_ID:
            raise TextError(
                f"{path} has {word[:40]!r} as word {number:,}, which is no token id; expected whole numbers "
                f"with white space or commas between them: {fix}."
            )
    return np.array(words, dtype="S").astype(np.int64) if words else np.zeros(0, np.int64)


def _document(line: str, where: str) -> np.ndarray:
    """The ids of a line: a list, or an object with a list named `ids`."""
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{where} is not JSON ({json_fault(error):.200}); expected a list of ids.") from error
    ids = data.get("ids") if isinstance(data, dict) else data
    if not is_id_list(ids):
        raise TextError(f"{where} is no list of token ids; expected a line such as [12, 7, 345].")
    return np.array(ids, np.int64)


def _refuse_dtype(path: Path, dtype: str | None) -> None:
    if dtype is not None:
        raise TextError(
            f"--dtype is {dtype}, and {path} says itself what it holds; leave out --dtype, which is for .bin "
            "files."
        )


def _refuse_no_file(path: Path, expected: str) -> None:
    if path.exists() and not path.is_file():  # reading from a pipe would wait for its other end
        raise TextError(f"{path} is not a file; expected {expected}.")
