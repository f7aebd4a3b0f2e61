"""Files that are whole or absent: atomic writes, checked reads.

Everything is written next to its destination and renamed into place, so a full disk or a kill leaves
either the old file or the new one. Everything read is checked for size before memory is taken for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError, UserError, first_line
from runtimes.base.partial import make_hidden, sweep
from runtimes.base.records import json_text
from runtimes.base.text import decode_text, text_pieces

HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # half of a surrogate pair, as JSON writes it

Content = bytes | bytearray | memoryview  # of a file that was read


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path next to `path` that takes its place when the block ends without an error."""
    with writing(path):
        sweep(path)
        temporary, lock = make_hidden(path, folder=False)
        try:
            mode = temporary.stat().st_mode
            yield temporary
            # Some writers replace the file by one that only its owner may read; here the umask decides.
            temporary.chmod(mode)
            flush(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(lock)


def refuse_unwritable(path: Path, *, option: str, suffixes: tuple[str, ...] = ()) -> None:
    """Raises UserError if no file of one of these kinds, or of any, can be written at `path`; call it
    before work.
    """
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{option} is {path}; expected a file name that ends in {' or '.join(suffixes)}.")
    if path.is_dir():
        raise UserError(f"{option} is {path}, which is a folder; give a file name.")
    with writing(path):
        probe, lock = make_hidden(path, folder=False)
        probe.unlink()
        os.close(lock)


def refuse_replacing(path: Path, *, option: str, force: bool) -> None:
    """Raises UserError if a file exists and may not be replaced (`force`); call it before work."""
    if path.exists() and not force:
        raise UserError(f"{path} exists already; give another {option}, or --force to replace it.")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an operating system error while writing `path` into one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {error.strerror or error}; nothing was changed there."
        ) from error


def write_json(path: Path, data: Any) -> None:
    """`data` as indented JSON at `path`, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json_text(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


OTHER_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: Path) -> io.BufferedReader:
    """A regular file, or a link to one, opened to be read as bytes.

    Raises OSError if it cannot be opened and for a folder, a pipe or a device. Opening a pipe
    in the usual way would wait for a writer, perhaps for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if kind != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"It is {OTHER_KINDS.get(kind, 'no file')} and not a file", str(path))
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def refuse_other_kinds(path: Path) -> None:
    """Raises OSError as `open_file` does; call it before a library opens `path` by its name."""
    open_file(path).close()


def read_bytes(path: Path) -> bytes:
    """The whole of a file; raises UserError when it cannot be read."""
    with reading(path), open_file(path) as stream:
        return stream.read()


def read_text(path: Path) -> str:
    """The text of a whole file, decoded as `runtimes.base.text` says; raises UserError."""
    return "".join(text_pieces([read_bytes(path)], str(path)))


FIXES: dict[type[OSError], str] = {
    FileNotFoundError: "; check the path",
    NotADirectoryError: "; check the path",
    IsADirectoryError: "; a file was expected",
    PermissionError: "; this user has to be allowed to read it",
}


def unreadable(path: Path | str, error: OSError) -> str:
    """The sentence for a file that could not be read, and how to fix it if that is known."""
    return f"{path} could not be read: {error.strerror or first_line(error)}{FIXES.get(type(error), '')}."


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an operating system error while reading `path` into one sentence, a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(unreadable(path, error)) from error


def read_json(path: Path, content: Content | None = None) -> Any:
    """Parsed JSON; raises ArtefactError when the file is missing, is not JSON, or has no one meaning.

    content: of the file, if it was read already. Readers differ in what they make of a key that an object has
    twice, and of half a surrogate pair.
    """
    try:
        text = decode_text(read_bytes(path) if content is None else bytes(content), str(path))
        data = json.loads(text, object_pairs_hook=_object)
        if HALF_PAIR.search(text):
            try:  # nothing is written
                json.dumps(data, ensure_ascii=False).encode()  # noqa: TID251
            except UnicodeEncodeError as error:
                raise ValueError("it has half of a surrogate pair") from error
        return data
    except (UserError, RecursionError, ValueError) as error:
        if isinstance(error, UserError):
            raise ArtefactError(str(error)) from error
        raise ArtefactError(
            f"{path} is not valid JSON ({first_line(error)}); copy or make it again."
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {twice!r:.60} twice")
    return found


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open_file(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())
