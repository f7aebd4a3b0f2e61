"""The stores of the models of a server. Models of one artefact share one, also before and after a reload."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from runtimes.base.errors import UserError
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.models import Model
from xl_export.serve.streams.facts import (
    BusyStreamError,
    ClosedStoreError,
    FullStoreError,
    NoStreamError,
    StoreSettings,
    TooManyStreamsError,
)
from xl_export.serve.streams.folder import UnwritableError
from xl_export.serve.streams.snapshot import server_key
from xl_export.serve.streams.store import StreamStore

ATTACHED = "streams"  # the name under which a model has its store
CLOSING = 2.0  # seconds; with those of the engine before it, a server ends within five
# Of each error: the status of HTTP, and a word for programs.
ANSWERS: tuple[tuple[type[UserError], int, str], ...] = (
    (NoStreamError, 404, "stream_not_found"),
    (BusyStreamError, 409, "stream_busy"),
    (FullStoreError, 429, "queue_full"),
    (TooManyStreamsError, 403, "too_many_streams"),
    (UnwritableError, 507, "disk_full"),
    (ClosedStoreError, 503, "stopping"),
)


@dataclass
class _Kept:
    """The store of one artefact, and how many models use it; None while no model does."""

    store: StreamStore | None = None
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


class Stores:
    """Opens the store of each artefact once, and closes it with the last model that uses it."""

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        """folder: for everything that outlives the server; it is made where there is none."""
        self._folder, self._settings, self._key = folder / "streams", settings, server_key(folder)
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}

    def attach(self, model: Model) -> None:
        """Gives a model that was opened its store; called on a thread."""
        identity = model.session.identity
        kept = self._of(identity)
        with kept.lock:
            if kept.store is None:
                kept.store = StreamStore(self._folder, model.session, key=self._key, settings=self._settings)
            kept.users += 1
            model.attached[ATTACHED] = AttachedStore(kept.store, self, identity)

    def detach(self, identity: str) -> None:
        """One model less uses the store of an artefact. Those of several artefacts close at one time."""
        kept = self._of(identity)
        with kept.lock:
            kept.users -= 1
            if not kept.users and kept.store is not None:
                store, kept.store = kept.store, None
                store.close(within=CLOSING)

    def _of(self, identity: str) -> _Kept:
        with self._lock:
            return self._kept.setdefault(identity, _Kept())


class AttachedStore:
    """The store of one model; `close` is called once its engine has stopped."""

    def __init__(self, store: StreamStore, stores: Stores, identity: str) -> None:
        self.store, self._stores, self._identity = store, stores, identity

    def close(self) -> None:
        """Lets the store be closed when no other model uses it."""
        self._stores.detach(self._identity)

    def figures(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each figure, for `/metrics`."""
        facts = self.store.totals
        yield "streams", "Streams that are kept.", facts.streams
        yield "streams_in_memory", "Streams whose state is in memory.", facts.in_ram
        yield "streams_memory_bytes", "Bytes of these states.", facts.ram_bytes
        yield "stream_snapshots_read_total", "Snapshots that were read from the disk.", facts.read
        yield "stream_snapshots_written_total", "Snapshots that were written to the disk.", facts.written


def store_of(model: Model) -> StreamStore:
    """The store of a model; raises RefusedError where the server keeps no streams."""
    attached = model.attached.get(ATTACHED)
    if attached is None:
        raise RefusedError(
            "this server keeps no streams; start it with --state FOLDER.", status=501, code="no_streams"
        )
    assert isinstance(attached, AttachedStore)
    return attached.store


@contextlib.contextmanager
def answered(*, closes: bool = False) -> Iterator[None]:
    """Turns errors of a store into refusals with their status. closes: whether the body was not read."""
    try:
        yield
    except UserError as error:
        for kind, status, code in ANSWERS:
            if isinstance(error, kind):
                after = 1.0 if kind in (BusyStreamError, FullStoreError) else None
                raise RefusedError(
                    str(error), status=status, code=code, retry_after=after, closes=closes
                ) from error
        raise
