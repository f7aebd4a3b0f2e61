"""`/openapi.json`: what can be asked and what is answered, written from the types that bodies are read as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from xl_export.serve.http.base.fields import ANSWER_FIELDS, BODY_FIELDS, describe

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
TEXT = {"type": "string"}
BINARY = "application/octet-stream"
SCHEMA, HEADER = "#/components/schemas/{name}", "#/components/headers/{name}"
RESPONSE = "#/components/responses/{name}"
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
    429: "The queue is full; `Retry-After` says when to send the request again.",
    500: "The server failed; its log says why.",
    503: "The server is starting or stopping, or has no room.",
    507: "The server's disk is full.",
}
ALWAYS, WITH_KEY, WITH_BODY = (403, 500), (401, 429), (400, 408, 413)
HEADERS = {
    "X-Request-Id": {
        "description": "The id of the request in the server's log; the client's own, where it sent one.",
        "schema": TEXT,
    },
    "Retry-After": {
        "description": "After so many seconds the same request may succeed.",
        "schema": {"type": "integer"},
    },
}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    path: names in braces are parameters. query: those of the query string. body: the type that its body is
    read as. file: whether the body is a file. answer: the type of a success, whose status is `status`; None
    for a text or a file. event: the type of its server-sent events, where it may answer with them.
    last_event: that of the last one, where it is another. instead: types of answers with other statuses that
    are no errors in the usual form. refused: the statuses of refusals that this operation has beside those of
    its kind. tells: the parameter of other paths that the answer names, and where in it. is_open:
    whether it needs no key.
    """

    method: str
    path: str
    summary: str
    query: tuple[str, ...] = ()
    body: type | None = None
    file: bool = False
    answer: Any = None
    content: str = "application/json"
    event: Any = None
    last_event: Any = None
    status: int = 200
    instead: Mapping[int, Any] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    tells: tuple[str, str] | None = None
    is_open: bool = False

    @property
    def name(self) -> str:
        """What programs call it."""
        parts = [part.strip("{}").replace(".", "_") for part in self.path.split("/") if part]
        return "_".join([self.method.lower(), *parts])

    @property
    def parameters(self) -> list[str]:
        """The names in its path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


def description(operations: Sequence[Operation], *, version: str) -> dict[str, Any]:
    """The OpenAPI document of these operations."""
    bodies = {each.body for each in operations if each.body is not None}
    answers = {
        kind
        for each in operations
        for kind in (each.answer, each.event, each.last_event, *each.instead.values())
        if kind
    }
    of_bodies, of_answers = _schemas(bodies), _schemas(answers)
    describe(of_bodies, BODY_FIELDS)
    describe(of_answers, ANSWER_FIELDS)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _document(operation, operations)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "xl-export serve",
            "version": version,
            "description": "Language models with fixed memory: completions, scores and streams.",
        },
        "paths": paths,
        "components": {
            "schemas": {**of_bodies, **of_answers, "Error": ERROR},
            "headers": HEADERS,
            "responses": _refusals(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _schemas(types: Iterable[Any]) -> dict[str, Any]:
    """The schemas of types and of what they consist of, by name."""
    ordered = sorted(types, key=lambda kind: str(kind.__name__))
    return msgspec.json.schema_components(ordered, ref_template=SCHEMA)[1]


def _document(operation: Operation, operations: Sequence[Operation]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": _responses(operation, operations),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": TEXT} for name in operation.parameters
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": TEXT} for name in operation.query
    ]
    if parameters:
        document["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": _named(operation.body)}}
        document["requestBody"] = {"required": True, "content": content}
    elif operation.file:
        document["requestBody"] = {"required": True, "content": {BINARY: {}}}
    if operation.is_open:
        document["security"] = []
    return document


def _responses(operation: Operation, operations: Sequence[Operation]) -> dict[str, Any]:
    schema = _named(operation.answer) if operation.answer else TEXT
    content: dict[str, Any] = {operation.content: {} if operation.content == BINARY else {"schema": schema}}
    text = operation.summary
    if operation.event:
        event = {"type": "object", "required": ["data"], "properties": {"data": TEXT}}
        content["text/event-stream"] = {"schema": event}
        text += f" With `stream`, events come, each a `data:` line with a {operation.event.__name__}"
        if operation.last_event:
            text += f", the last one with a {operation.last_event.__name__}"
        text += ", and then `data: [DONE]`. Where the server fails, the last one has an Error."
    success = _response(text, content)
    if operation.tells is not None:
        parameter, place = operation.tells
        success["links"] = {
            other.name: {"operationId": other.name, "parameters": {parameter: f"$response.body#{place}"}}
            for other in operations
            if parameter in other.parameters
        }
    found = {operation.status: success}
    for status, kind in operation.instead.items():
        text = HTTPStatus(status).phrase
        found[status] = _response(text, {"application/json": {"schema": _named(kind)}})
    statuses = {*ALWAYS, *operation.refused} | (set() if operation.is_open else {*WITH_KEY})
    if operation.body is not None or operation.file:
        statuses |= {*WITH_BODY}
    if operation.query:
        statuses.add(400)
    for status in statuses - found.keys():
        found[status] = {"$ref": RESPONSE.format(name=f"Refused{status}")}
    return {str(status): found[status] for status in sorted(found)}


def _refusals() -> dict[str, Any]:
    """The answers to requests that are refused, by name."""
    error = {"application/json": {"schema": {"$ref": SCHEMA.format(name="Error")}}}
    found = {f"Refused{status}": _response(why, error) for status, why in REFUSALS.items()}
    for status in (409, 429, 503):
        found[f"Refused{status}"]["headers"]["Retry-After"] = {"$ref": HEADER.format(name="Retry-After")}
    return found


def _response(text: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"X-Request-Id": {"$ref": HEADER.format(name="X-Request-Id")}}
    return {"description": text, "headers": headers, "content": content}


def _named(kind: Any) -> dict[str, str]:
    return {"$ref": SCHEMA.format(name=kind.__name__)}
