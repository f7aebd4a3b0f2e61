"""One request on its way from its connection to its answer: every handler gets this object."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from xl_export.serve.http.base.connection import CONNECTION, Connection
from xl_export.serve.http.base.errors import RefusedError, has_plain_errors
from xl_export.serve.http.base.limits import Reads, decoded, refuse_compressed, too_large
from xl_export.serve.http.base.server import Server
from xl_export.serve.http.base.workers import off_loop

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
# Parts of a server-sent event.
EVENT = b"data: "
END = b"\n\n"
DONE = b"data: [DONE]\n\n"
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
Result = TypeVar("Result")


class RequestContext(Request):
    """Starlette's request, with what handlers need of the server, and the ways to answer."""

    def __init__(self, server: Server, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.server = server
        self.connection: Connection = scope["state"][CONNECTION]
        self.began = time.monotonic()
        """When the head arrived, by `time.monotonic`."""
        self.path: str = scope["path"]
        """The decoded path."""
        self.route = "other"
        """The path of the endpoint, with the names of its variables."""
        given = self.headers.get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        """The id of the request in the log and in the answer: the client's own if it is well-formed."""
        self.owner = ""
        """Name of the API key, which owns streams; empty without keys."""
        self.note: dict[str, Any] = {}
        """Fields that a handler adds to the request's line in the log."""
        self.size = 0
        """Number of bytes of the body that have arrived."""
        self.held = 0
        """Number of these bytes that count in `Server.bodies` until the request has ended."""
        self.status = 0
        """The status of the answer; 0 before it has begun."""
        self.streams_events = False
        """Whether the answer consists of server-sent events."""

    # The body.

    async def read(self, kind: type[Any], reads: Reads | None) -> Any:
        """The body as that type, from JSON or as `reads` makes it. Raises what `parts` raises, and
        RefusedError for a body that does not fit.
        """
        limits = self.server.limits
        body = bytearray()  # which grows in place: joining many parts would take the event loop milliseconds
        async for part in self.parts(limits.body_bytes, limits.body_seconds):
            self.server.bodies.take(len(part))
            self.held += len(part)
            body += part
        if reads is not None:
            return await self.off_loop(reads, body, self.headers, limits)
        return await self.off_loop(decoded, body, kind)

    async def parts(
        self, most: int, seconds: float, larger: Callable[[int], RefusedError] = too_large
    ) -> AsyncIterator[bytes]:
        """The parts of the body.

        Raises RefusedError for a compressed body, for one of more than `most` bytes as soon as that is known,
        and for one that has not arrived `seconds` after its head; ClientDisconnect if the client leaves.
        """
        refuse_compressed(self.headers)
        if int(self.headers.get("content-length", 0)) > most:
            raise larger(most)
        more = True
        while more:
            left = self.began + seconds - time.monotonic()
            try:
                message = await asyncio.wait_for(self.receive(), left)
            except asyncio.TimeoutError:
                raise RefusedError(
                    f"the body did not arrive within {seconds:g} seconds; send it faster.",
                    status=408,
                    code="timeout",
                    closes=True,
                ) from None
            # Before Python 3.12 `wait_for` loses a cancellation that comes together with the message.
            if message["type"] == "http.disconnect" or self.connection.lost:
                raise ClientDisconnect
            part: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            self.size += len(part)
            if self.size > most:
                raise larger(most)
            yield part

    async def off_loop(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What a function of the body returns; see `workers.off_loop`."""
        return await off_loop(self.size, function, *arguments)

    # The answer.

    async def send(self, message: Message) -> None:
        """Sends a message of ASGI; the first one also gets the id of the request."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self.id.encode())]}
        await self._send(message)

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the headers of an answer whose parts are sent by `events`, and the last one by `end`."""
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, data: bytes) -> None:
        """Sends encoded events, and the headers before the first of them."""
        if not self.status:
            self.streams_events = True
            await self.start(EVENTS)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = DONE) -> None:
        """Sends the last events."""
        await self._send({"type": "http.response.body", "body": data})

    async def refuse(self, refusal: RefusedError) -> None:
        """Sends a refusal: as the answer, or as the last event of one that has begun. Any other answer that
        has begun is cut off.
        """
        if not self.status:
            await refusal.response(plain=has_plain_errors(self.path))(self.scope, self.receive, self.send)
        elif self.streams_events:
            await self.end(event(refusal.document()) + DONE)
        else:
            await self.cut()

    async def cut(self) -> None:
        """Disconnects the client, and waits until uvicorn knows: it would answer in our place otherwise."""
        self.connection.cut()
        while (await self.receive())["type"] != "http.disconnect":
            pass


def event(document: Any) -> bytes:
    """A document as a server-sent event."""
    return EVENT + msgspec.json.encode(document) + END


def json(document: Any, status: int = 200) -> Response:
    """A document as a whole answer."""
    return of_json(msgspec.json.encode(document), status)


def of_json(document: bytes, status: int = 200) -> Response:
    """An encoded document as a whole answer."""
    return Response(document, status, media_type="application/json")
