"""The server as an object: its models, limits, keys, figures and log."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import msgspec

from runtimes.base.errors import ConfigError, UserError
from xl_export.serve.core.admission import Busy, Quota, StoppedError
from xl_export.serve.http.base.bridge import Figures
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.keys import Keys
from xl_export.serve.http.base.limits import Limits, too_many
from xl_export.serve.http.base.models import Model, Source
from xl_export.serve.http.base.stores import Stores
from xl_export.serve.http.base.workers import on_thread
from xl_export.serve.streams.facts import StoreSettings
from xl_export.serve.streams.store import StreamStore
from xl_export.serve.streams.unserved import UnservedStreams

ON_SIGNAL = 3.0  # seconds that the engines have to end their tasks when the server stops
MOST_REPLACED = 2  # versions of one model that were replaced and still serve what began before


class Log:
    """Writes events as lines of JSON; to nowhere if `stream` is None."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()  # an engine reports faults on its own thread

    def event(self, event: str, *, level: str = "info", **fields: Any) -> None:
        """One line with the time, the level, the name of the event, and its fields without those that are
        None.
        """
        if self._stream is None:
            return
        now = datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds")
        known = {name: value for name, value in fields.items() if value is not None}
        line = msgspec.json.encode({"time": now, "level": level, "event": event, **known})
        with self._lock, suppress(OSError, ValueError):  # the log has no reader any more
            self._stream.write(line.decode() + "\n")
            self._stream.flush()

    def fault(self, event: str, error: BaseException, **fields: Any) -> None:
        """An error that is our own, with its traceback."""
        where = "".join(traceback.format_exception(error))
        self.event(event, level="error", error=str(error), traceback=where, **fields)


class Server:
    """Opens models, knows who may use them, and stops them.

    state: the folder for what outlives the process; without one, streams are in a temporary folder until the
    server stops.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        limits: Limits | None = None,
        read_keys: Callable[[], Keys] = dict,
        state: Path | None = None,
        stream_limits: StoreSettings | None = None,
        log: Log | None = None,
    ) -> None:
        self.sources = {source.name: source for source in sources}
        if len(self.sources) != len(sources):
            raise ConfigError("two models have one name; give each its own, as NAME=PATH.")
        self.limits = limits or Limits()
        self.state = state
        self._stream_limits = stream_limits or StoreSettings()
        self._read_keys = read_keys
        self.keys = read_keys()
        self.log = log or Log(None)
        #: By name; the first is the one that a request without a name gets.
        self.models: dict[str, Model] = {}
        #: Where the streams of all artefacts are; there once the server has started.
        self.stores: Stores
        #: The names under which a server without keys is reached; None for any.
        self.hosts: frozenset[str] | None = None
        share = self.limits.tenant_share
        self.requests = Quota(self.limits.requests, share=share, refusal=too_many("requests"))
        self.sockets = Quota(self.limits.sockets, share=share, refusal=too_many("WebSockets"))
        #: The bytes of bodies and messages that are in memory; see `BodyAccount`.
        self.bodies = Quota(max(self.limits.bodies_bytes, ceil(self.limits.body_bytes / share)), share=share)
        #: What was asked of each model, by its name; they continue when it is reloaded.
        self.figures: defaultdict[str, Figures] = defaultdict(Figures)
        #: How many requests were answered, by path and status.
        self.answered: Counter[tuple[str, str]] = Counter()
        self.stopping = False
        self._temporary: TemporaryDirectory[str] | None = None  # the streams of a server without `state`
        self._open_models: set[Model] = set()  # those that drain, too
        self._draining: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()

    async def start(self) -> None:
        """Opens all models, one after the other."""
        folder = self.state
        if folder is None:
            # An operation that did not end in time may still write to it while it is removed.
            try:
                self._temporary = TemporaryDirectory(prefix="xl-export-streams-", ignore_cleanup_errors=True)
            except OSError as error:
                raise UserError(
                    f"streams need a folder to write to, and there is no temporary one ({error}); give one "
                    "with --state."
                ) from error
            folder = Path(self._temporary.name)
        self.stores = await asyncio.to_thread(Stores, folder, self._stream_limits)
        for name in self.sources:
            self.models[name] = await self._open(name)

    def model(self, name: str | None) -> Model:
        """The model of that name, or the first; raises RefusedError for a name that is not served."""
        if self.stopping:
            raise StoppedError
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise RefusedError(
                f"the model {name!r:.80} is not served here; choose one of {', '.join(self.models)}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    def unserved_streams(self) -> list[StreamStore | UnservedStreams]:
        """Where the streams are that no model of this server can continue."""
        return self.stores.others([model.store for model in self.models.values()])

    def refuse_when_full(self, tenant: str, *, bulk: bool = False) -> None:
        """Raises RefusedError if no model could accept a task of this tenant, before anything of a request
        is read. bulk: whether it yields to tasks that people wait for.
        """
        if self.stopping:
            raise StoppedError
        full: UserError | None = None
        for model in self.models.values():
            try:
                return model.engine.refuse_more(tenant=tenant, bulk=bulk)
            except (Busy, StoppedError) as refusal:
                full = refusal
        raise full or RefusedError("no model is served here.", status=503)

    async def reload(self, name: str) -> Model:
        """Opens the artefact of a model again, checks it, and puts it in the place of the one that is served.

        Requests that use the old one finish on it. Raises UserError, and changes nothing, if the artefact
        cannot be opened, or if too many replaced versions still serve: each keeps its memory.
        """
        async with self._reloading:
            source = self.sources[name]
            self._refuse_more_replaced(name)
            await on_thread(source.check)
            fresh = await self._open(name)
            if self.stopping:
                await on_thread(fresh.stop, 0.0)
                raise StoppedError
            old, self.models[name] = self.models[name], fresh
        self.log.event(
            "reloaded",
            model=name,
            identity=fresh.session.identity,
            before=old.session.identity,
            threads=fresh.threads,
        )
        task = asyncio.ensure_future(self._drain(old))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)
        return fresh

    async def reload_changed(self) -> None:
        """Reads the keys again and reloads the models whose folder has changed or whose engine has died. A
        fault is a line of the log, and the others are reloaded nevertheless.
        """
        with self._logged("the keys"):
            self.reload_keys()
        for name, model in list(self.models.items()):
            with self._logged(name):
                stamp = await on_thread(self.sources[name].stamp)
                if stamp and stamp == model.stamp and model.engine.alive:
                    self.log.event("unchanged", model=name)
                else:
                    await self.reload(name)

    @contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        try:
            yield
        except (UserError, RefusedError) as error:
            self.log.event("not reloaded", level="error", what=what, error=str(error))
        except Exception as error:
            self.log.fault("not reloaded", error, what=what)

    def reload_keys(self) -> None:
        """Reads the keys again; raises ConfigError, and changes nothing, if the file is wrong."""
        self.keys = self._read_keys()

    async def stop(self, within: float = ON_SIGNAL) -> None:
        """Ends every task with its state and stops the engines. New requests are refused from now on."""
        self.stopping = True
        for task in self._draining:
            task.cancel()
        try:
            await asyncio.gather(*(on_thread(model.stop, within) for model in self._open_models))
        finally:
            self._open_models.clear()
            if self._temporary is not None:
                await on_thread(self._temporary.cleanup)

    async def _open(self, name: str) -> Model:
        model = await on_thread(self.sources[name].open, self.stores, self.figures[name])
        self._open_models.add(model)
        return model

    def _refuse_more_replaced(self, name: str) -> None:
        replaced = [each for each in self._open_models if each.name == name and each is not self.models[name]]
        if len(replaced) >= MOST_REPLACED:
            users = sum(each.users for each in replaced)
            raise UserError(
                f"{len(replaced)} versions of {name} replaced before still serve {users} request(s), "
                "each with its memory; reload again when these have ended."
            )

    async def _drain(self, model: Model) -> None:
        """Stops a model that no request uses any more, however long that takes: none is cut. All requests
        end, since their tokens are bounded, and a client that reads nothing is disconnected.
        """
        while model.users:
            await asyncio.sleep(0.05)
        await on_thread(model.stop, ON_SIGNAL)
        self._open_models.discard(model)
