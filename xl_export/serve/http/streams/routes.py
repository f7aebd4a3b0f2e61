"""`/v1/streams`: create, append, continue, step, cancel, fork, rewind, snapshot, restore, list, delete."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from functools import partial
from typing import Any, BinaryIO

import msgspec
from starlette.responses import Response

from runtimes.base.errors import UserError
from xl_export.serve.http.base.context import END, EVENT, RequestContext, json, of_json
from xl_export.serve.http.base.encoding import to_json
from xl_export.serve.http.base.endpoint import Endpoints
from xl_export.serve.http.base.errors import RefusedError, refusal_of
from xl_export.serve.http.base.limits import too_large
from xl_export.serve.http.base.server import Model
from xl_export.serve.http.base.workers import INLINE_BYTES, background, off_loop
from xl_export.serve.http.streams.documents import (
    SAFETENSORS,
    AppendBody,
    AppendResult,
    CancelledStream,
    ContinueBody,
    ContinueChunk,
    ContinueResult,
    CreateBody,
    CreateResult,
    DeletedStream,
    RewindBody,
    StepBody,
    StepResult,
    StreamDocument,
    StreamList,
    deleted_document,
    step_body,
    stream_document,
)
from xl_export.serve.http.streams.work import StreamWork, encoded, found
from xl_export.serve.streams.snapshot import most_snapshot_bytes

BLOCK_BYTES = 1 << 20  # bytes of a snapshot that are read or written at once
ONE = "/v1/streams/{id}"
WRITES = (404, 409, 410, 503, 507)  # what operations that change a stream may be refused with
ENDPOINTS = Endpoints()


@ENDPOINTS.add(
    "POST",
    "/v1/streams",
    queued=True,
    answer=AppendResult | CreateResult,
    status=201,
    link=("id", "/stream/id"),
    refused=WRITES,
)
async def create(request: RequestContext, body: CreateBody) -> Response:
    """A new stream."""
    work = _work(request, request.server.model(body.model))
    return await _done(work, work.create(body), status=201)


@ENDPOINTS.add("POST", f"{ONE}/append", queued=True, answer=AppendResult, refused=WRITES)
async def append(request: RequestContext, body: AppendBody) -> Response:
    """Appends to a stream and returns the surprisal of each token."""
    work, name = _found(request)
    return await _done(work, work.append(name, body))


@ENDPOINTS.add(
    "POST",
    f"{ONE}/continue",
    queued=True,
    answer=ContinueResult,
    event=ContinueChunk,
    last_event=ContinueResult,
    refused=WRITES,
)
async def continue_(request: RequestContext, body: ContinueBody) -> Response | None:
    """Continues a stream."""
    work, name = _found(request)
    if not body.stream:
        return await _done(work, work.continue_(name, body))

    async def each(document: ContinueChunk | ContinueResult) -> None:
        await request.events(EVENT + await encoded(document) + END)

    await each(await work.lasting(work.continue_(name, body, each)))
    await request.end()
    return None


@ENDPOINTS.add(
    "POST",
    f"{ONE}/step",
    queued=True,
    reads=step_body,
    form=SAFETENSORS,
    answer=StepResult,
    refused=WRITES,
)
async def step(request: RequestContext, body: StepBody) -> Response:
    """Computes one step of a stream whose model has named inputs."""
    work, name = _found(request)
    operation = work.step(name, body.inputs, body.position)
    if request.headers.get("content-type") != SAFETENSORS:
        return await _done(work, operation)
    result = await work.lasting(operation)
    size = sum(array.nbytes for array in result.outputs.values())
    return Response(await off_loop(size, result.safetensors), media_type=SAFETENSORS)


@ENDPOINTS.add("POST", f"{ONE}/cancel", answer=CancelledStream, refused=(404, 503))
async def cancel(request: RequestContext) -> Response:
    """Ends the operation that runs on a stream, and whose own answer says what it has done.

    A streamed `continue` keeps what was generated. Any other operation answers 409 with the code `cancelled`,
    and the stream stays as it was.
    """
    name = request.path_params["id"]
    end = request.server.store.find(name, request.owner).cancel
    if end is not None:
        end()
    return json(CancelledStream(id=name, object="stream.cancel", cancelled=end is not None))


@ENDPOINTS.add("POST", f"{ONE}/rewind", answer=StreamDocument, refused=WRITES)
async def rewind(request: RequestContext, body: RewindBody) -> Response:
    """Takes back the last tokens."""
    work, name = _found(request)
    return await _done(work, work.rewind(name, body.tokens))


@ENDPOINTS.add(
    "POST",
    f"{ONE}/fork",
    answer=StreamDocument,
    status=201,
    link=("id", "/id"),
    refused=WRITES,
)
async def fork(request: RequestContext) -> Response:
    """A second stream in the same state."""
    work, name = _found(request)
    return await _done(work, work.fork(name), status=201)


@ENDPOINTS.add("GET", "/v1/streams", query=("model",), answer=StreamList, refused=(404, 503))
async def list_all(request: RequestContext) -> Response:
    """The streams of the client.

    Of one model if `model` is given, and otherwise also of artefacts that are not served.
    """
    server = request.server
    owner = request.owner
    wanted = request.query_params.get("model")
    model = server.model(wanted) if wanted else None

    def listed() -> bytes:
        found = [(stream, server.continuing(stream)) for stream in server.store.list(owner)]
        documents = [stream_document(stream, by) for stream, by in found if model is None or by is model]
        return to_json(StreamList(object="list", data=documents))

    return of_json(await off_loop(INLINE_BYTES, listed))  # there may be ten thousand


@ENDPOINTS.add("GET", ONE, answer=StreamDocument, refused=(404, 410, 503))
async def facts(request: RequestContext) -> Response:
    """A stream as it is now."""
    stream = request.server.store.find(request.path_params["id"], request.owner)
    return json(stream_document(stream, request.server.continuing(stream)))


@ENDPOINTS.add("DELETE", ONE, answer=DeletedStream, refused=WRITES)
async def delete(request: RequestContext) -> Response:
    """Deletes a stream."""
    name = request.path_params["id"]
    await asyncio.to_thread(request.server.store.delete, name, request.owner)
    return json(deleted_document(name))


@ENDPOINTS.add("GET", f"{ONE}/snapshot", content="application/octet-stream", refused=WRITES)
async def snapshot(request: RequestContext) -> None:
    """The stream as a file."""
    name = request.path_params["id"]
    store = request.server.store
    model = request.server.continuing(store.find(name, request.owner))
    file: BinaryIO
    if model is None:
        with store.operation(name, request.owner) as operation:
            file = await asyncio.to_thread(operation.snapshot)
    else:
        work = _work(request, model)
        file = await work.lasting(work.snapshot(name))
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(size),
            "content-disposition": f'attachment; filename="{name}.stream"',
            "cache-control": "no-store",
        }
        await request.start([(key.encode(), value.encode()) for key, value in headers.items()])
        while block := await asyncio.to_thread(file.read, BLOCK_BYTES):
            await request.events(block)
    await request.end(b"")


@ENDPOINTS.add(
    "POST",
    "/v1/streams/restore",
    query=("model",),
    file=True,
    answer=StreamDocument,
    status=201,
    link=("id", "/id"),
    refused=WRITES,
)
async def restore(request: RequestContext) -> Response:
    """A new stream from a snapshot."""
    # It writes to files in a thread, so it runs to its end even if the client leaves.
    return await asyncio.shield(background(_restore(request)))


async def _restore(request: RequestContext) -> Response:
    model = request.server.model(request.query_params.get("model"))
    owner = request.owner
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(model.store.receiving(owner, model.session))
        except UserError as error:  # the body is not read, so the connection ends
            refusal = refusal_of(error)
            refusal.closes = True
            raise refusal from error
        await _receive(request, file, most_snapshot_bytes(model.session))
        stream = await asyncio.to_thread(model.store.restore, file, owner, model.session)
    return json(stream_document(stream, model), 201)


def _work(request: RequestContext, model: Model) -> StreamWork:
    return StreamWork(model, request.owner, request.server.limits)


def _found(request: RequestContext) -> tuple[StreamWork, str]:
    """The work on the stream that the path names, and its name."""
    name = request.path_params["id"]
    model = found(request.server, name, request.owner)
    return _work(request, model), name


async def _done(
    work: StreamWork, operation: Coroutine[Any, Any, msgspec.Struct], *, status: int = 200
) -> Response:
    """The answer to an operation, when it has ended."""
    return of_json(await encoded(await work.lasting(operation)), status)


async def _receive(request: RequestContext, file: BinaryIO, most: int) -> None:
    """Writes the body to a file; raises RefusedError for more than `most` bytes as soon as that is known."""
    seconds = request.server.limits.body_seconds * (1 + (most >> 26))
    larger = partial(too_large, fix="send a snapshot of a stream of this model")
    try:
        async for part in request.parts(most, seconds, larger):
            await asyncio.to_thread(file.write, part)
        await asyncio.to_thread(file.flush)
    except OSError as error:
        raise RefusedError(
            f"the server could not write the snapshot ({error.strerror}); ask its operator for space.",
            status=507,
            code="disk_full",
            closes=True,
        ) from error
