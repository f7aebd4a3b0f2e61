"""The application: the routes of all parts, and the guard that every request passes first."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
import time
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtimes.base.errors import UserError
from xl_export.serve.http import operation, page
from xl_export.serve.http.base.answering import json
from xl_export.serve.http.base.description import description
from xl_export.serve.http.base.errors import ClientLeftError, RefusedError
from xl_export.serve.http.base.keys import ANYBODY, Tenant
from xl_export.serve.http.base.server import Server
from xl_export.serve.http.openai import completions, refused, score, tokens
from xl_export.serve.http.streams import routes as streams

# Paths that need no key: what a load balancer asks for, and the description of the others.
OPEN_PATHS = ("/health", "/ready", "/openapi.json")
OPEN_FOLDERS = ("/page/",)  # and the page itself at "/", which asks for a key
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# A browser gives the key of a WebSocket as a subprotocol: the prefix and the key, or the key in base64url,
# because a subprotocol may have no "/" and no "=".
KEY_PROTOCOL, ENCODED_KEY_PROTOCOL = "key.", "key64."


def routes(server: Server) -> list[BaseRoute]:
    """The routes of all parts."""
    document = description(OPERATIONS, version=version("xl-export"))

    async def described(request: Request) -> Response:
        return json(document)

    return [
        *operation.routes(server),
        *completions.routes(server),
        *tokens.routes(server),
        *score.routes(server),
        *streams.routes(server),
        *page.routes(),
        *refused.routes(server),
        Route("/openapi.json", described),
    ]


OPERATIONS = [
    *operation.OPERATIONS,
    *completions.OPERATIONS,
    *tokens.OPERATIONS,
    *score.OPERATIONS,
    *streams.OPERATIONS,
]


def application(server: Server) -> ASGIApp:
    """What uvicorn calls."""
    handlers: dict[Any, Any] = {
        RefusedError: _refusal,
        UserError: _user_error,
        HTTPException: _http_error,
    }
    served = routes(server)
    app = Routes(routes=served, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirection has no sentence, and many clients do not follow it
    return Guard(app, server, served)


class Routes(Starlette):
    """Starlette without its own answer to an unexpected error, which is a plain text: the guard has one."""

    def build_middleware_stack(self) -> ASGIApp:
        return ExceptionMiddleware(self.router, handlers=self.exception_handlers)


class Guard:
    """Finds out whose request it is, refuses those of strangers, and notes how each request ends.

    It is plain ASGI and passes `receive` on as it is, so that nothing hides that a client has left.
    """

    def __init__(self, app: ASGIApp, server: Server, served: Iterable[BaseRoute]) -> None:
        self._app, self._server = app, server
        # The paths of the endpoints, by which requests are counted: strangers cannot make others.
        found = [route for route in served if isinstance(route, Route | WebSocketRoute)]
        self._paths: dict[object, str] = {route.endpoint: route.path for route in found}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        server, began = self._server, time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(12)
        note: dict[str, Any] = {}  # what a route adds to the line of the log
        scope.setdefault("state", {}).update(request_id=request_id, note=note)
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = 101
            elif message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", request_id.encode())],
                }
            await send(message)

        scope["state"].update(begin=noted, send=send)  # see `answering`
        held = scope["state"]["held"] = contextlib.ExitStack()  # see `Server.hold`
        try:
            self._admit(scope, headers)
            await self._app(scope, receive, noted)
        except RefusedError as refusal:
            await _answer(refusal, scope, receive, noted)
        except ClientLeftError:
            status = 499
        except asyncio.CancelledError:  # uvicorn waits no longer for what is open when the server ends
            if not server.stopping:
                raise
            status = 499
            if cut := scope["state"].get("abort"):
                cut()
        except Exception as error:
            server.log.fault("fault", error, id=request_id, path=scope["path"])
            if status:  # the answer has begun; ending the connection tells the client that it is not whole
                raise
            fault = RefusedError(
                f"the server failed to answer the request {request_id}; its log says why.",
                status=500,
                code="fault",
            )
            await _answer(fault, scope, receive, noted)
        finally:
            held.close()
            if scope["state"].get("left"):
                status = 499
            path = self._paths.get(scope.get("endpoint"), "other")
            server.metrics.answered[path, str(status or 499)] += 1
            if path not in ("/health", "/ready", "/metrics"):
                server.log.event(
                    "request",
                    id=request_id,
                    method=scope.get("method", "WEBSOCKET"),
                    path=scope["path"],
                    status=status or None,
                    seconds=round(time.monotonic() - began, 6),
                    tenant=scope["state"].get("tenant", ANYBODY).name or None,
                    **note,
                )

    def _admit(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raises RefusedError for a request that comes from elsewhere, has no key, or is one too many."""
        server = self._server
        _refuse_foreign(headers, server.hosts)
        tenant = self._tenant(scope, headers)
        if tenant is None:
            raise RefusedError(
                "the request has no valid API key; send it as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )
        # For a WebSocket, which may outlive its key.
        scope["state"].update(tenant=tenant, tenant_now=partial(self._tenant, scope, headers))
        if not _is_open(scope["path"]):  # a WebSocket that does nothing is no request
            load = server.sockets if scope["type"] == "websocket" else server.requests
            scope["state"]["held"].enter_context(server.one_more(tenant, load))

    def _tenant(self, scope: Scope, headers: dict[str, str]) -> Tenant | None:
        """Whose request it is, by the keys that are valid now; None where it has none of them."""
        keys = self._server.keys
        if not keys:
            return ANYBODY
        return Tenant() if _is_open(scope["path"]) else keys.tenant(_key(scope, headers))


def _is_open(path: str) -> bool:
    return path == "/" or path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def _key(scope: Scope, headers: dict[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    if scope["type"] == "websocket":
        for offered in scope.get("subprotocols", ()):
            if offered.startswith(KEY_PROTOCOL):
                return str(offered.removeprefix(KEY_PROTOCOL))
            if offered.startswith(ENCODED_KEY_PROTOCOL):
                return _decoded(offered.removeprefix(ENCODED_KEY_PROTOCOL))
    return ""


def _decoded(key: str) -> str:
    """A key of base64url without padding; empty, which is no key, where it is none."""
    try:
        return base64.urlsafe_b64decode(key + "=" * (-len(key) % 4)).decode()
    except ValueError:
        return ""


def _refuse_foreign(headers: dict[str, str], hosts: frozenset[str] | None) -> None:
    """Raises RefusedError for a request that the page of another site has made in a browser on this machine.

    hosts: the names under which a server without keys is reached; None checks nothing.
    """
    if hosts is None:
        return
    host = headers.get("host", "")
    origin = headers.get("origin")
    if _without_port(host) not in hosts:
        raise RefusedError(
            f"the host {host!r:.80} is not this server; ask for one of {', '.join(sorted(hosts))}, or start "
            "the server with --api-keys.",
            status=403,
            code="foreign_host",
        )
    if origin is not None and origin.partition("://")[2] != host:
        raise RefusedError(
            f"the request comes from the page {origin!r:.80}; a server without API keys answers its own page "
            "alone.",
            status=403,
            code="foreign_origin",
        )


def _without_port(host: str) -> str:
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


async def _answer(refusal: RefusedError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the refusal; before a WebSocket is accepted, its handshake is refused."""
    await refusal.response()(scope, receive, send)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return error.response()


async def _user_error(request: Request, error: Exception) -> Response:
    return RefusedError(str(error)).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        methods = ", ".join(_methods(request))  # several routes may share a path; the router names the first
        message = f"{path} does not answer {request.method}; send {methods.replace(', ', ' or ')}."
        answer = RefusedError(message, status=405).response()
        answer.headers["allow"] = methods
        return answer
    return RefusedError(
        f"there is nothing at {path!r:.200}; {_nearest(request)}.", status=error.status_code
    ).response()


def _nearest(request: Request) -> str:
    """What to do where no route has the path of a request, in the imperative."""
    paths = {_like(route.path, request.url.path): route for route in request.app.routes}
    if isinstance(paths.get(request.url.path), WebSocketRoute):
        return "connect to it with a WebSocket"
    if "//" in request.url.path:
        return "a part of the path is empty, as where the id of a stream is missing"
    near = [
        path
        for path in get_close_matches(request.url.path, paths, n=2, cutoff=0.85)
        if path != request.url.path and ".." not in path
    ]
    return f"{near[0]} was probably meant" if near else "see /openapi.json for what there is"


def _like(template: str, path: str) -> str:
    """The path of a route with the parts of a request's path in the place of its variables."""
    parts = zip_longest(template.split("/"), path.split("/")[: template.count("/") + 1], fillvalue="")
    return "/".join(given if part.startswith("{") else part for part, given in parts)


def _methods(request: Request) -> list[str]:
    """The methods of the routes that have the same path as the first one that a request fits."""
    fitting = [
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    same = [route.methods or set() for route in fitting if route.path == fitting[0].path]
    return sorted(set().union(*same))
