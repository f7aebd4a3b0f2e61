"""An answer that ends as soon as its client has left, and that waits for a slow client alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtimes.base.errors import UserError
from xl_export.serve.http.base.errors import ClientLeftError, RefusedError

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
LOOKS = 4  # how often a client is looked at until it counts as stalled
SLOWEST = 256  # bytes per second; a client that takes less while the server waits for it counts as stalled
Write = Callable[[bytes], bool]
EVENT, END = b"data: ", b"\n\n"  # of one server-sent event
DONE = b"data: [DONE]\n\n"


class Channel:
    """The way to one client: a whole document, or server-sent events as they come.

    begin: sends the first message. send: sends the others, as the web server's own `send` does, because each
    layer around it costs time for every token. sending: whether the client has not taken the last message
    yet. taken: bytes that it has taken in such messages. write: writes encoded events at once, and returns
    False where they would have to wait.
    """

    def __init__(self, begin: Send, send: Send, write: Write | None = None) -> None:
        self._begin, self._send = begin, send
        self.write = write or _never
        self.started = self.sending = False
        self.taken = 0

    async def document(self, body: bytes, status: int = 200) -> None:
        """Sends one JSON document, which is encoded already and is the whole answer."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._start({"type": "http.response.start", "status": status, "headers": headers})
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the headers of an answer whose parts are sent by `events`, and the last one by `end`."""
        await self._start({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, data: bytes) -> None:
        """Sends encoded events, and the headers before the first of them."""
        if not self.started:
            await self._start({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = DONE) -> None:
        """Sends the last events."""
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self, message: Message) -> None:
        self.started = self.sending = True
        await self._begin(message)
        self.sending = False

    async def _put(self, message: Message) -> None:
        self.sending = True
        await self._send(message)
        self.sending = False
        self.taken += len(message["body"])


def _never(data: bytes) -> bool:
    return False


def event(document: Any) -> bytes:
    """A document as a server-sent event."""
    return EVENT + msgspec.json.encode(document) + END


def json(document: Any, status: int = 200) -> Response:
    """A document as a whole answer that nobody has to wait for."""
    return of_json(msgspec.json.encode(document), status)


def of_json(document: bytes, status: int = 200) -> Response:
    """A document that is encoded already, as a whole answer."""
    return Response(document, status, media_type="application/json")


class Answering(Response):
    """A response that does its work while it listens for the client's leaving.

    work: gets the channel. A RefusedError that it raises before anything was sent becomes the answer; a
    later one becomes the last event. stalled: after so many seconds in which the server waits for a client
    that takes less than `SLOWEST` bytes in each, the connection is cut.
    """

    def __init__(self, work: Callable[[Channel], Coroutine[Any, Any, None]], *, stalled: float) -> None:
        self._work, self._stalled = work, stalled
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        # The guard's own notes the status and is needed once; that of the web server is enough after it.
        channel = Channel(state.get("begin", send), state.get("send", send), state.get("write"))
        cut = state.get("abort")
        try:
            await _until_gone(self._work(channel), channel, receive, self._stalled, cut)
        except (RefusedError, UserError) as error:
            refusal = error if isinstance(error, RefusedError) else RefusedError(str(error))
            if not channel.started:
                await refusal.response()(scope, receive, send)
                return
            await channel.end(b"data: " + refusal.body() + b"\n\n" + DONE)
        except ClientLeftError:
            state["left"] = True


async def _until_gone(
    work: Coroutine[Any, Any, None],
    channel: Channel,
    receive: Receive,
    stalled: float,
    cut: Callable[[], None] | None,
) -> None:
    """Runs the work to its end; cancels it and raises ClientLeftError when the client leaves or stalls."""
    loop = asyncio.get_running_loop()
    working, leaving = loop.create_task(work), loop.create_task(_gone(receive))
    timer: asyncio.TimerHandle

    def watch(looks: tuple[int, ...]) -> None:
        nonlocal timer
        # What the client had taken at each look since which the server has waited for it.
        looks = (*looks, channel.taken) if channel.sending else ()
        if len(looks) > LOOKS:
            if looks[-1] - looks[0] < SLOWEST * stalled:
                leaving.cancel()
                if cut is not None:
                    cut()
            looks = looks[1:]
        timer = loop.call_later(stalled / LOOKS, watch, looks)

    timer = loop.call_later(stalled / LOOKS, watch, ())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        working.result()
    finally:
        timer.cancel()
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
