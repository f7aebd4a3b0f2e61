"""Streams in a folder that all replicas share: a mounted folder, or an object store that fsspec knows.

Each stream is one file, which appears whole. The file decides: what a replica has in RAM counts only while
the file says the same. Its first bytes are the version, a hash of everything that was done to the stream. So
a replica that had a stream before another one got it notices by reading 64 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import re
import secrets
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from runtimes.base.errors import ArtefactError, UserError, first_line
from runtimes.base.files import atomic_file
from runtimes.contract.session import Session
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.snapshot import KEY_BYTES, KEY_FILE, read_snapshot, write_snapshot

NAME = re.compile(r"[\w-]{1,128}", re.ASCII)
VERSION_BYTES = 64
LOCKS = 64  # files; streams of one hash share one
RACES = (409, 412)  # HTTP: two requests write one object at this moment; there is one already
NO_REFUSALS = (
    "the store of the streams failed to write an object only if there is none ({}), and it was written "
    "without that condition; of two replicas that begin one stream at the same moment, the later one undoes "
    "the other."
)


class MovedError(Exception):
    """Another replica has written the stream since it was read."""


@dataclass(frozen=True, kw_only=True)
class SharedStream:
    """A stream after its last request.

    version: in hexadecimal. asked: the hash of that request. answer: what was answered, so that a client that
    asks again gets it again.
    """

    version: str
    asked: str
    answer: dict[str, Any]
    state: StreamState


class SharedStreams:
    """The streams of one artefact in a folder. Every method uses the disk or the network.

    folder: a path or a URL. Whoever may write there is trusted: the key that signs the files lies there too.
    """

    def __init__(self, folder: str, session: Session) -> None:
        self._session = session
        with _usable(folder):
            self._system, root = fsspec.core.url_to_fs(folder)
            self._folder = f"{root.rstrip('/')}/{session.identity[:32]}"
            self._system.makedirs(self._folder, exist_ok=True)
            key = bytes(self._system.cat_file(f"{root.rstrip('/')}/{KEY_FILE}"))
            self._key = bytes.fromhex(key.decode("ascii").strip())

    @staticmethod
    def prepare(folder: str) -> None:
        """Makes the folder and its key if there is none; call it once before the replicas start."""
        with _usable(folder):
            system, root = fsspec.core.url_to_fs(folder)
            system.makedirs(root, exist_ok=True)
            file = f"{root.rstrip('/')}/{KEY_FILE}"
            if not system.exists(file):
                system.pipe_file(file, secrets.token_bytes(KEY_BYTES).hex().encode())
                if _is_local(system):
                    Path(file).chmod(0o600)

    def version(self, name: str) -> str | None:
        """The version of a stream; None if there is no such stream."""
        try:
            return bytes(self._system.cat_file(self._file(name), 0, VERSION_BYTES)).decode("ascii", "replace")
        except FileNotFoundError:
            return None

    def read(self, name: str) -> SharedStream | None:
        """The stream; None if there is none. Raises ArtefactError for a file that was altered."""
        try:
            content = bytes(self._system.cat_file(self._file(name)))
        except FileNotFoundError:
            return None
        head, _, snapshot = content[VERSION_BYTES:].partition(b"\n")
        try:
            facts = json.loads(head)
            asked = facts["asked"]
            answer = facts["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtefactError(
                f"the stream {name} is damaged; start it again under another name."
            ) from error
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"
            path.write_bytes(snapshot)
            state = read_snapshot(path, self._session, key=self._key, name=f"the stream {name}")
        version = content[:VERSION_BYTES].decode("ascii", "replace")
        return SharedStream(version=version, asked=asked, answer=answer, state=state)

    def write(self, name: str, stream: SharedStream, *, before: str | None) -> None:
        """Writes the stream in place of what it was; it is there as a whole when this returns.

        before: the version that it was computed from. Raises MovedError, and writes nothing, if the file
        has another one by now: a replica that was slow must not undo what another one did meanwhile. In a
        folder no other write can come between. In an object store the file of a new stream is written only if
        there is none, provided that the store can do that; the version of any other is looked at just before.
        """
        facts = json.dumps({"asked": stream.asked, "answer": stream.answer})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"
            write_snapshot(stream.state, path, key=self._key)
            content = stream.version.encode() + facts.encode() + b"\n" + path.read_bytes()
        file = self._file(name)
        with self._alone(name):
            if self.version(name) != before:
                raise MovedError(name)
            if _is_local(self._system):
                with atomic_file(Path(file)) as temporary:
                    temporary.write_bytes(content)
            else:  # an object of a store appears whole
                self._put(name, content, new=before is None)

    def _put(self, name: str, content: bytes, *, new: bool) -> None:
        """Writes an object. Where it is new and another replica has made it first, the store itself refuses,
        if it is one that can (of S3 the header `If-None-Match`); any other store writes it as it is.

        Whether a store can, only its answer says: fsspec's S3 sends the header to every store, and some
        answer with an error of their own.
        """
        put = self._system.pipe_file
        file = self._file(name)
        if not new or "mode" not in inspect.signature(put).parameters:
            put(file, content)
            return
        try:
            put(file, content, mode="create")
        except Exception as error:  # of botocore some are no OSError
            made = isinstance(error, FileExistsError) or _status(error) in RACES
            if made or self.version(name) is not None:
                raise MovedError(name) from error
            put(file, content)
            # Python tells each text once.
            warnings.warn(NO_REFUSALS.format(first_line(error)), RuntimeWarning, stacklevel=2)

    def delete(self, name: str) -> bool:
        """Removes a stream; False if there was none."""
        file = self._file(name)
        with self._alone(name):
            try:
                self._system.rm_file(file)
            except FileNotFoundError:
                return False
        return True

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """While the block runs, no other replica changes the stream; an object store locks nothing."""
        if not _is_local(self._system):
            yield
            return
        with open(f"{self._folder}/{zlib.crc32(name.encode()) % LOCKS:02}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _file(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise UserError(
                f"the name of the stream is {name!r:.60}; expected up to 128 letters, digits, - and _, drawn "
                "at random."
            )
        return f"{self._folder}/{name}.stream"


def _status(error: Exception) -> int | None:
    """The status of the HTTP answer behind an error, if botocore has it."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    known = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    status = known.get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _is_local(system: Any) -> bool:
    return "file" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)


@contextlib.contextmanager
def _usable(folder: str) -> Iterator[None]:
    """Turns an error of the file system into one sentence."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"the folder of streams {folder} cannot be used ({first_line(error)}).") from error
