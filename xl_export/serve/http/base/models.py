"""A model that is served: its session, its engine, and the requests that use it."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from runtimes.base.errors import ArtefactError, ConfigError, UserError
from runtimes.base.machine import available_cpus
from runtimes.contract.device import AUTO, CPU, Device
from runtimes.contract.sampling import read_sampling
from runtimes.contract.session import Session, is_language_model
from runtimes.contract.spec import BUILD, GRAPH, ORT_GRAPH, SPEC, WEIGHTS, refuse_no_language_model
from runtimes.sessions.open import open_session
from runtimes.tasks.check import check
from xl_export.serve.core.cache import PrefixCache
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Delivery
from xl_export.serve.core.trial import SMALL, has_short_steps
from xl_export.serve.http.base.bridge import Bridge, Figures, Inbox
from xl_export.serve.http.base.encoding import TokenTexts
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.steps import StepEngine
from xl_export.serve.http.base.stores import Stores
from xl_export.serve.streams.store import StreamStore


@dataclass(kw_only=True, eq=False)
class Model:
    """One artefact under one name. After a reload there is another object under the name; this one drains."""

    name: str
    path: Path
    session: Session
    #: CPU threads of a step; None if PyTorch chooses them.
    threads: int | None
    engine: Engine | StepEngine
    bridge: Bridge
    #: What `Source.stamp` was before the model was opened.
    stamp: str
    #: The stores of all artefacts.
    stores: Stores
    #: The streams of its artefact.
    store: StreamStore
    #: The figures of what was asked of it.
    requests: Figures
    created: int = field(default_factory=lambda: int(time.time()))
    #: Requests and connections that use it.
    users: int = 0
    stopped: bool = False
    _stopping: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of the tokens of this model."""
        return TokenTexts(self.session.vocab)

    def figures(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each figure, for `/metrics`."""
        yield from self.engine.figures()
        damaged = len(self.store.damaged)
        yield "streams_damaged", "Streams whose files are damaged, as found at the start.", damaged
        yield from self.store.figures()

    def inbox(self) -> Inbox:
        """An inbox for tasks of this model; use it in a `with` block. Raises what `tasks` raises."""
        return Inbox(self.bridge, self.tasks, self.requests)

    @property
    def tasks(self) -> Engine:
        """The engine of a language model; raises StreamError for any other model."""
        if isinstance(self.engine, StepEngine):
            assert self.session.spec is not None
            refuse_no_language_model(self.session.spec)
        assert isinstance(self.engine, Engine)
        return self.engine

    @property
    def steps(self) -> StepEngine:
        """The engine of a model with named inputs; raises RefusedError for a language model."""
        if not isinstance(self.engine, StepEngine):
            raise RefusedError(
                f"{self.name} is a language model; send text or tokens to /v1/completions or /v1/streams."
            )
        return self.engine

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While the block runs, a reload does not stop the engine of this model."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    def stop(self, within: float) -> None:
        """Ends all tasks and the engine, once, and gives back its store. It blocks; use a thread."""
        with self._stopping:
            if self.stopped:
                return
            self.stopped = True
            self.engine.stop(within=within)
            self.stores.release(self.session.identity)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from, so that it can be opened again."""

    name: str
    path: Path
    settings: EngineSettings
    #: Of the prefix cache; 0 for none.
    cache_bytes: int = 0
    #: Whether tenants may find each other's prefixes in the cache.
    cache_shared: bool = False
    #: CPU threads of a step. None leaves one CPU to the event loop for an artefact whose steps are short,
    #: uses all CPUs for other artefacts, and leaves the choice to PyTorch for a run.
    threads: int | None = None
    device: Device | str = "cpu"

    def open(self, stores: Stores, figures: Figures) -> Model:
        """The model with a running engine. It blocks; call it on a thread."""
        bridge = Bridge(unread=self.settings.unread)
        stamp = self.stamp()
        session, threads = self.open_session()
        engine = self.make_engine(session, bridge.deliver)
        engine.start()
        try:
            store = stores.acquire(session)
        except BaseException:
            engine.stop(within=0)
            raise
        if isinstance(engine, Engine):
            figures.queued.append(engine.scheduler.queued)
        return Model(
            name=self.name,
            path=self.path,
            session=session,
            threads=threads,
            engine=engine,
            bridge=bridge,
            stamp=stamp,
            stores=stores,
            store=store,
            requests=figures,
        )

    def open_session(self) -> tuple[Session, int | None]:
        """The session, and the CPU threads of its steps; None if PyTorch chooses them."""
        cpus = available_cpus()
        device = _serving_device(self.path, self.device)
        if self.threads is None and cpus > 1 and _is_small(self.path):
            session = open_session(self.path, threads=cpus - 1, device=device)
            if not is_language_model(session) or has_short_steps(session):
                return session, cpus - 1
        threads = self.threads or (cpus if _is_artefact(self.path) else None)
        return open_session(self.path, threads=threads, device=device), threads

    def make_engine(self, session: Session, deliver: Callable[[Delivery], None]) -> Engine | StepEngine:
        """An engine for the session, with its prefix cache."""
        if not is_language_model(session):
            return StepEngine(session, self.settings)
        cache = None
        if self.cache_bytes:
            cache = PrefixCache(
                identity=session.identity,
                segment=session.rule.segment,
                max_bytes=self.cache_bytes,
                shared=self.cache_shared,
            )
        return Engine(session, self.settings, cache=cache, deliver=deliver)

    def check(self) -> None:
        """Raises UserError for an artefact that does not compute what was trained."""
        if not _is_artefact(self.path):  # a run is the reference itself
            return
        # Others may be served meanwhile.
        few = max(1, available_cpus() - 1) if _is_small(self.path) else None
        device = _serving_device(self.path, self.device)
        report = check(self.path, threads=self.threads or few, device=device)
        if not report.passed:
            raise ArtefactError(f"{self.path} does not compute what was trained: {report.sentence}")

    def stamp(self) -> str:
        """Identifies this version of the folder: the hash of an artefact's spec, which has the hashes of its
        files, and its sampling; or the sizes and times of the files of a run. Empty if the
        folder cannot be read.
        """
        try:
            if (self.path / SPEC).is_file():
                named = hashlib.sha256((self.path / SPEC).read_bytes()).hexdigest()
                return f"{named} {read_sampling(self.path)}"
            facts = [(each.name, each.stat()) for each in sorted(self.path.iterdir())]
        except (OSError, UserError):
            return ""
        return repr([(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in facts])


def _is_artefact(path: Path) -> bool:
    return (path / SPEC).is_file()


def _is_small(path: Path) -> bool:
    """Whether a folder is an artefact of so few bytes that its steps may be short."""
    files = [file for name in (GRAPH, ORT_GRAPH, WEIGHTS) if (file := path / name).is_file()]
    return _is_artefact(path) and sum(file.stat().st_size for file in files) < SMALL


def _serving_device(path: Path, device: Device | str) -> Device:
    """What computes a folder that is served; `auto` is the CPU for an artefact.

    Raises ConfigError for an engine, which is not served, and for an artefact on another device: the rows of
    the streams are in the memory of the CPU.
    """
    chosen = Device.parse(device)
    if (path / BUILD).is_file():
        raise ConfigError(f"{path} is an engine, and engines are not served; give the artefact of it.")
    if not _is_artefact(path):
        return chosen
    if chosen not in (AUTO, CPU):
        raise ConfigError(
            f"device is {chosen} and {path} is an artefact, which is served only on the CPU, which has "
            "the memory of its streams; leave --device out."
        )
    return CPU
