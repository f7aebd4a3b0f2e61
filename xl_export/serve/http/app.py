"""The application: all endpoints, who may use them, and how each request ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from importlib.metadata import version

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtimes.base.errors import UserError
from xl_export.serve.http import inference, page, status
from xl_export.serve.http.base.endpoint import Endpoint, Endpoints, description
from xl_export.serve.http.base.errors import ClientLeftError, RefusedError, refusal_of
from xl_export.serve.http.base.exchange import Exchange, json
from xl_export.serve.http.base.server import Server
from xl_export.serve.http.openai import completions, score, tokens
from xl_export.serve.http.streams import routes as streams

UNLOGGED = ("/health", "/ready", "/metrics")
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
async def described(exchange: Exchange) -> Response:
    """The description of all endpoints."""
    return json(DESCRIPTION)


DESCRIPTION = description(ENDPOINTS, version=version("xl-export"))


class Application:
    """What uvicorn calls for each request. Finds out whose request it is and which endpoint it asks for,
    refuses strangers, and notes how the request ends.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        exchange = Exchange(server, scope, receive, send)
        wanted = _find(exchange)
        try:
            self._admit(exchange, wanted)
            if wanted.query or wanted.body is not None:
                exchange.refuse_parameters(wanted.query)
            if wanted.queued:
                server.refuse_when_full()
            body = [] if wanted.body is None else [await exchange.read(wanted.body, wanted.reads)]
            with exchange.while_connected() if wanted.watched else contextlib.nullcontext():
                answer = await wanted.handler(exchange, *body)
                if answer is not None:  # otherwise it has sent the answer itself
                    await answer(scope, receive, exchange.send)
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
            server.answered[wanted.path, str(exchange.status or 499)] += 1
            if wanted.path not in UNLOGGED:
                server.log.event(
                    "request",
                    id=exchange.id,
                    method=exchange.method,
                    path=exchange.path,
                    status=exchange.status or None,
                    seconds=round(time.monotonic() - exchange.began, 6),
                    key=exchange.owner or None,
                    **exchange.note,
                )

    def _admit(self, exchange: Exchange, wanted: Endpoint) -> None:
        """Raises RefusedError for a request that comes from elsewhere, has no key, or is one too many."""
        server = self._server
        _refuse_foreign(exchange.headers, server.hosts)
        owner = "" if wanted.is_open else exchange.key_owner()
        if owner is None:
            raise RefusedError(
                "the request has no valid API key; send it as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )
        exchange.owner = owner
        if not wanted.is_open:
            exchange.stack.enter_context(server.requests.one("requests"))


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


def _find(exchange: Exchange) -> Endpoint:
    """The endpoint that a request asks for, after its variables were noted; or one that refuses a path or a
    method that does not exist.
    """
    path = exchange.path
    method = "GET" if exchange.method == "HEAD" else exchange.method
    found = []
    for each in ENDPOINTS:
        if match := each.pattern.fullmatch(path):
            if each.method == method:
                exchange.params = match.groupdict()
                return each
            found.append(each)
    known = "other"  # requests are counted by the path of an endpoint, so that strangers cannot add paths
    if found:
        known = min((each.path for each in found), key=lambda path: "{" in path)
        methods = {each.method for each in found if each.path == known}
        allowed = sorted(methods | ({"HEAD"} if "GET" in methods else set()))
        sentence = f"{path} does not answer {method}; send {' or '.join(allowed)}."
        refusal = RefusedError(sentence, status=405, allow=", ".join(allowed))
    elif path in UNSERVED:
        sentence = f"{path} is not served: {UNSERVED[path]}."
        refusal = RefusedError(sentence, status=404, code="not_served")
    else:
        sentence = f"there is nothing at {path!r:.200}; see /openapi.json for what there is."
        refusal = RefusedError(sentence, status=404)

    async def refuse(exchange: Exchange) -> Response:
        raise refusal

    return Endpoint(method=method, path=known, handler=refuse, watched=False)
