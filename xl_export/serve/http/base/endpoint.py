"""Endpoints, and `/openapi.json`, which describes the types of their bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from starlette.responses import Response

from xl_export.serve.http.base.errors import Error, PlainError, has_plain_errors
from xl_export.serve.http.base.limits import Reads

Handler = TypeVar("Handler", bound=Callable[..., Coroutine[Any, Any, Response | None]])
TEXT = {"type": "string"}
JSON = "application/json"
BINARY = "application/octet-stream"
# Why a request may be refused, by the status of the answer.
REFUSALS = {
    400: "Something in the request cannot be served; the message says what.",
    401: "The request has no valid API key.",
    403: "The key may not do this, or the request comes from the page of another site.",
    404: "There is no such model or stream.",
    408: "The body did not arrive in time.",
    409: "It cannot be done in the present state.",
    410: "The files of the stream are damaged.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; `Retry-After` says when to send the request again.",
    500: "The server failed; its log says why.",
    503: "The server is starting or stopping, or has no room.",
    507: "The server's disk is full.",
}
ALWAYS = (403, 500)
WITH_KEY = (401, 429)
WITH_BODY = (400, 408, 413, 415)
HEADERS = {
    "X-Request-Id": {
        "description": "The id of the request in the server's log; the client's own, if it sent one.",
        "schema": TEXT,
    },
    "Retry-After": {
        "description": "Seconds after which the same request may succeed.",
        "schema": {"type": "integer"},
    },
}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One method of one path: how it is routed, read, answered and described."""

    method: str
    """The HTTP method."""
    path: str
    """Names in braces are variables, which match one part of a path."""
    handler: Callable[..., Coroutine[Any, Any, Response | None]]
    """Answers a request; it gets the body as well if there is one. A response that it returns is sent."""
    summary: str = ""
    """The description; endpoints without a summary are not described."""
    query: tuple[str, ...] = ()
    """The names of the parameters of the query string."""
    body: type | None = None
    """The type of the body in JSON."""
    reads: Reads | None = None
    """Reads a body that need not be JSON."""
    form: str | None = None
    """The content type of that other form; an answer to it has the same."""
    file: bool = False
    """Whether the body is a file, which the handler reads."""
    queued: bool = False
    """Whether an engine must have a free place before the body is read."""
    answer: Any = None
    """The type of a success, or a union; None for a text or a file."""
    content: str = JSON
    """The content type of a success."""
    event: Any = None
    """The type of its server-sent events, if it may answer with them."""
    last_event: Any = None
    """The type of the last event, if it is another."""
    status: int = 200
    """The status of a success."""
    instead: Mapping[int, Any] = field(default_factory=dict)
    """The types of answers with other statuses that are not errors in the usual form."""
    refused: tuple[int, ...] = ()
    """The statuses of refusals that this endpoint has in addition to those that all of its kind have."""
    link: tuple[str, str] | None = None
    """The variable of other paths that the answer names, and where in the answer it is."""
    is_open: bool = False
    """Whether it needs no key."""

    @property
    def name(self) -> str:
        """The name of the operation in programs."""
        parts = [part.strip("{}").replace(".", "_") for part in self.path.split("/") if part]
        return "_".join([self.method.lower(), *parts])

    @property
    def variables(self) -> list[str]:
        """The names in its path."""
        return re.findall(r"{(\w+)}", self.path)


class Endpoints(list[Endpoint]):
    """The endpoints of a module, which declares each above its handler."""

    def add(
        self, method: str, *paths: str, described: bool = True, **facts: Any
    ) -> Callable[[Handler], Handler]:
        """Declares the function below as the handler of an endpoint, for each of the paths. The description
        uses the first paragraph of its docstring, and the type of its argument `body`.

        facts: fields of `Endpoint`.
        """

        def declare(handler: Handler) -> Handler:
            facts["summary"] = str(handler.__doc__).partition("\n\n")[0] if described else ""
            facts["body"] = get_type_hints(handler).get("body")
            self.extend(Endpoint(method=method, path=path, handler=handler, **facts) for path in paths)
            return handler

        return declare


def description(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    """The OpenAPI document of these endpoints, without those that have no summary."""
    endpoints = [each for each in endpoints if each.summary]
    paths: dict[str, dict[str, Any]] = {}
    kinds: dict[str, Any] = {"Error": Error, "PlainError": PlainError}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, endpoints)
        for kind in (each.body, each.answer, each.event, each.last_event, *each.instead.values()):
            kinds |= {one.__name__: one for one in _members(kind)}
    schemas = msgspec.json.schema_components(
        [kinds[name] for name in sorted(kinds)], ref_template="#/components/schemas/{name}"
    )[1]
    refusals = {f"Refused{status}": _response(why, _content(Error)) for status, why in REFUSALS.items()}
    for status in (409, 429, 503):
        refusals[f"Refused{status}"]["headers"]["Retry-After"] = {"$ref": "#/components/headers/Retry-After"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "xl-export serve",
            "version": version,
            "description": "Models with fixed memory: completions, scores, streams and steps.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": HEADERS,
            "responses": refusals,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": [
            {"name": name, "in": place, "required": place == "path", "schema": TEXT}
            for place, names in (("path", endpoint.variables), ("query", endpoint.query))
            for name in names
        ],
        "responses": _responses(endpoint, endpoints),
    }
    if endpoint.body is not None or endpoint.file:
        content: dict[str, Any] = {BINARY: {}} if endpoint.file else _content(endpoint.body)
        if endpoint.form is not None:
            content[endpoint.form] = {}
        operation["requestBody"] = {"required": True, "content": content}
    if endpoint.is_open:
        operation["security"] = []
    return operation


def _responses(endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    text = endpoint.summary
    content: dict[str, Any] = {endpoint.content: {} if endpoint.content == BINARY else {"schema": TEXT}}
    if endpoint.answer:
        content = _content(endpoint.answer)
    if endpoint.form is not None:
        content[endpoint.form] = {}
    if endpoint.event:
        event = {"type": "object", "required": ["data"], "properties": {"data": TEXT}}
        content["text/event-stream"] = {"schema": event}
        text += f" With `stream`, events come, each a `data:` line with a {endpoint.event.__name__}"
        if endpoint.last_event:
            text += f", the last one with a {endpoint.last_event.__name__}"
        text += ", and then `data: [DONE]`. If the server fails, the last one has an Error."
    found = {endpoint.status: _response(text, content)}
    if endpoint.link is not None:
        variable, place = endpoint.link
        found[endpoint.status]["links"] = {
            other.name: {"operationId": other.name, "parameters": {variable: f"$response.body#{place}"}}
            for other in endpoints
            if variable in other.variables
        }
    for status, kind in endpoint.instead.items():
        found[status] = _response(HTTPStatus(status).phrase, _content(kind))
    statuses = {*ALWAYS, *endpoint.refused}
    statuses |= {*WITH_KEY} if not endpoint.is_open else set()
    statuses |= {*WITH_BODY} if endpoint.body is not None or endpoint.file else set()
    statuses |= {400} if endpoint.query else set()
    for status in statuses - found.keys():
        found[status] = {"$ref": f"#/components/responses/Refused{status}"}
        if has_plain_errors(endpoint.path):
            found[status] = _response(REFUSALS[status], _content(PlainError))
    return {str(status): found[status] for status in sorted(found)}


def _response(text: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    return {"description": text, "headers": headers, "content": content}


def _content(kind: Any) -> dict[str, Any]:
    """The content of an answer or a body of that type."""
    schemas = [{"$ref": f"#/components/schemas/{each.__name__}"} for each in _members(kind)]
    return {JSON: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}


def _members(kind: Any) -> Sequence[Any]:
    """The types of a union, of a single type, or of None."""
    return get_args(kind) or ([kind] if kind else [])
