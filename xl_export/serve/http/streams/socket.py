"""One stream over one WebSocket: messages of JSON, one operation after the other.

A message is an object with `op` (a key of `OPERATIONS`), the fields of that operation, and `tag`, a short
text or an integer, which comes back with each answer. Answers have `event`: `chunk` while a stream goes on,
`end` with the result, or `error`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from runtimes.base.errors import UserError
from xl_export.serve.http.base.errors import RefusedError, refusal_of
from xl_export.serve.http.base.exchange import Exchange
from xl_export.serve.http.base.limits import BodyAccount, Limits, misfit, refuse_many_values
from xl_export.serve.http.base.workers import Steps, aside
from xl_export.serve.http.streams.documents import (
    AppendBody,
    ContinueBody,
    NoBody,
    RewindBody,
    StepBody,
    stream_document,
)
from xl_export.serve.http.streams.work import Each, StreamWork, encoded, found

WAITING = 8  # messages that wait for the operation before them; more are refused
LONGEST_TAG = 128  # characters
Tag = str | int | None
Do = Callable[[StreamWork, str, Any, Each], Coroutine[Any, Any, dict[str, Any]]]
# The body of each operation, and what it does with the stream of a name; None for what the conversation
# itself answers.
OPERATIONS: dict[str, tuple[type[msgspec.Struct], Do | None]] = {
    "append": (AppendBody, lambda work, name, body, each: work.append(name, body)),
    "continue": (ContinueBody, lambda work, name, body, each: work.continue_(name, body, each)),
    "step": (StepBody, lambda work, name, body, each: work.step(name, body.inputs, body.position)),
    "rewind": (RewindBody, lambda work, name, body, each: work.rewind(name, body.tokens)),
    "fork": (NoBody, lambda work, name, body, each: work.fork(name)),
    "delete": (NoBody, lambda work, name, body, each: work.delete(name)),
    "facts": (NoBody, None),
    "cancel": (NoBody, None),
}
POLICY = 1008  # the code with which a connection is closed whose client is too slow, or has no key any more
TOO_MANY = RefusedError(
    f"{WAITING} messages wait already; send the next one when one of them is answered.",
    status=429,
    code="too_many_messages",
)
NO_KEY = RefusedError(
    "the API key of this connection is not valid any more; open another connection with a valid key.",
    status=401,
    code="invalid_api_key",
)


async def conversation(exchange: Exchange) -> None:
    """Serves one connection until its client leaves, does not read for too long, or loses its key."""
    name = exchange.params["id"]
    found(exchange.server, name, exchange.tenant.name)
    socket = WebSocket(exchange.scope, exchange.receive, exchange.send)
    offered = [each for each in exchange.scope.get("subprotocols", ()) if each == "xl-export"]
    await socket.accept(offered[0] if offered else None)
    await Conversation(exchange, socket, name).run()


class Conversation:
    """The messages of one connection. A connection that does nothing holds no row, and no model."""

    def __init__(self, exchange: Exchange, socket: WebSocket, name: str) -> None:
        self._exchange = exchange
        self._server = exchange.server
        self._socket = socket
        self._name = name
        self._tenant = exchange.tenant.name
        self._messages: asyncio.Queue[tuple[Tag, str, Any, int]] = asyncio.Queue(WAITING)
        self._account = BodyAccount(self._server.bodies, self._tenant)  # of messages that are not answered
        self._work: StreamWork | None = None
        self._cancel_next = False  # a `cancel` came before the operation that it means had begun

    async def run(self) -> None:
        """Reads messages and answers them, until either has ended."""
        reading = asyncio.ensure_future(self._read())
        answering = asyncio.ensure_future(self._answer())
        try:
            await asyncio.wait((reading, answering), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, answering):
                task.cancel()
            results = await asyncio.gather(reading, answering, return_exceptions=True)
            self._account.close()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect | RuntimeError):
                raise result

    async def _read(self) -> None:
        """Puts messages into the queue, but for `cancel`, which is obeyed at once."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("text")
            data = message["bytes"] if data is None else data
            limits = self._server.limits
            tag, op, body = await aside(len(data), self._tenant, parsed, data, limits)
            if op == "cancel":
                if self._work is not None:
                    self._work.leave()
                else:
                    self._cancel_next = not self._messages.empty()
            elif isinstance(body, RefusedError):
                await self._send(tag, "error", refused(body))
            elif self._messages.full():  # waiting here would leave a `cancel` unread
                await self._send(tag, "error", refused(TOO_MANY))
            else:
                try:
                    self._account.change(len(data))
                except RefusedError as refusal:
                    await self._send(tag, "error", refused(refusal))
                else:
                    self._messages.put_nowait((tag, op, body, len(data)))

    async def _answer(self) -> None:
        """Does what the messages ask for, one after the other, while the key is valid."""
        while True:
            tag, op, body, size = await self._messages.get()
            if not self._exchange.has_valid_key():
                await self._send(tag, "error", refused(NO_KEY))
                return await self._close()
            cancelled = self._cancel_next and op != "facts"
            self._cancel_next = self._cancel_next and not cancelled
            try:
                document = await self._do(tag, op, body, cancelled)
            except (RefusedError, UserError) as error:
                await self._send(tag, "error", refused(refusal_of(error)))
            else:
                await self._send(tag, "end", document)
            self._account.change(-size)
            if self._messages.empty():
                self._cancel_next = False

    async def _do(self, tag: Tag, op: str, body: Any, cancelled: bool) -> dict[str, Any]:
        """Does an operation. cancelled: whether a `cancel` for it has come already."""
        model = found(self._server, self._name, self._tenant)  # the one that is served now
        do = OPERATIONS[op][1]
        if do is None:
            return stream_document(model.store.find(self._name, self._tenant), model.name)

        async def each(document: dict[str, Any]) -> None:
            await self._send(tag, "chunk", document)

        with self._server.requests.one(self._tenant):
            if op != "delete":
                self._server.refuse_when_full(self._tenant)
            if op == "continue":  # its tokens are sent as they are drawn
                body.stream = True
            work = self._work = StreamWork(model, self._tenant, self._server.limits)
            if cancelled:
                work.leave()
            try:
                return await work.lasting(do(work, self._name, body, each))
            finally:
                self._work = None

    async def _send(self, tag: Tag, event: str, document: dict[str, Any]) -> None:
        """Sends one answer; waits while the client does not read, and then closes the connection."""
        text = (await encoded({"tag": tag, "event": event, **document}, self._tenant)).decode()
        try:
            await asyncio.wait_for(self._socket.send_text(text), self._server.limits.stalled_seconds)
        except asyncio.TimeoutError:
            await self._close()
            raise WebSocketDisconnect(POLICY) from None

    async def _close(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError, RuntimeError):
            await asyncio.wait_for(self._socket.close(POLICY), 1)


def parsed(data: str | bytes, limits: Limits) -> Steps[tuple[Tag, str, Any]]:
    """The tag, the operation and the body of a message; for one that is wrong the body is its refusal."""
    tag: Tag = None
    expected = None
    try:
        yield from refuse_many_values(data, limits)
        fields = msgspec.json.decode(data)
        if not isinstance(fields, dict):
            raise RefusedError('a message is no JSON object; send {"op": …}.')
        given = fields.pop("tag", None)
        op = fields.pop("op", None)
        is_text = isinstance(given, str) and len(given) <= LONGEST_TAG
        is_number = type(given) is int and -1 << 63 <= given < 1 << 64
        if not (given is None or is_text or is_number):
            raise RefusedError(
                f"tag is {given!r:.40}; expected an integer, or a text of at most {LONGEST_TAG} characters.",
                param="tag",
            )
        tag = given
        if not isinstance(op, str) or op not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise RefusedError(f"op is {op!r:.40}; expected one of {known}.", param="op")
        expected = OPERATIONS[op][0]
        return tag, op, msgspec.convert(fields, expected)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        return tag, "", misfit(error, expected, data)
    except RefusedError as error:
        return tag, "", error


def refused(refusal: RefusedError) -> dict[str, Any]:
    """A refusal as a part of an answer."""
    document = refusal.document()
    if refusal.retry_after is not None:
        document["retry_after"] = refusal.retry_after
    return document
