"""The stores of the models of a server. Models of one artefact share one, also before and after a reload."""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from runtimes.contract.session import Session
from xl_export.serve.streams.facts import StoreSettings
from xl_export.serve.streams.snapshot import server_key
from xl_export.serve.streams.store import IDENTITY, StreamStore
from xl_export.serve.streams.unserved import UnservedStreams

CLOSING = 2.0  # seconds; a server ends within five, with the engine's before it


@dataclass
class _Kept:
    """The streams of one artefact: their store and how many models use it, or the streams as they lie there
    while no model does.
    """

    store: StreamStore | None = None
    unserved: UnservedStreams | None = None
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


class Stores:
    """Opens the store of each artefact once, and closes it with the last model that uses it."""

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        """folder: for everything that outlives the server; it is made if there is none. Uses the disk."""
        self._folder = folder / "streams"
        self._settings = settings
        self._key = server_key(folder)
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.is_dir():
                    self._of(path.name).unserved = UnservedStreams.read(path)

    def acquire(self, session: Session) -> StreamStore:
        """The store of the session's artefact, for one model until `release`; uses the disk."""
        kept = self._of(session.identity)
        with kept.lock:
            if kept.store is None:
                kept.store = self._open(session, kept.unserved)
                kept.unserved = None
            kept.users += 1
            return kept.store

    def release(self, identity: str) -> None:
        """One model less uses the store of an artefact, which is closed after the last one. Several stores
        may close at one time.
        """
        kept = self._of(identity)
        with kept.lock:
            kept.users -= 1
            if not kept.users and kept.store is not None:
                kept.store.close(within=CLOSING)
                kept.unserved = kept.store.unserved()
                kept.store = None

    def others(self, served: Container[StreamStore]) -> list[StreamStore | UnservedStreams]:
        """Where the streams are that none of these stores has: streams of artefacts that are not served, or
        are not any more while requests that have begun use them.
        """
        with self._lock:  # a store may be opened between the first two looks, and is there at the third
            holds = [kept.store or kept.unserved or kept.store for kept in self._kept.values()]
        return [each for each in holds if each is not None and each not in served]

    def _open(self, session: Session, unserved: UnservedStreams | None) -> StreamStore:
        identity = session.identity[:IDENTITY]
        if unserved is not None:
            unserved.close()

        def elsewhere(owner: str) -> tuple[int, int]:
            held = [each.held(owner) for each in self.others(()) if each.identity != identity]
            return sum(count for count, _ in held), sum(num_bytes for _, num_bytes in held)

        try:
            return StreamStore(
                self._folder, session, key=self._key, settings=self._settings, elsewhere=elsewhere
            )
        except BaseException:
            if unserved is not None:
                unserved.closed = False
            raise

    def _of(self, identity: str) -> _Kept:
        with self._lock:
            return self._kept.setdefault(identity[:IDENTITY], _Kept())
