"""Streams that a server keeps and no model of it can go on with, because they are of another artefact.

They stay as they lie on the disk until a server of their artefact takes them over again. Until then they are
listed, count for their tenant, are given as snapshots, and are deleted if their tenant asks for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from runtimes.base.errors import UserError
from runtimes.base.files import read_json
from runtimes.base.lock import only_writer
from xl_export.serve.streams.facts import (
    BusyStreamError,
    ClosedStoreError,
    JournalError,
    NoStreamError,
)
from xl_export.serve.streams.files import FACTS, StreamFolder
from xl_export.serve.streams.index import ByOwner, Damaged, Stream

LOG = logging.getLogger(__name__)


class UnservedStreams(ByOwner):
    """The streams of one artefact that is not served. All methods may be called from any thread."""

    def __init__(self, path: Path, streams: Iterable[Stream | Damaged]) -> None:
        """path: the folder of the artefact's streams. streams: those in it."""
        self.path = path
        self._lock = threading.Lock()
        self.streams: dict[str, Stream] = {}
        self.damaged: dict[str, Damaged] = {}
        for each in streams:
            if isinstance(each, Damaged):
                self.damaged[each.id] = each
            else:
                self.streams[each.id] = Stream(each.id, each.owner, each.created, each.used, each.files)
        self.closed = False

    @staticmethod
    def read(path: Path) -> UnservedStreams | None:
        """The streams in a folder; None if another process is using them. Uses the disk."""
        try:
            with only_writer(path, doing="listing streams"):
                return UnservedStreams(path, stored(path))
        except UserError:
            return None

    def held(self, owner: str) -> tuple[int, int]:
        """How many streams an owner has here, also damaged ones, and the bytes of the others' snapshots."""
        return self.count(owner), sum(stream.files.snapshot_bytes for stream in self.list(owner))

    def open_snapshot(self, name: str, owner: str) -> BinaryIO:
        """The snapshot of a stream as an open file; uses the disk. Raises NoStreamError, and JournalError
        if it is not the whole stream.
        """
        files = self.find(name, owner).files
        if files.appended:
            raise JournalError(name, files.num_appended)
        try:
            return files.open_snapshot()
        except OSError as error:  # another process has removed it
            raise NoStreamError(name) from error

    def delete(self, name: str, owner: str) -> None:
        """Removes a stream for ever; uses the disk."""
        with self._writing(name):
            stream = self.find(name, owner)
            stream.files.delete()
            del self.streams[name]

    def close(self) -> None:
        """Waits for what is being deleted; from now on nothing is."""
        with self._lock:
            self.closed = True

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        with self._lock, contextlib.ExitStack() as stack:
            if self.closed:
                raise ClosedStoreError("the artefact of the stream is being opened; ask again in a second.")
            try:
                stack.enter_context(only_writer(self.path, doing="deleting a stream"))
            except UserError as error:
                raise BusyStreamError(
                    f"another process on the server's machine uses the stream {name}; ask again when it has "
                    "ended."
                ) from error
            yield


def stored(path: Path, *, flush: bool = False) -> Iterator[Stream | Damaged]:
    """The streams in the folder of an artefact; one that is damaged is logged. Uses the disk; the caller is
    the only writer there.
    """
    for each in sorted(entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] != "."):
        try:
            folder, facts = StreamFolder.open(each, flush=flush)
            created = float(facts["created"])
            used = max(created, folder.written_at)
            yield Stream(each.name, str(facts["owner"]), created, used, folder)
        except (OSError, UserError, KeyError, TypeError, ValueError) as error:
            LOG.error("the stored stream in %s is damaged: %s", each, error or type(error).__name__)
            yield Damaged(each.name, _owner(each))


def _owner(path: Path) -> str | None:
    """The owner of a damaged stream, if the facts in its folder have it."""
    try:
        return str(read_json(path / FACTS)["owner"])
    except (OSError, UserError, KeyError, TypeError):
        return None
