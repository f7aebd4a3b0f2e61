"""Streams in a folder that all replicas share: a mounted folder, or an object store that fsspec knows."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec

from runtimes.base.errors import UserError, first_line
from runtimes.contract.session import Session
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.files import SharedFile, is_local
from xl_export.serve.streams.index import Operation, StoreSettings, Stream, StreamIndex
from xl_export.serve.streams.snapshot import KEY_BYTES, KEY_FILE

NAME = re.compile(r"[\w-]{1,128}", re.ASCII)


class SharedStreams(StreamIndex):
    """The streams of one artefact in a shared folder, as one replica knows them.

    The file of a stream decides: what a replica has in RAM counts only while the file has the same version.
    """

    def __init__(self, folder: str, session: Session, *, ram_bytes: int) -> None:
        """folder: a path or a URL. Everyone who can write there is trusted: it has the key that signs the
        files. ram_bytes: of streams that are also kept in RAM, so that they need not be read.
        """
        with _usable(folder):
            self._system, root = fsspec.core.url_to_fs(folder)
            root = root.rstrip("/")
            self._folder = f"{root}/{session.identity[:32]}"
            self._system.makedirs(self._folder, exist_ok=True)
            key = bytes.fromhex(bytes(self._system.cat_file(f"{root}/{KEY_FILE}")).decode("ascii").strip())
        super().__init__(session, key=key, settings=StoreSettings(ram_bytes=ram_bytes))

    @staticmethod
    def prepare(folder: str) -> None:
        """Makes the folder and its key if there is none; call it once before the replicas start."""
        with _usable(folder):
            system, root = fsspec.core.url_to_fs(folder)
            system.makedirs(root, exist_ok=True)
            file = f"{root.rstrip('/')}/{KEY_FILE}"
            if not system.exists(file):
                system.pipe_file(file, secrets.token_bytes(KEY_BYTES).hex().encode())
                if is_local(system):
                    Path(file).chmod(0o600)

    def begin(self, name: str) -> Operation:
        """See `start`; a stream that does not exist has been fed nothing."""
        if not NAME.fullmatch(name):
            raise UserError(
                f"the name of the stream is {name!r:.60}; expected up to 128 letters, digits, - and _, drawn "
                "at random."
            )
        with self.lock:
            if name not in self.streams:
                file = SharedFile(self._system, f"{self._folder}/{name}.stream")
                self.streams[name] = Stream(name, "", 0.0, 0.0, file)
            return self.start(self.streams[name])

    def ended(self, stream: Stream) -> None:
        """Forgets a stream that the operation left outside of RAM, such as one that never existed."""
        if stream.state is None and self.streams.get(stream.id) is stream:
            del self.streams[stream.id]

    def in_ram(self, name: str, state: StreamState | None) -> None:
        """Forgets a stream that has left RAM: only its file says what it is then."""
        super().in_ram(name, state)
        if state is None:
            self.streams.pop(name, None)


@contextlib.contextmanager
def _usable(folder: str) -> Iterator[None]:
    """Turns an error of the file system into one sentence."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"the folder of streams {folder} cannot be used ({first_line(error)}).") from error
