"""`/v1/streams`: create, append, continue, fork, rewind, snapshot, restore, list, delete."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from xl_export.serve.http.base.answering import END, EVENT, Answering, Channel, json, of_json
from xl_export.serve.http.base.body import read_json
from xl_export.serve.http.base.description import WITH_BODY, Operation
from xl_export.serve.http.base.encoding import json_steps
from xl_export.serve.http.base.errors import ClientLeftError, RefusedError
from xl_export.serve.http.base.models import Model
from xl_export.serve.http.base.server import Server, asked_model, tenant_of
from xl_export.serve.http.base.stores import answered, on_disk, others_of, store_of
from xl_export.serve.http.base.workers import SHORT_WORK, Steps
from xl_export.serve.http.streams.bodies import AppendBody, ContinueBody, CreateBody, NoBody, RewindBody
from xl_export.serve.http.streams.documents import (
    AppendResult,
    ContinueChunk,
    ContinueResult,
    DeletedStream,
    StreamDocument,
    StreamList,
    deleted_document,
    facts_document,
)
from xl_export.serve.http.streams.socket import conversation
from xl_export.serve.http.streams.work import OtherArtefactError, StreamWork, encoded, found
from xl_export.serve.streams.snapshot import most_snapshot_bytes, too_large
from xl_export.serve.streams.store import StreamStore
from xl_export.serve.streams.unserved import Holds

CREATE, APPEND = msgspec.json.Decoder(CreateBody), msgspec.json.Decoder(AppendBody)
CONTINUE, REWIND = msgspec.json.Decoder(ContinueBody), msgspec.json.Decoder(RewindBody)
NOTHING = msgspec.json.Decoder(NoBody | None)
BLOCK = 1 << 20  # bytes of a snapshot that are read or written at once
ONE = "/v1/streams/{id}"
WRITES = (404, 409, 410, 503, 507)  # what operations that change a stream may be refused with
OPERATIONS = [
    Operation(
        method="POST",
        path="/v1/streams",
        summary="A new stream.",
        body=CreateBody,
        answer=AppendResult,
        status=201,
        tells=("id", "/stream/id"),
        refused=WRITES,
    ),
    Operation(
        method="GET",
        path="/v1/streams",
        summary="The streams of the client.",
        query=("model",),
        answer=StreamList,
        refused=(404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/streams/restore",
        summary="A new stream from a snapshot.",
        query=("model",),
        file=True,
        answer=StreamDocument,
        status=201,
        tells=("id", "/id"),
        refused=WRITES,
    ),
    Operation(
        method="GET",
        path=ONE,
        summary="A stream as it is now.",
        answer=StreamDocument,
        refused=(404, 410, 503),
    ),
    Operation(
        method="DELETE",
        path=ONE,
        summary="Deletes a stream.",
        answer=DeletedStream,
        refused=WRITES,
    ),
    Operation(
        method="POST",
        path=f"{ONE}/append",
        summary="Appends to a stream and tells the surprisal of each token.",
        body=AppendBody,
        answer=AppendResult,
        refused=WRITES,
    ),
    Operation(
        method="POST",
        path=f"{ONE}/continue",
        summary="Continues a stream.",
        body=ContinueBody,
        answer=ContinueResult,
        event=ContinueChunk,
        last_event=ContinueResult,
        refused=WRITES,
    ),
    Operation(
        method="POST",
        path=f"{ONE}/rewind",
        summary="Takes back the last tokens.",
        body=RewindBody,
        answer=StreamDocument,
        refused=WRITES,
    ),
    Operation(
        method="POST",
        path=f"{ONE}/fork",
        summary="A second stream in the same state.",
        answer=StreamDocument,
        status=201,
        tells=("id", "/id"),
        refused=(*WRITES, *WITH_BODY),  # a body is read, and refused where it asks for something
    ),
    Operation(
        method="GET",
        path=f"{ONE}/snapshot",
        summary="The stream as a signed file.",
        content="application/octet-stream",
        refused=WRITES,
    ),
]


def routes(server: Server) -> list[BaseRoute]:
    """The routes of streams."""
    there = _Routes(server)
    return [
        Route("/v1/streams", there.create, methods=["POST"]),
        Route("/v1/streams", there.list, methods=["GET"]),
        Route("/v1/streams/restore", there.restore, methods=["POST"]),
        Route(ONE, there.facts, methods=["GET"]),
        Route(ONE, there.delete, methods=["DELETE"]),
        Route(f"{ONE}/append", there.append, methods=["POST"]),
        Route(f"{ONE}/continue", there.continue_, methods=["POST"]),
        Route(f"{ONE}/rewind", there.rewind, methods=["POST"]),
        Route(f"{ONE}/fork", there.fork, methods=["POST"]),
        Route(f"{ONE}/snapshot", there.snapshot, methods=["GET"]),
        WebSocketRoute(f"{ONE}/ws", lambda socket: conversation(server, socket)),
    ]


class _Routes:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def create(self, request: Request) -> Response:
        self._server.refuse_when_full(request)
        body = await read_json(request, self._server, CREATE)
        work = self._work(request, self._server.hold(request, self._server.model(body.model)))
        return self._answer(work, lambda: work.create(body), status=201)

    async def append(self, request: Request) -> Response:
        self._server.refuse_when_full(request)
        body = await read_json(request, self._server, APPEND)
        work, name = self._found(request)
        return self._answer(work, lambda: work.append(name, body))

    async def continue_(self, request: Request) -> Response:
        self._server.refuse_when_full(request)
        body = await read_json(request, self._server, CONTINUE)
        work, name = self._found(request)
        if not body.stream:
            return self._answer(work, lambda: work.continue_(name, body))

        async def run(channel: Channel) -> None:
            async def each(document: dict[str, Any]) -> None:
                await channel.events(EVENT + await encoded(document, work.tenant) + END)

            end = await work.lasting(work.continue_(name, body, each))
            await channel.events(EVENT + await encoded(end, work.tenant) + END)
            await channel.end()

        return Answering(run, stalled=self._server.limits.stalled_seconds)

    async def rewind(self, request: Request) -> Response:
        body = await read_json(request, self._server, REWIND)
        work, name = self._found(request)
        return self._answer(work, lambda: work.rewind(name, body.tokens))

    async def fork(self, request: Request) -> Response:
        await _no_body(request, self._server)
        work, name = self._found(request)
        return self._answer(work, lambda: work.fork(name), status=201)

    async def list(self, request: Request) -> Response:
        """The streams of the client; of one model, where `model` is given, and otherwise also those of
        artefacts that are not served.
        """
        tenant, wanted = tenant_of(request).name, asked_model(request)
        models = [self._server.model(wanted)] if wanted else list(self._server.models.values())
        stores: dict[StreamStore, str] = {}  # models of one artefact share one
        for model in models:
            stores.setdefault(store_of(model), model.name)
        others = [] if wanted else others_of(self._server.models.values())

        def listed() -> Steps[bytes]:
            found = []
            for store, name in stores.items():
                found += [facts_document(facts, name) for facts in store.list(tenant)]
                yield
            for holds in others:
                found += [facts_document(facts, artefact=holds.identity) for facts in holds.list(tenant)]
                yield
            return (yield from json_steps({"object": "list", "data": found}))

        return of_json(await SHORT_WORK.run(tenant, listed))  # there may be ten thousand

    async def facts(self, request: Request) -> Response:
        name, tenant = request.path_params["id"], tenant_of(request).name
        with answered():
            try:
                model, name = found(self._server, name, tenant)
            except OtherArtefactError as other:
                holds = other.holds
                return json(facts_document(holds.facts(name, tenant), artefact=holds.identity))
            return json(facts_document(store_of(model).facts(name, tenant), model.name))

    async def delete(self, request: Request) -> Response:
        name, tenant = request.path_params["id"], tenant_of(request).name
        holds: Holds
        with contextlib.ExitStack() as held, answered():
            try:
                model, name = found(self._server, name, tenant)
                held.enter_context(model.in_use())
                holds = store_of(model)
            except OtherArtefactError as other:
                holds = other.holds
            await on_disk(tenant, holds.delete, name, tenant)
        return json(deleted_document(name))

    async def snapshot(self, request: Request) -> Response:
        """The stream as a signed file."""
        name, opened = self._opened(request)
        tenant = tenant_of(request).name

        async def run(channel: Channel) -> None:
            file: BinaryIO = await opened()
            with file:
                headers = {
                    "content-type": "application/octet-stream",
                    "content-length": str(os.fstat(file.fileno()).st_size),
                    "content-disposition": f'attachment; filename="{name}.stream"',
                    "cache-control": "no-store",
                }
                await channel.start([(key.encode(), value.encode()) for key, value in headers.items()])
                while block := await on_disk(tenant, file.read, BLOCK):
                    await channel.events(block)
            await channel.end(b"")

        return Answering(run, stalled=self._server.limits.stalled_seconds)

    def _opened(self, request: Request) -> tuple[str, Callable[[], Awaitable[BinaryIO]]]:
        """The name of a stream, and what opens the file of its snapshot."""
        name, tenant = request.path_params["id"], tenant_of(request).name
        try:
            work, name = self._found(request)
        except OtherArtefactError as other:
            holds = other.holds

            async def opened() -> BinaryIO:
                with answered():
                    return await on_disk(tenant, holds.open_snapshot, name, tenant)

            return name, opened
        return name, lambda: work.lasting(work.snapshot(name))

    async def restore(self, request: Request) -> Response:
        """A new stream from a signed file."""
        model, tenant = self._server.model(asked_model(request)), tenant_of(request).name
        store = store_of(model)
        most = most_snapshot_bytes(model.session)
        # A refusal of one stream too many comes before the body, and ends the connection.
        with model.in_use(), answered(closes=True), store.receiving(tenant) as upload, answered():
            await _received(request, upload.path, most, self._server.limits.body_seconds)
            facts = await on_disk(tenant, upload.restore)
        return json(facts_document(facts, model.name), 201)

    def _work(self, request: Request, model: Model) -> StreamWork:
        return StreamWork(model, tenant_of(request).name, self._server.limits)

    def _found(self, request: Request) -> tuple[StreamWork, str]:
        """The work on the stream that the path names."""
        model, name = found(self._server, request.path_params["id"], tenant_of(request).name)
        return self._work(request, self._server.hold(request, model)), name

    def _answer(self, work: StreamWork, do: Callable[[], Any], *, status: int = 200) -> Response:
        async def run(channel: Channel) -> None:
            await channel.document(await encoded(await work.lasting(do()), work.tenant), status)

        return Answering(run, stalled=self._server.limits.stalled_seconds)


async def _no_body(request: Request, server: Server) -> None:
    """Raises RefusedError for a body that asks for something."""
    if request.headers.get("content-length", "0") != "0":
        await read_json(request, server, NOTHING)


async def _received(request: Request, path: Path, most: int, seconds: float) -> None:
    """Writes the body to a file; raises RefusedError for more than `most` bytes as soon as that is known."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:  # nothing of it is read
        raise _too_large(int(declared), most)

    async def receive() -> None:
        size = 0
        with open(path, "xb") as file:
            tenant = tenant_of(request).name
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(size, most)
                await on_disk(tenant, file.write, part)

    try:
        await asyncio.wait_for(receive(), seconds * (1 + (most >> 26)))
    except asyncio.TimeoutError:
        raise RefusedError(
            "the snapshot did not arrive in time; send it faster.", status=408, code="timeout", closes=True
        ) from None
    except ClientDisconnect:
        raise ClientLeftError from None
    except OSError as error:
        raise RefusedError(
            f"the server could not write the snapshot ({error.strerror}); ask its operator for space.",
            status=507,
            code="disk_full",
            closes=True,
        ) from error


def _too_large(size: int, most: int) -> RefusedError:
    message = too_large("the snapshot", size, most)
    return RefusedError(message, status=413, code="body_too_large", closes=True)
