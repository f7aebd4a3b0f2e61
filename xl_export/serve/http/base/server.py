"""The server as an object: its models, the store of their streams, limits, keys, metrics and log."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import msgspec
import numpy as np

from runtimes.base.errors import ConfigError, UserError
from runtimes.base.machine import available_cpus
from runtimes.contract.device import AUTO, CPU, Device
from runtimes.contract.session import Session, is_language_model
from runtimes.contract.spec import BUILD, GRAPH, ORT_GRAPH, SPEC, WEIGHTS
from runtimes.sessions.open import open_session
from xl_export.serve.core.admission import QueueFullError, StoppedError
from xl_export.serve.core.cache import PrefixCache
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.settings import EngineSettings, Limits, StoreSettings
from xl_export.serve.core.task import Delivery
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.keys import Keys
from xl_export.serve.http.base.limits import Bound
from xl_export.serve.http.base.mailbox import Mailbox, Mailboxes, RequestMetrics
from xl_export.serve.http.base.token_log import TokenTexts
from xl_export.serve.streams.database import Stream
from xl_export.serve.streams.store import StreamStore

ENGINE_STOP_SECONDS = 3.0  # seconds that the engines have to end their tasks when the server stops
STORE_CLOSE_SECONDS = 2.0  # seconds that the store has after the engines; a server ends within five
SHORT_STEP_SECONDS = 1e-3  # see `has_short_steps`
TIMED_STEPS = 20  # steps
# Bytes of an artefact. A step reads all weights, and one thread reads 32 MB in about a millisecond; so the
# steps of a larger one are not short, and it is not opened a second time for a trial.
MAX_SHORT_STEP_BYTES = 32 << 20


@dataclass(kw_only=True, eq=False)
class Model:
    """One artefact under one name."""

    name: str
    session: Session
    threads: int | None
    """CPU threads of a step; None if PyTorch chooses them."""
    engine: Engine
    mailboxes: Mailboxes
    store: StreamStore
    """The streams of all models."""
    requests: RequestMetrics = field(default_factory=RequestMetrics)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of the tokens of this model."""
        return TokenTexts(self.session.vocab)

    def metrics(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each metric, for `/metrics`."""
        yield from self.engine.metrics()

    def mailbox(self) -> Mailbox:
        """A mailbox for tasks of this model; use it in a `with` block."""
        return self.mailboxes.open(self.engine, self.requests)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from, and how it is opened."""

    name: str
    path: Path
    settings: EngineSettings
    threads: int | None = None
    """CPU threads of a step. None leaves one CPU to the event loop for an artefact whose steps are short,
    uses all CPUs for other artefacts, and leaves the choice to PyTorch for a run.
    """
    device: Device | str | None = None
    """What computes; None is the CPU, and for an engine its own GPU."""
    public_key: Path | None = None
    """The key with which the model must be signed; None accepts every model."""

    def open(self, store: StreamStore) -> Model:
        """The model with a running engine. It blocks; call it on a thread."""
        mailboxes = Mailboxes()
        session, threads = self.open_session()
        engine = self.make_engine(session, mailboxes.deliver)
        engine.start()
        model = Model(
            name=self.name,
            session=session,
            threads=threads,
            engine=engine,
            mailboxes=mailboxes,
            store=store,
        )
        model.requests.queued = engine.scheduler.queued
        return model

    def open_session(self) -> tuple[Session, int | None]:
        """The session, and the CPU threads of its steps; None if PyTorch or TensorRT chooses them."""
        cpus = available_cpus()
        opened = partial(open_session, self.path, public_key=self.public_key)
        if (self.path / BUILD).is_file():
            return opened(threads=self.threads, device=self.device or AUTO), self.threads
        device = CPU if self.device is None else Device.parse(self.device)
        if self.threads is None and cpus > 1 and _is_small(self.path):
            session = opened(threads=cpus - 1, device=device)
            if not is_language_model(session) or has_short_steps(session):
                return session, cpus - 1
        threads = self.threads or (cpus if _is_artefact(self.path) else None)
        return opened(threads=threads, device=device), threads

    def make_engine(self, session: Session, deliver: Callable[[Delivery], None]) -> Engine:
        """An engine for the session, with its prefix cache."""
        cache = None
        if self.settings.cache_bytes and is_language_model(session):
            cache = PrefixCache(
                identity=session.identity,
                segment=session.rule.segment,
                max_bytes=self.settings.cache_bytes,
                shared=self.settings.cache_shared,
            )
        return Engine(session, self.settings, cache=cache, deliver=deliver)


def _is_artefact(path: Path) -> bool:
    return (path / SPEC).is_file()


def _is_small(path: Path) -> bool:
    """Whether a folder is an artefact of so few bytes that its steps may be short."""
    files = [file for name in (GRAPH, ORT_GRAPH, WEIGHTS) if (file := path / name).is_file()]
    return _is_artefact(path) and sum(file.stat().st_size for file in files) < MAX_SHORT_STEP_BYTES


def has_short_steps(session: Session) -> bool:
    """Whether a step of one stream takes less than a millisecond with the threads of this session.

    Threads of ONNX Runtime wait for their next work without sleeping. If steps are short, they do so most
    of the time, and if they have all CPUs, the event loop waits for one of them for several milliseconds.

    The fastest of some steps over a full memory decides, so that other programs do not.
    """
    memory = session.start(1)
    token = np.zeros((1, 1), np.int64)
    seconds = []
    memory.positions[:] = session.rule.mem_len
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        session.predict(token, memory)
        seconds.append(time.perf_counter() - began)
    return min(seconds) < SHORT_STEP_SECONDS


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
        with self._lock, contextlib.suppress(OSError, ValueError):  # the log has no reader any more
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
        keys: Keys | None = None,
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
        self.keys = keys or {}
        self.log = log or Log(None)
        self.models: dict[str, Model] = {}
        """Models by name; a request without a name gets the first."""
        self.store: StreamStore
        """The streams of all models; there once the server has started."""
        self.hosts: frozenset[str] | None = None
        """The names under which a server without keys is reached; None for any."""
        self.requests = Bound(self.limits.requests, "requests")
        self.bodies = Bound(max(self.limits.bodies_bytes, self.limits.body_bytes), "bytes of bodies")
        self.answered: Counter[tuple[str, str]] = Counter()
        """Number of answered requests, by path and status."""
        self.stopping = False
        self._temporary: TemporaryDirectory[str] | None = None  # the streams of a server without `state`

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
        self.store = await asyncio.to_thread(StreamStore, folder, self._stream_limits)
        try:
            for name in self.sources:
                self.models[name] = await asyncio.to_thread(self.sources[name].open, self.store)
        except BaseException:
            await self.stop(within=0)
            raise

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

    def continuing(self, stream: Stream) -> Model | None:
        """The model that continues a stream: the model of its own artefact, or else the first one with memory
        of the same layout that was computed by the same weights; None if there is none.

        If the server adopts streams, a model with other weights continues those that no other model can.
        """
        own = stream.computed_by
        fits = [
            each for each in self.models.values() if each.session.memory_identity.layout == own.memory.layout
        ]
        for model in fits:
            if model.session.identity == own.artefact:
                return model
        for model in fits:
            if model.session.memory_identity == own.memory:
                return model
        return fits[0] if fits and self._stream_limits.adopt else None

    def refuse_when_full(self) -> None:
        """Raises RefusedError if no model could accept a task, before anything of a request is read."""
        if self.stopping:
            raise StoppedError
        full: UserError | None = None
        for model in self.models.values():
            try:
                return model.engine.places.refuse()
            except (QueueFullError, StoppedError) as refusal:
                full = refusal
        raise full or RefusedError("no model is served here.", status=503)

    async def stop(self, within: float = ENGINE_STOP_SECONDS) -> None:
        """Ends every task with its state and stops the engines. New requests are refused from now on."""
        self.stopping = True
        try:
            engines = [model.engine for model in self.models.values()]
            await asyncio.gather(*(asyncio.to_thread(partial(each.stop, within=within)) for each in engines))
            await asyncio.to_thread(partial(self.store.close, within=STORE_CLOSE_SECONDS))
        finally:
            if self._temporary is not None:
                await asyncio.to_thread(self._temporary.cleanup)
