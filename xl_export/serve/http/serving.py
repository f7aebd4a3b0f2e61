"""The process: sockets, signals and timeouts around the application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from runtimes.base.errors import ConfigError
from xl_export.serve.http.app import application
from xl_export.serve.http.base.answering import Write
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.limits import Limits
from xl_export.serve.http.base.log import Handler
from xl_export.serve.http.base.server import ON_SIGNAL, Server
from xl_export.serve.http.open_files import fitted

GRACE = 4  # seconds from a signal until connections that are still open are cut
CUT = 0.5  # seconds that cut connections have to end
KEEP_ALIVE = 65  # seconds that an idle connection is kept; more than the 60 of the usual proxies
PING = 20.0  # seconds between two pings of a WebSocket, and until the answer; then its client is gone
PART = 1 << 14  # bytes that the parser is given at once
LITTLE = 1 << 10  # bytes; so much may a head exceed its limit before that is noticed
TOO_LARGE_HEAD = RefusedError(
    "the head of the request, or what stands between the parts of its body, is too large; send fewer and "
    "shorter headers.",
    status=431,
    code="headers_too_large",
    closes=True,
)
TOO_LARGE_HANDSHAKE = RefusedError(
    "the handshake of the WebSocket has too many headers, or one that is too long; send fewer and shorter "
    "ones.",
    status=431,
    code="headers_too_large",
    closes=True,
)
NOT_HTTP = RefusedError("the request is not HTTP/1.1; send one that is.", code="not_http", closes=True)
# Seconds that a thread which computes in Python lets others wait; 0.005 is Python's default. The event loop
# waits so long a few times in each request while a long text is encoded or decoded.
SWITCH = 0.001
SIZES = [b"%x\r\n" % size for size in range(1024)]  # the heads of short chunks
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


Ready = Callable[[int, "Web"], None]  # called with the port, and with what can end the server


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def only_here(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")

    def bind(self) -> socket.socket:
        """A socket at that address, which does not listen yet; raises ConfigError where it is taken."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"the server cannot listen at {self.host} port {self.port} ({error.strerror}); give another "
                "--host or --port."
            ) from error
        listener.setblocking(False)
        return listener


def refuse_open_door(address: Address, *, has_keys: bool) -> None:
    """Raises ConfigError for a server that other machines reach without a key."""
    if not address.only_here and not has_keys:
        raise ConfigError(
            f"--host {address.host} lets other machines in and no keys were given; give --api-keys FILE, or "
            "leave --host out."
        )


async def serve(server: Server, address: Address, *, ready: Ready | None = None) -> None:
    """Opens the models and answers requests until SIGTERM or Ctrl-C; then every stream ends within seconds.

    ready: called when requests are answered. On SIGHUP the keys and changed models are read again.
    """
    refuse_open_door(address, has_keys=bool(server.keys))
    listener = address.bind()
    with _logs(server):
        await _serve(server, address, listener, ready)


async def _serve(server: Server, address: Address, listener: socket.socket, ready: Ready | None) -> None:
    try:
        await server.start()
        if not server.keys:
            server.hosts = LOOPBACK | {f"[{address.host}]" if ":" in address.host else address.host}
        web = Web(configured(server), server, ready)
        with _reloads(server):
            await web.serve([listener])
    finally:
        listener.close()
        await server.stop()


def configured(server: Server) -> uvicorn.Config:
    """The settings of uvicorn: no log of its own, our timeouts, no trust in headers of proxies."""
    return uvicorn.Config(
        application(server),
        http=patient(server.limits),
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        ws_max_size=min(server.limits.body_bytes, server.limits.message_bytes),
        ws_max_queue=2,
        ws_per_message_deflate=False,
        ws_ping_interval=PING,
        ws_ping_timeout=PING,
    )


class Web(uvicorn.Server):
    """uvicorn, which waits for streams before it tells the application to stop. So the signal itself ends
    them.
    """

    def __init__(self, config: uvicorn.Config, server: Server, ready: Ready | None) -> None:
        super().__init__(config)
        self._server, self._ready = server, ready
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)
        if self._ending is not None:
            await self._ending
        if self.server_state.tasks:  # they were cancelled; what they log at their end belongs to the log
            await asyncio.wait(self.server_state.tasks, timeout=CUT)
        for connection in list(self.server_state.connections):  # with answers that nobody takes
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


def patient(limits: Limits) -> type[HttpToolsProtocol]:
    """A protocol class that ends connections whose client sends the head of a request too slowly, or the rest
    of one that was answered before all of it was there, or too many bytes that are no part of a body.

    uvicorn and httptools keep the head of a request whatever its size, and before any key is checked.
    """

    class Patient(HttpToolsProtocol):
        _cutting: asyncio.TimerHandle | None = None
        _whole = True  # whether the next byte begins a request
        _beside = 0  # bytes of a head, of the frame of a chunk or of trailers, since the last byte of a body

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            raw = transport.get_extra_info("socket")
            if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a dead client
            self._cut_after(limits.header_seconds)

        def data_received(self, data: bytes) -> None:
            self._cut_after(limits.header_seconds if self._whole else limits.body_seconds)
            # The parser is given parts, so that it never holds much more than was counted: parts up to the
            # limit, and then a little at a time.
            at = 0
            while at < len(data):
                part = data[at : at + max(LITTLE, min(PART, limits.header_bytes - self._beside))]
                at += len(part)
                self._beside += len(part)
                super().data_received(part)
                if self.transport.is_closing() or self.transport.get_protocol() is not self:
                    return  # it was refused, or is a WebSocket now
                if self._beside > limits.header_bytes:
                    return self._refuse(TOO_LARGE_HEAD)

        def send_400_response(self, msg: str) -> None:
            self._refuse(NOT_HTTP)

        def handle_websocket_upgrade(self) -> None:
            super().handle_websocket_upgrade()
            if not getattr(self.transport.get_protocol(), "handshake_initiated", True):
                # The library of WebSockets has refused the head, and uvicorn would leave the client waiting.
                self._refuse(TOO_LARGE_HANDSHAKE)

        def _refuse(self, refusal: RefusedError) -> None:
            """Answers in place of the application, unless that has begun to, and ends the connection."""
            if self.pipeline:  # an earlier request is still being answered, and its answer would be mixed up
                return self.transport.abort()
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
                if self.cycle.response_started:
                    return self.transport.abort()
            response = refusal.response()
            head = STATUS_LINE[refusal.status]
            lines = [b"%s: %s\r\n" % header for header in response.raw_headers]
            self.transport.write(b"".join([head, *lines, b"\r\n", bytes(response.body)]))
            self.transport.close()

        def on_message_begin(self) -> None:
            self._whole = False
            self._cut_after(limits.header_seconds)
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            self._beside = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._whole, self._beside = True, 0
            self._arrived()
            super().on_message_complete()

        def on_headers_complete(self) -> None:
            self._beside = 0
            self._arrived()
            super().on_headers_complete()
            self.scope["state"].update(abort=self._cut_of(self.cycle), write=self._write_of(self.cycle))

        def connection_lost(self, exc: Exception | None) -> None:
            self._arrived()
            super().connection_lost(exc)

        def _cut_of(self, cycle: RequestResponseCycle) -> Callable[[], None]:
            """Cuts the connection; uvicorn then does not expect the rest of the answer."""

            def cut() -> None:
                cycle.disconnected = True
                cycle.message_event.set()
                self.transport.abort()

            return cut

        def _write_of(self, cycle: RequestResponseCycle) -> Write:
            """Writes a chunk of an answer that has begun, as `cycle.send` does without its coroutine; returns
            False where the client does not take what was written before.
            """
            flow, write = self.flow, self.transport.write

            def written(data: bytes) -> bool:
                if flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
                    return False
                size = len(data)
                write((SIZES[size] if size < len(SIZES) else b"%x\r\n" % size) + data + b"\r\n")
                return True

            return written

        def _cut_after(self, seconds: float) -> None:
            """Cuts the connection in so many seconds, unless that is planned or an answer is not whole."""
            if self._cutting is None and (self.cycle is None or self.cycle.response_complete):
                self._cutting = self.loop.call_later(seconds, self.transport.abort)

        def _arrived(self) -> None:
            """What was waited for is there."""
            if self._cutting is not None:
                self._cutting.cancel()
                self._cutting = None

    return Patient


@contextlib.contextmanager
def _reloads(server: Server) -> Iterator[None]:
    """While the block runs, SIGHUP reads the keys and changed models again."""
    loop, running = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def start() -> None:
        task = loop.create_task(server.reload_changed())
        running.add(task)
        task.add_done_callback(running.discard)

    try:
        loop.add_signal_handler(signal.SIGHUP, start)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError):  # no main thread, or no POSIX
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


@contextlib.contextmanager
def _logs(server: Server) -> Iterator[None]:
    """While the block runs, faults of engines and what uvicorn logs go to the server's own log. uvicorn's
    warnings of broken requests are no fault of the server.
    """
    for name in ("uvicorn", "uvicorn.asgi"):
        logging.getLogger(name).propagate = False
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    handler, loggers = Handler(server.log), [logging.getLogger(name) for name in ("uvicorn", "xl_export")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def run(server: Server, address: Address, *, ready: Ready | None = None) -> None:
    """`serve` in an event loop of its own, uvloop where it is installed. It raises the limit of open files,
    and says in the log how many connections fit into it, and how many threads each model has.
    """
    server.limits, files = fitted(server.limits)
    sys.setswitchinterval(SWITCH)

    def began(port: int, web: Web) -> None:
        connections, sockets = server.limits.connections, server.limits.sockets
        server.log.event("limits", open_files=files, connections=connections, websockets=sockets)
        for model in server.models.values():
            server.log.event(
                "serves", model=model.name, identity=model.session.identity, threads=model.threads
            )
        if ready is not None:
            ready(port, web)

    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(server, address, ready=began))
        return
    if sys.version_info >= (3, 11):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(server, address, ready=began))
    else:
        uvloop.install()
        asyncio.run(serve(server, address, ready=began))
