"""The process: sockets, signals and timeouts around the application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import uvicorn

from runtimes.base.errors import ConfigError
from xl_export.serve.http.app import Application
from xl_export.serve.http.base.connection import Config
from xl_export.serve.http.base.limits import Limits
from xl_export.serve.http.base.server import ON_SIGNAL, Log, Server

try:
    import resource as _resource
except ImportError:  # no POSIX
    _resource = None  # type: ignore[assignment]

resource: Any = _resource

GRACE = 4  # seconds from a signal until connections that are still open are cut
CUT = 0.5  # seconds that cut connections have to end
KEEP_ALIVE = 65  # seconds that an idle connection is kept; more than the 60 of the usual proxies
# Seconds that a thread which computes in Python lets others wait; 0.005 is Python's default. The event loop
# waits so long a few times in each request while a long text is encoded or decoded.
SWITCH = 0.001
RESERVE = 256  # open files for artefacts, streams and their journals, and libraries; at most half of all
EACH = 2  # open files of a connection: its socket, and a snapshot that is sent or received over it
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


Ready = Callable[[int, "Web"], None]  # called with the port, and with what can end the server


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
        """A socket at that address, which does not listen yet; raises ConfigError if it is taken."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it; asyncio sets it only on sockets whose protocol is named. Without it, an
            # answer on a connection that is used again waits 40 ms for the client's acknowledgement.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.bind((self.host, self.port))
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

    ready: called when requests are answered.
    """
    if not address.only_here and not server.keys:
        raise ConfigError(
            f"--host {address.host} lets other machines in and no keys were given; give --api-keys FILE, or "
            "leave --host out."
        )
    listener = address.bind()
    with _logs(server):
        try:
            await server.start()
            if not server.keys:
                server.hosts = LOOPBACK | {f"[{address.host}]" if ":" in address.host else address.host}
            web = Web(configured(server), server, ready)
            await web.serve([listener])
        finally:
            listener.close()
            await server.stop()


def configured(server: Server) -> uvicorn.Config:
    """The settings of uvicorn: no log of its own, our timeouts, no trust in headers of proxies."""
    return Config(
        Application(server),
        server.limits,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        ws="none",
    )


class Web(uvicorn.Server):
    """uvicorn, which waits for streams before it stops the application. So the signal itself ends
    them.
    """

    def __init__(self, config: uvicorn.Config, server: Server, ready: Ready | None) -> None:
        super().__init__(config)
        self._server = server
        self._ready = ready
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        # uvicorn does not handle it. It stays ignored under `nohup`. Not every loop or thread has handlers.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError, AttributeError):
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                self._loop.add_signal_handler(signal.SIGHUP, self.end)
        await super().serve(sockets)
        if self._ending is not None:
            await self._ending
        if self.server_state.tasks:  # they were cancelled; what they log at their end belongs to the log
            await asyncio.wait(self.server_state.tasks, timeout=CUT)
        for connection in list(self.server_state.connections):  # whose clients do not read
            connection.transport.abort()
        await asyncio.sleep(0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None:
            self._ready(self.servers[0].sockets[0].getsockname()[1], self)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first = not self.should_exit
        super().handle_exit(sig, frame)
        # uvicorn would raise the signal again when all is done; the command ends by itself.
        self._captured_signals.clear()
        if first and self._loop is not None:
            self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Ends every stream, and then the process stops serving."""
        self.should_exit = True
        if self._ending is None:
            self._server.stopping = True
            self._ending = asyncio.ensure_future(self._server.stop(ON_SIGNAL))


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
    """How many files the process may have open, after its soft limit was raised to as many as are wanted, but
    not beyond its hard limit.
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
    files = raised(EACH * limits.connections + RESERVE)
    connections = max(1, (files - min(RESERVE, files // 2)) // EACH)
    return replace(limits, connections=min(connections, limits.connections)), files


def run(server: Server, address: Address, *, ready: Ready | None = None) -> None:
    """`serve` in an event loop of its own, uvloop if it is installed. It raises the limit of open files,
    and logs how many connections fit into it, and how many threads each model has.
    """
    server.limits, files = fitted(server.limits)
    sys.setswitchinterval(SWITCH)

    def began(port: int, web: Web) -> None:
        connections = server.limits.connections
        server.log.event("limits", open_files=files, connections=connections)
        for model in server.models.values():
            server.log.event(
                "serves", model=model.name, identity=model.session.identity, threads=model.threads
            )
        if ready is not None:
            ready(port, web)

    try:
        from uvloop import run as run_loop
    except ImportError:
        run_loop = asyncio.run  # type: ignore[assignment]
    run_loop(serve(server, address, ready=began))
