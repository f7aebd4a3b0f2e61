"""The process: sockets, signals and timeouts around the application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn

from runtimes.base.errors import ConfigError
from xl_export.serve.core.settings import Limits
from xl_export.serve.http.app import Application
from xl_export.serve.http.base.connection import Connection
from xl_export.serve.http.base.server import Log, Server

try:
    import resource as _resource
except ImportError:  # no POSIX
    _resource = None  # type: ignore[assignment]

resource: Any = _resource

CONNECTION_GRACE_SECONDS = 4  # from a signal until connections that are still open are cut
END_CHECK_SECONDS = 0.1  # between two checks whether the server should end; as in uvicorn
BACKLOG = 2048  # connections that the kernel holds until they are accepted
KEEP_ALIVE = 65  # seconds that an idle connection is kept; more than the 60 of the usual proxies
# Seconds that a thread which computes in Python lets others wait; 0.005 is Python's default. The event loop
# waits so long a few times in each request while a long text is encoded or decoded.
SWITCH_SECONDS = 0.001
RESERVED_FILES = (
    256  # open files for artefacts, streams and their journals, and libraries; at most half of all
)
FILES_PER_CONNECTION = 2  # its socket, and a snapshot that is sent or received over it
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


# Called with the port, and with a function that ends the server as a signal does.
Ready = Callable[[int, Callable[[], None]], None]


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens; port 0 chooses a free one."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def only_here(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")

    def bind(self) -> socket.socket:
        """A socket that listens at that address; raises ConfigError if it is taken."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit the options. SO_KEEPALIVE finds dead clients. asyncio sets TCP_NODELAY only
            # on sockets whose protocol is named. Without it, an answer on a connection that is used again
            # waits 40 ms for the client's acknowledgement.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.bind((self.host, self.port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"the server cannot listen at {self.host} port {self.port} ({error.strerror}); give another "
                "--host or --port."
            ) from error
        listener.setblocking(False)
        return listener


async def serve(server: Server, address: Address, *, ready: Ready | None = None) -> None:
    """Opens the models and answers requests until SIGTERM or Ctrl-C; then every stream ends within seconds.

    ready: called when clients can connect.
    """
    if not address.only_here and not server.keys:
        raise ConfigError(
            f"--host {address.host} lets other machines in and no keys were given; give --api-keys FILE, or "
            "leave --host out."
        )
    with contextlib.closing(address.bind()) as listener, _logs(server):
        await server.start()
        try:
            if not server.keys:
                server.hosts = LOOPBACK | {f"[{address.host}]" if ":" in address.host else address.host}
            connections: set[Connection] = set()
            web = uvicorn.Server(configured(server, connections))
            end = partial(setattr, web, "should_exit", True)
            with _ended_by_signals(end):
                if ready is not None:
                    ready(listener.getsockname()[1], end)
                serving = asyncio.ensure_future(web.serve([listener]))
                while not (web.should_exit or serving.done()):
                    await asyncio.sleep(END_CHECK_SECONDS)
                # uvicorn waits for answers before it stops the application. So streams end now.
                await asyncio.gather(server.stop(), serving)
                for connection in list(connections):  # to clients that do not read
                    connection.cut()
        finally:
            await server.stop()


def configured(server: Server, connections: set[Connection]) -> uvicorn.Config:
    """The settings of uvicorn: no log of its own, our limits, no trust in headers of proxies."""
    return uvicorn.Config(
        Application(server),
        http=partial(Connection, connections, server.limits),  # type: ignore[arg-type]
        h11_max_incomplete_event_size=server.limits.header_bytes,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=CONNECTION_GRACE_SECONDS,
        ws="none",
    )


@contextlib.contextmanager
def _ended_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """While the block runs, signals call `end`. Only the main thread can handle them.

    uvicorn handles SIGTERM and SIGINT itself, and raises them again when it has ended: then they end nothing.
    A SIGHUP that is ignored, as under `nohup`, stays ignored.
    """
    names = ("SIGTERM", "SIGINT", "SIGHUP")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {each: signal.getsignal(each) for each in signals}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    handled = {each for each, handler in before.items() if handler is not signal.SIG_IGN}
    for each in handled:
        signal.signal(each, lambda *_: end())
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, before[each])


class LogHandler(logging.Handler):
    """Sends what engines and libraries log to the server's log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        fields = {"logger": record.name, "message": record.getMessage()}
        event = "engine" if record.name.startswith("xl_export") else "library"
        if error is not None:
            self._log.fault(event, error, **fields)
        else:
            self._log.event(event, level=record.levelname.lower(), **fields)


@contextlib.contextmanager
def _logs(server: Server) -> Iterator[None]:
    """While the block runs, faults of engines and what uvicorn logs go to the server's own log. uvicorn's
    warnings of broken requests are no fault of the server.
    """
    for name in ("uvicorn", "uvicorn.asgi"):
        logging.getLogger(name).propagate = False
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    handler = LogHandler(server.log)
    loggers = [logging.getLogger(name) for name in ("uvicorn", "xl_export")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def raised(wanted: int) -> int:
    """How many files the process may have open, after its soft limit was raised to `wanted` or, if that is
    less, to its hard limit.
    """
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # a system that allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return int(soft)


def fitted(limits: Limits) -> tuple[Limits, int]:
    """The limits with no more connections than the process can have files for, and the number of files."""
    files = raised(FILES_PER_CONNECTION * limits.connections + RESERVED_FILES)
    connections = max(1, (files - min(RESERVED_FILES, files // 2)) // FILES_PER_CONNECTION)
    return replace(limits, connections=min(connections, limits.connections)), files


def run(server: Server, address: Address, *, ready: Ready | None = None) -> None:
    """`serve` in an event loop of its own, uvloop if it is installed. It raises the limit of open files,
    and logs how many connections fit into it, and how many threads each model has.
    """
    server.limits, files = fitted(server.limits)
    sys.setswitchinterval(SWITCH_SECONDS)

    def began(port: int, end: Callable[[], None]) -> None:
        connections = server.limits.connections
        server.log.event("limits", open_files=files, connections=connections)
        for model in server.models.values():
            server.log.event(
                "serves", model=model.name, identity=model.session.identity, threads=model.threads
            )
        streams = server.store.all()
        lost = sum(server.continuing(stream) is None for stream in streams)
        level = "warning" if lost else "info"
        server.log.event("streams", level=level, kept=len(streams), without_a_model=lost)
        if ready is not None:
            ready(port, end)

    try:
        from uvloop import run as run_loop
    except ImportError:
        run_loop = asyncio.run  # type: ignore[assignment]
    run_loop(serve(server, address, ready=began))
