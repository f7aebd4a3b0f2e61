"""The application: all endpoints, who may use them, and how each request ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import version
from itertools import zip_longest

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtimes.base.errors import UserError
from xl_export.serve.http import inference, page, status
from xl_export.serve.http.base.endpoint import Endpoint, description
from xl_export.serve.http.base.errors import ClientLeftError, RefusedError, refusal_of
from xl_export.serve.http.base.exchange import Exchange, json
from xl_export.serve.http.base.keys import Tenant
from xl_export.serve.http.base.server import Server
from xl_export.serve.http.openai import completions, score, tokens
from xl_export.serve.http.streams import routes as streams

UNLOGGED = ("/health", "/ready", "/metrics")
LONGEST_COMPARED = 200  # characters of a path; finding a similar one takes time quadratic in its length
CHAT = "these models continue text and have learned no roles; send the text to /v1/completions"
# Parts of OpenAI's interface that do not apply to these models, and why.
REFUSED = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": CHAT,
    "/v1/messages": CHAT,
    "/v1/assistants": CHAT,
    "/v1/threads": CHAT,
    "/v1/embeddings": "these models have no embeddings; /v1/score returns log-probabilities",
    "/v1/moderations": "these models classify nothing; /v1/score returns log-probabilities",
    "/v1/edits": "these models only continue text; send it to /v1/completions",
    "/v1/images/generations": "these models only know text; send it to /v1/completions",
    "/v1/audio/speech": "these models only know text; send it to /v1/completions",
    "/v1/audio/transcriptions": "these models only know text; send it to /v1/completions",
    "/v1/files": "this server keeps no files; send texts to /v1/completions or /v1/score",
    "/v1/batches": "this server keeps no batches; send up to 4,096 texts at once to /v1/score",
    "/v1/fine_tuning/jobs": "this server does not train; use `xl-export train`",
    "/v1/rerank": "these models rank nothing themselves; /v1/score returns log-probabilities",
}


async def refused(exchange: Exchange) -> Response:
    """Refuses a part of OpenAI's interface with the reason."""
    path = exchange.path
    raise RefusedError(f"{path} is not served: {REFUSED[path]}.", status=404, code="not_served")


async def described(exchange: Exchange) -> Response:
    """The description of all endpoints."""
    return json(DESCRIPTION)


ENDPOINTS = [
    *status.ENDPOINTS,
    *completions.ENDPOINTS,
    *tokens.ENDPOINTS,
    *score.ENDPOINTS,
    *streams.ENDPOINTS,
    *inference.ENDPOINTS,
    *page.ENDPOINTS,
    *(
        Endpoint(method=method, path=path, handler=refused)
        for path in REFUSED
        for method in ("GET", "POST", "DELETE")
    ),
    Endpoint(method="GET", path="/openapi.json", handler=described, is_open=True),
]
DESCRIPTION = description(ENDPOINTS, version=version("xl-export"))


class Application:
    """What uvicorn calls for each request. Finds out whose request it is and which endpoint it asks for,
    refuses strangers, and notes how the request ends.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        #: The endpoints of each path by their methods; of paths without variables, and of the others.
        self._fixed: dict[str, dict[str, Endpoint]] = {}
        self._variable: dict[str, dict[str, Endpoint]] = {}
        for each in ENDPOINTS:
            paths = self._variable if "{" in each.path else self._fixed
            methods = paths.setdefault(each.path, {})
            methods[each.method] = each
            if each.method == "GET":
                methods["HEAD"] = each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        began = time.monotonic()
        exchange = Exchange(server, scope, receive, send)
        wanted = self._find(exchange)
        exchange.plain_errors = wanted.plain_errors
        try:
            self._admit(exchange, wanted)
            if wanted.query or wanted.body is not None:
                exchange.refuse_parameters(wanted.query)
            if wanted.queue:
                server.refuse_when_full(exchange.tenant.name, bulk=wanted.queue == "bulk")
            body = [] if wanted.body is None else [await exchange.read(wanted.reader)]
            response = await wanted.handler(exchange, *body)
            if response is not None:
                await exchange.respond(response)
        except (RefusedError, UserError) as error:
            await exchange.refuse(refusal_of(error))
        except ClientLeftError:
            exchange.status = 499
        except asyncio.CancelledError:  # uvicorn waits no longer for what is open when the server ends
            if not server.stopping:
                raise
            exchange.status = 499
            exchange.cut()
        except Exception as error:
            server.log.fault("fault", error, id=exchange.id, path=exchange.path)
            if exchange.status:  # a cut answer shows the client that it is not whole
                raise
            sentence = f"the server failed to answer the request {exchange.id}; its log says why."
            await exchange.refuse(RefusedError(sentence, status=500, code="fault"))
        finally:
            exchange.stack.close()
            server.metrics.answered[wanted.path, str(exchange.status or 499)] += 1
            if wanted.path not in UNLOGGED:
                server.log.event(
                    "request",
                    id=exchange.id,
                    method=exchange.method,
                    path=exchange.path,
                    status=exchange.status or None,
                    seconds=round(time.monotonic() - began, 6),
                    tenant=exchange.tenant.name or None,
                    **exchange.note,
                )

    def _admit(self, exchange: Exchange, wanted: Endpoint) -> None:
        """Raises RefusedError for a request that comes from elsewhere, has no key, or is one too many."""
        server = self._server
        _refuse_foreign(exchange.headers, server.hosts)
        tenant = Tenant() if wanted.is_open and server.keys else exchange.key_tenant()
        if tenant is None:
            raise RefusedError(
                "the request has no valid API key; send it as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )
        exchange.tenant = tenant
        if not wanted.is_open:  # a WebSocket that does nothing is no request
            open_now = server.sockets if exchange.scope["type"] == "websocket" else server.requests
            exchange.stack.enter_context(open_now.one(tenant.name))

    def _find(self, exchange: Exchange) -> Endpoint:
        """The endpoint that a request asks for, after its variables were noted; or one that refuses a path or
        a method that does not exist.
        """
        path = exchange.path
        method = exchange.method
        same_path = self._fixed.get(path, {})
        if method in same_path:
            return same_path[method]
        for methods in self._variable.values():
            if match := next(iter(methods.values())).pattern.fullmatch(path):
                if method in methods:
                    exchange.params = match.groupdict()
                    return methods[method]
                same_path = same_path or methods
        return _missing(path, method, same_path)


def _refuse_foreign(headers: dict[str, str], hosts: frozenset[str] | None) -> None:
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


def _missing(path: str, method: str, same_path: Mapping[str, Endpoint]) -> Endpoint:
    """Refuses a request for a path, or for a method of a path, that does not exist."""
    methods = sorted(same_path.keys() - {"WEBSOCKET"})

    async def refuse(exchange: Exchange) -> Response:
        if methods and method != "WEBSOCKET":
            sentence = f"{path} does not answer {method}; send {' or '.join(methods)}."
            raise RefusedError(sentence, status=405, allow=", ".join(methods))
        advice = "connect to it with a WebSocket" if same_path and not methods else _advice(path)
        raise RefusedError(f"there is nothing at {path!r:.200}; {advice}.", status=404)

    # Requests are counted by the path of an endpoint, so that strangers cannot add paths.
    if not same_path:
        return Endpoint(method=method, path="other", handler=refuse)
    one = next(iter(same_path.values()))
    return Endpoint(method=method, path=one.path, handler=refuse, is_open=one.is_open)


def _advice(path: str) -> str:
    """What to do if no endpoint has the path of a request, in the imperative."""
    if len(path) > LONGEST_COMPARED:
        return "see /openapi.json for what there is"
    if "//" in path:
        return "a part of the path is empty, as if the id of a stream were missing"
    paths = {_like(each.path, path) for each in ENDPOINTS}
    near = [
        each for each in get_close_matches(path, paths, n=2, cutoff=0.85) if each != path and ".." not in each
    ]
    return f"{near[0]} was probably meant" if near else "see /openapi.json for what there is"


def _like(template: str, path: str) -> str:
    """The path of an endpoint with the parts of a request's path in place of its variables."""
    parts = zip_longest(template.split("/"), path.split("/")[: template.count("/") + 1], fillvalue="")
    return "/".join(given if part.startswith("{") else part for part, given in parts)
