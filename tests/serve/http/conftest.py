"""A server in this process, on a free port, for the tests of this folder."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtimes.sessions.open import open_session
from xl_export.serve.core.settings import EngineSettings, Limits
from xl_export.serve.http.base.keys import Keys
from xl_export.serve.http.base.server import Log, Server, Source
from xl_export.serve.http.serving import Address, serve

# A connection for each request. `httpx.post` would also read the certificates of the machine each time.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
HTTP = httpx.Client(verify=False, trust_env=False, timeout=60, limits=LIMITS)


@dataclass(kw_only=True)
class Running:
    """A server that answers. at: its address. log: what it has written."""

    server: Server
    port: int
    log: io.StringIO = field(repr=False)
    loop: asyncio.AbstractEventLoop = field(repr=False)
    stop: Callable[[], None] = field(repr=False)
    """What a SIGTERM does."""

    @property
    def at(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        """The answer to a JSON body, or to bytes as they are."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return HTTP.post(self.at + path, **content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return HTTP.get(self.at + path, **options)

    @cached_property
    def client(self) -> httpx.Client:
        """A client that keeps its connection."""
        return httpx.Client(verify=False, trust_env=False, timeout=60)

    def skip(self, seconds: float) -> None:
        """Sets the clock of the event loop forward: limits of time do not depend on how busy a machine is."""
        skipped, time = threading.Event(), self.loop.time

        def set_clock() -> None:
            self.loop.time = lambda: time() + seconds  # type: ignore[method-assign]
            skipped.set()

        self.loop.call_soon_threadsafe(set_clock)
        assert skipped.wait(60)

    def end(self) -> None:
        """What a SIGTERM does; nothing where the server has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.stop)


@dataclass(frozen=True, kw_only=True)
class Here(Address):
    """A free port of this machine."""

    port: int = 0
    send_buffer: int | None = None
    """Bytes that the kernel takes from the server before it shows that a client reads nothing; by default
    megabytes.
    """

    def bind(self) -> socket.socket:
        listener = super().bind()
        if self.send_buffer is not None:  # connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)
        return listener


@contextmanager
def running(
    sources: list[Source],
    *,
    limits: Limits | None = None,
    keys: Keys | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[Running]:
    """While the block runs, the server answers. send_buffer: of `Here`. options: of `Server`."""
    log, began, found = io.StringIO(), threading.Event(), []

    async def run() -> None:
        server = Server(sources, limits=limits, keys=keys, log=Log(log), **options)

        def ready(port: int, end: Callable[[], None]) -> None:
            loop = asyncio.get_running_loop()
            found.append(Running(server=server, port=port, log=log, loop=loop, stop=end))
            began.set()

        try:
            await serve(server, Here(send_buffer=send_buffer), ready=ready)
        finally:
            began.set()

    failed: list[BaseException] = []

    def catch() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    assert began.wait(60)
    try:
        if found:
            yield found[0]
            found[0].client.close()
    finally:
        if found:
            found[0].end()
        thread.join(60)
        assert not thread.is_alive()
        if failed:
            raise failed[0]


def sources(*named: tuple[str, Path], cache_bytes: int = 1 << 20, **settings: int) -> list[Source]:
    """The sources of models, with settings of their engines."""
    engine = EngineSettings(**{"rows": 4, "cache_bytes": cache_bytes, **settings})
    return [Source(name=name, path=path, settings=engine, threads=1) for name, path in named]


@pytest.fixture(scope="session")
def served(artefacts: dict[str, Path]) -> Iterator[Running]:
    """A server of one model of characters, `tiny`, with small limits, for all tests that change nothing."""
    limits = Limits(body_bytes=1 << 16, prompt_tokens=2000, max_tokens=64, choices=16, texts=50)
    with running(sources(("tiny", artefacts["ring"])), limits=limits) as server:
        yield server


@pytest.fixture(scope="session")
def session(artefacts: dict[str, Path]):
    """The same model, opened by the tests."""
    return open_session(artefacts["ring"], threads=1, device="cpu")


@pytest.fixture(scope="session")
def openai(served: Running):
    """OpenAI's own client."""
    import openai

    http = httpx.Client(verify=False, trust_env=False)
    address = f"{served.at}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0, http_client=http) as client:
        yield client
