"""Endpoints, and `/openapi.json`: what can be asked and what is answered, as the types of bodies say it."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

import msgspec
from starlette.responses import Response

from xl_export.serve.http.base.errors import has_plain_errors
from xl_export.serve.http.base.limits import Reads

Handler = TypeVar("Handler", bound=Callable[..., Coroutine[Any, Any, Response | None]])
TEXT = {"type": "string"}
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
        "description": "After so many seconds the same request may succeed.",
        "schema": {"type": "integer"},
    },
}


def doc(text: str) -> msgspec.Meta:
    """The description of a field, in its annotation."""
    return msgspec.Meta(description=text)


class ErrorFacts(TypedDict):
    """What is wrong with a request."""

    message: Annotated[str, doc("What is wrong, and how to fix it.")]
    type: Annotated[str, doc("The kind of error.")]
    param: Annotated[str | None, doc("The field of the body that is wrong.")]
    code: Annotated[str | None, doc("A word for programs.")]


class Error(TypedDict):
    """The answer to a request that is refused."""

    error: Annotated[ErrorFacts, doc("What is wrong with the request.")]


class PlainError(TypedDict):
    """The answer to a request that is refused, in the Open Inference Protocol."""

    error: Annotated[str, doc("What is wrong, and how to fix it.")]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One method of one path: how it is routed, read, answered and described. Only the declarations of
    endpoints know paths and methods.
    """

    #: The HTTP method.
    method: str
    #: Names in braces are variables, which match one part of a path.
    path: str
    #: Answers an exchange; it gets the body as well if there is one. What it returns is sent.
    handler: Callable[..., Coroutine[Any, Any, Response | None]]
    #: For the description; endpoints without a summary are not described.
    summary: str = ""
    #: The parameters of the query string.
    query: tuple[str, ...] = ()
    #: The type that the body is read as, in JSON.
    body: type | None = None
    #: Reads a body that need not be JSON.
    reads: Reads | None = None
    #: The content type of that other form; an answer to it has the same.
    form: str | None = None
    #: Whether the body is a file, which the handler reads.
    file: bool = False
    #: Whether an engine must have a free place before the body is read.
    queued: bool = False
    #: The type of a success, or a union; None for a text or a file.
    answer: Any = None
    content: str = "application/json"
    #: The type of its server-sent events, if it may answer with them.
    event: Any = None
    #: The type of the last event, if it is another.
    last_event: Any = None
    #: Of a success.
    status: int = 200
    #: The types of answers with other statuses that are not errors in the usual form.
    instead: Mapping[int, Any] = field(default_factory=dict)
    #: The statuses of refusals that this endpoint has in addition to those that all of its kind have.
    refused: tuple[int, ...] = ()
    #: The variable of other paths that the answer names, and where in the answer it is.
    link: tuple[str, str] | None = None
    #: Whether it needs no key.
    is_open: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches its paths."""
        return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", self.path))

    @property
    def name(self) -> str:
        """What programs call it."""
        parts = [part.strip("{}").replace(".", "_") for part in self.path.split("/") if part]
        return "_".join([self.method.lower(), *parts])

    @property
    def parameters(self) -> list[str]:
        """The names in its path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


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
            summary = str(handler.__doc__).partition("\n\n")[0] if described else ""
            body = get_type_hints(handler).get("body")
            for path in paths:
                self.append(
                    Endpoint(method=method, path=path, handler=handler, summary=summary, body=body, **facts)
                )
            return handler

        return declare


def description(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    """The OpenAPI document of these endpoints, without those that have no summary."""
    endpoints = [each for each in endpoints if each.summary]
    bodies = {each.body for each in endpoints if each.body is not None}
    answers = {
        kind
        for each in endpoints
        for answer in (each.answer, each.event, each.last_event, *each.instead.values())
        for kind in _kinds(answer)
    }
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _document(endpoint, endpoints)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "xl-export serve",
            "version": version,
            "description": "Models with fixed memory: completions, scores, streams and steps.",
        },
        "paths": paths,
        "components": {
            "schemas": msgspec.json.schema_components(
                sorted({Error, PlainError} | bodies | answers, key=lambda kind: str(kind.__name__)),
                ref_template="#/components/schemas/{name}",
            )[1],
            "headers": HEADERS,
            "responses": _refusals(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _document(endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": _responses(endpoint, endpoints),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": TEXT} for name in endpoint.parameters
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": TEXT} for name in endpoint.query
    ]
    if parameters:
        document["parameters"] = parameters
    if endpoint.body is not None:
        content = _json(endpoint.body)
        if endpoint.form is not None:
            content[endpoint.form] = {}
        document["requestBody"] = {"required": True, "content": content}
    elif endpoint.file:
        document["requestBody"] = {"required": True, "content": {BINARY: {}}}
    if endpoint.is_open:
        document["security"] = []
    return document


def _responses(endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.content: {} if endpoint.content == BINARY else {"schema": TEXT}}
    if endpoint.answer:
        content = _json(endpoint.answer)
    if endpoint.form is not None:
        content[endpoint.form] = {}
    text = endpoint.summary
    if endpoint.event:
        event = {"type": "object", "required": ["data"], "properties": {"data": TEXT}}
        content["text/event-stream"] = {"schema": event}
        text += f" With `stream`, events come, each a `data:` line with a {endpoint.event.__name__}"
        if endpoint.last_event:
            text += f", the last one with a {endpoint.last_event.__name__}"
        text += ", and then `data: [DONE]`. Where the server fails, the last one has an Error."
    success = _response(text, content)
    if endpoint.link is not None:
        parameter, place = endpoint.link
        success["links"] = {
            other.name: {"operationId": other.name, "parameters": {parameter: f"$response.body#{place}"}}
            for other in endpoints
            if parameter in other.parameters
        }
    found = {endpoint.status: success}
    for status, kind in endpoint.instead.items():
        found[status] = _response(HTTPStatus(status).phrase, _json(kind))
    statuses = {*ALWAYS, *endpoint.refused} | (set() if endpoint.is_open else {*WITH_KEY})
    if endpoint.body is not None or endpoint.file:
        statuses |= {*WITH_BODY}
    if endpoint.query:
        statuses.add(400)
    for status in statuses - found.keys():
        found[status] = {"$ref": f"#/components/responses/Refused{status}"}
        if has_plain_errors(endpoint.path):
            found[status] = _response(REFUSALS[status], _json(PlainError))
    return {str(status): found[status] for status in sorted(found)}


def _refusals() -> dict[str, Any]:
    """The answers to requests that are refused, by name."""
    found = {f"Refused{status}": _response(why, _json(Error)) for status, why in REFUSALS.items()}
    for status in (409, 429, 503):
        found[f"Refused{status}"]["headers"]["Retry-After"] = {"$ref": "#/components/headers/Retry-After"}
    return found


def _response(text: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    return {"description": text, "headers": headers, "content": content}


def _kinds(kind: Any) -> Sequence[Any]:
    """The types of a union, of a single type, or of None."""
    return get_args(kind) or ([kind] if kind else [])


def _json(kind: Any) -> dict[str, Any]:
    """The content of an answer or a body of that type."""
    schemas = [{"$ref": f"#/components/schemas/{each.__name__}"} for each in _kinds(kind)]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
