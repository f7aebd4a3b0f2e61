"""The application: all endpoints, who may use them, and how each request ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from importlib.metadata import version

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from runtimes.base.errors import UserError
from xl_export.serve.http import inference, page, status
from xl_export.serve.http.base.context import RequestContext, json
from xl_export.serve.http.base.endpoint import Endpoint, Endpoints, description
from xl_export.serve.http.base.errors import RefusedError, refusal_of
from xl_export.serve.http.base.keys import owner_of
from xl_export.serve.http.base.server import Server
from xl_export.serve.http.openai import completions, score, tokens
from xl_export.serve.http.streams import routes as streams

UNLOGGED = ("/health", "/ready", "/metrics")
CLIENT_LEFT = 499  # the status in the log and in /metrics of a request whose client has left
CHAT = "these models continue text and have learned no roles; send the text to /v1/completions"
SCORE = "these models only continue and score text; /v1/score returns log-probabilities"
# Parts of OpenAI's interface that do not apply to these models, and why.
UNSERVED = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": CHAT,
    "/v1/messages": CHAT,
    "/v1/embeddings": SCORE,
    "/v1/moderations": SCORE,
    "/v1/rerank": SCORE,
}


ENDPOINTS = Endpoints()
for module in (status, completions, tokens, score, streams, inference, page):
    ENDPOINTS += module.ENDPOINTS


@ENDPOINTS.add("GET", "/openapi.json", is_open=True, described=False)
async def described(request: RequestContext) -> Response:
    """The description of all endpoints."""
    return json(DESCRIPTION)


DESCRIPTION = description(ENDPOINTS, version=version("xl-export"))


class Application:
    """The ASGI application: refuses requests of other sites, routes the rest, and notes how each ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._router = Router(_routes(ENDPOINTS), redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        request = scope["request"] = RequestContext(server, scope, receive, send)
        scope["app"] = self  # the router then raises HTTPException
        try:
            with request.connection.answering():
                _refuse_foreign(request.headers, server.hosts)
                await self._router(scope, receive, request.send)
        except HTTPException as error:
            await request.refuse(_unknown(request, error))
        except (RefusedError, UserError) as error:
            await request.refuse(refusal_of(error))
        except ClientDisconnect:
            request.status = CLIENT_LEFT
        except asyncio.CancelledError:
            if request.connection.lost or server.stopping:  # uvicorn cancels what is open when it ends
                request.status = CLIENT_LEFT
                await request.cut()
            else:
                raise
        except Exception as error:
            server.log.fault("fault", error, id=request.id, path=request.path)
            if request.status:  # a cut answer shows the client that it is not whole
                raise
            sentence = f"the server failed to answer the request {request.id}; its log says why."
            await request.refuse(RefusedError(sentence, status=500, code="fault"))
        finally:
            server.bodies.give_back(request.held)
            server.answered[request.route, str(request.status or CLIENT_LEFT)] += 1
            if request.route not in UNLOGGED:
                server.log.event(
                    "request",
                    id=request.id,
                    method=request.method,
                    path=request.path,
                    status=request.status or None,
                    seconds=round(time.monotonic() - request.began, 6),
                    key=request.owner or None,
                    **request.note,
                )


class Resource:
    """The endpoints of one path, as an ASGI application."""

    def __init__(self, methods: Mapping[str, Endpoint]) -> None:
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: RequestContext = scope["request"]
        endpoint = self._methods["GET" if request.method == "HEAD" else request.method]
        request.route = endpoint.path
        server = request.server
        if not endpoint.is_open:
            request.owner = owner_of(request.headers, server.keys)
        with contextlib.nullcontext() if endpoint.is_open else server.requests.one():
            if endpoint.query or endpoint.body is not None:
                _refuse_parameters(request, endpoint.query)
            if endpoint.queued:
                server.refuse_when_full()
            body = [] if endpoint.body is None else [await request.read(endpoint.body, endpoint.reads)]
            answer = await endpoint.handler(request, *body)
            if answer is not None:  # otherwise the handler has sent the answer itself
                await answer(scope, receive, send)


def _routes(endpoints: Endpoints) -> list[Route]:
    """A route for each path; those without variables come first."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for each in sorted(endpoints, key=lambda endpoint: "{" in endpoint.path):
        paths.setdefault(each.path, {})[each.method] = each
    return [Route(path, Resource(methods), methods=list(methods)) for path, methods in paths.items()]


def _refuse_foreign(headers: Mapping[str, str], hosts: frozenset[str] | None) -> None:
    """Raises RefusedError for a request that the page of another site has made in a browser on this machine.

    hosts: the names under which a server without keys is reached; None checks nothing.
    """
    if hosts is None:
        return
    host = headers.get("host", "")
    origin = headers.get("origin")
    # Without the port.
    name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    if name not in hosts:
        raise RefusedError(
            f"the host {host!r:.80} is not this server; ask for one of {', '.join(sorted(hosts))}, or start "
            "the server with --api-keys.",
            status=403,
            code="foreign_host",
        )
    if origin is not None and origin.partition("://")[2] != host:
        raise RefusedError(
            f"the request comes from the page {origin!r:.80}; a server without API keys only answers its "
            "own page.",
            status=403,
            code="foreign_origin",
        )


def _refuse_parameters(request: RequestContext, known: tuple[str, ...]) -> None:
    """Raises RefusedError for a query parameter that is not known: what it asks for would not be done."""
    for name in request.query_params:
        if name not in known:
            expected = ", ".join([*known, "or none"]) if known else "none, since fields go into the body"
            raise RefusedError(
                f"the query parameter {name!r:.60} is not known here; expected {expected}.", param=name[:60]
            )


def _unknown(request: RequestContext, error: HTTPException) -> RefusedError:
    """The refusal of a path or a method that does not exist."""
    path = request.path
    if error.status_code == 405:
        allowed = sorted((error.headers or {})["Allow"].split(", "))
        sentence = f"{path} does not answer {request.method}; send {' or '.join(allowed)}."
        return RefusedError(sentence, status=405, allow=", ".join(allowed))
    if path in UNSERVED:
        return RefusedError(f"{path} is not served: {UNSERVED[path]}.", status=404, code="not_served")
    return RefusedError(
        f"there is nothing at {path!r:.200}; see /openapi.json for what there is.", status=404
    )
