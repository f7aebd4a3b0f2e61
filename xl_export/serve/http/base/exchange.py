"""One request on its way from its connection to its answer: every handler gets this object."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from xl_export.serve.http.base.connection import CONNECTION, Wire
from xl_export.serve.http.base.errors import ClientLeftError, RefusedError, has_plain_errors
from xl_export.serve.http.base.keys import given_key, hashed
from xl_export.serve.http.base.limits import BodyAccount, Reads, decoded, refuse_compressed, too_large
from xl_export.serve.http.base.server import Server
from xl_export.serve.http.base.workers import off_loop

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
# Of one server-sent event.
EVENT = b"data: "
END = b"\n\n"
DONE = b"data: [DONE]\n\n"
LOOKS = 4  # how often a client is looked at until it counts as stalled
SLOWEST = 256  # bytes per second; a client that accepts less while the server waits for it counts as stalled
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
Result = TypeVar("Result")


class Exchange:
    """One request and its answer."""

    def __init__(self, server: Server, scope: Scope, receive: Receive, send: Send) -> None:
        self.server = server
        self.scope = scope
        self.receive = receive
        self._send = send
        #: When its head arrived, by `time.monotonic`.
        self.began = time.monotonic()
        self.method: str = scope["method"]
        #: Decoded.
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = self.headers.get("x-request-id", "")
        #: The id of the request in the log and in the answer: the client's own if it is well-formed.
        self.id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        #: Name of the API key, which owns streams; empty without keys.
        self.owner = ""
        #: The variables of the path, by name.
        self.params: dict[str, str] = {}
        #: What a handler adds to the request's line in the log.
        self.note: dict[str, Any] = {}
        #: Closed when the request has ended.
        self.stack = contextlib.ExitStack()
        #: The bytes of the body that have arrived.
        self.size = 0
        #: Whether more of it may come.
        self.more_body = True
        #: The status of the answer; 0 before it has begun.
        self.status = 0
        #: Whether the answer consists of server-sent events.
        self.streams_events = False
        #: Whether the server waits for the client to accept the last part.
        self.sending = False
        #: Bytes of parts that the client has accepted.
        self.taken = 0
        #: The connection.
        self.wire: Wire = scope["extensions"][CONNECTION]

    # What was asked for.

    @property
    def query(self) -> dict[str, str]:
        """The query parameters."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def refuse_parameters(self, known: tuple[str, ...]) -> None:
        """Raises RefusedError for a query parameter that is not known: what it asks for would not be done."""
        if not self.scope["query_string"]:
            return
        for name in self.query:
            if name not in known:
                expected = ", ".join([*known, "or none"]) if known else "none, since fields go into the body"
                raise RefusedError(
                    f"the query parameter {name!r:.60} is not known here; expected {expected}.",
                    param=name[:60],
                )

    def key_owner(self) -> str | None:
        """The name of the request's key, empty if the server has no keys; None without a valid key."""
        keys = self.server.keys
        return keys.get(hashed(given_key(self.headers))) if keys else ""

    # The body.

    async def read(self, kind: type[Any], reads: Reads | None) -> Any:
        """The body as that type, from JSON or as `reads` makes it. Raises RefusedError for a body that is too
        large, does not arrive in time or does not fit, and if others have sent too much.
        """
        limits = self.server.limits
        account = BodyAccount(self.server.bodies)
        self.stack.callback(account.close)
        body = bytearray()  # which grows in place: joining many parts would take the event loop milliseconds
        while self.more_body:
            body += await self.part(limits.body_bytes, limits.body_seconds)
            account.change(self.size - account.held)
        if reads is not None:
            return await self.off_loop(reads, body, self.headers, limits)
        return await self.off_loop(decoded, body, kind)

    async def part(
        self, most: int, seconds: float, larger: Callable[[int], RefusedError] = too_large
    ) -> bytes:
        """The next part of the body, while there is `more_body`.

        Raises RefusedError for a compressed body, and for one that has not arrived `seconds` after its head;
        ClientLeftError if the client leaves. larger: makes the refusal of a body of more than `most` bytes,
        which is raised as soon as that is known.
        """
        # Before any of it is read.
        refuse_compressed(self.headers)
        if int(self.headers.get("content-length", 0)) > most:
            raise larger(most)
        try:
            left = self.began + seconds - time.monotonic()
            message = await asyncio.wait_for(self.receive(), left)
        except asyncio.TimeoutError:
            raise RefusedError(
                f"the body did not arrive within {seconds:g} seconds; send it faster.",
                status=408,
                code="timeout",
                closes=True,
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part: bytes = message.get("body", b"")
        self.more_body = message.get("more_body", False)
        self.size += len(part)
        if self.size > most:
            raise larger(most)
        return part

    async def off_loop(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What a function of the body returns; see `workers.off_loop`."""
        return await off_loop(self.size, function, *arguments)

    # The answer.

    async def send(self, message: Message) -> None:
        """Sends a message of ASGI; the first one also gets the id of the request."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self.id.encode())]}
        self.sending = True
        await self._send(message)
        self.sending = False
        self.taken += len(message.get("body", b""))

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the headers of an answer whose parts are sent by `events`, and the last one by `end`."""
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, data: bytes) -> None:
        """Sends encoded events, and the headers before the first of them."""
        if not self.status:
            self.streams_events = True
            await self.start(EVENTS)
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = DONE) -> None:
        """Sends the last events."""
        await self.send({"type": "http.response.body", "body": data})

    async def refuse(self, refusal: RefusedError) -> None:
        """Sends a refusal: as the answer, or as the last event of one that has begun. Any other answer that
        has begun is cut off.
        """
        if not self.status:
            await refusal.response(plain=has_plain_errors(self.path))(self.scope, self.receive, self.send)
        elif self.streams_events:
            await self.end(event(refusal.document()) + DONE)
        else:
            self.cut()

    def cut(self) -> None:
        """Cuts the connection."""
        self.wire.cut()

    @contextlib.contextmanager
    def while_connected(self) -> Iterator[None]:
        """Cancels the block, which sends the answer, and raises ClientLeftError when the client leaves, or
        stalls: when it accepted less than `SLOWEST` bytes a second of what was sent for
        `Limits.stalled_seconds`.
        """
        loop = asyncio.get_running_loop()
        stalled = self.server.limits.stalled_seconds
        timer: asyncio.TimerHandle

        def watch(looks: tuple[int, ...]) -> None:
            nonlocal timer
            # What the client had accepted at each look since which the server has waited for it.
            looks = (*looks, self.taken) if self.sending else ()
            if len(looks) > LOOKS:
                if looks[-1] - looks[0] < SLOWEST * stalled:
                    self.cut()
                looks = looks[1:]
            timer = loop.call_later(stalled / LOOKS, watch, looks)

        timer = loop.call_later(stalled / LOOKS, watch, ())
        try:
            with self.wire.cancelled_when_lost():
                yield
        finally:
            timer.cancel()


def event(document: Any) -> bytes:
    """A document as a server-sent event."""
    return EVENT + msgspec.json.encode(document) + END


def json(document: Any, status: int = 200) -> Response:
    """A document as a whole answer."""
    return of_json(msgspec.json.encode(document), status)


def of_json(document: bytes, status: int = 200) -> Response:
    """An encoded document as a whole answer."""
    return Response(document, status, media_type="application/json")
