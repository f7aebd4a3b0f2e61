"""`/openapi.json`: what can be asked and what is answered, written from the types that bodies are read as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from xl_export.serve.http.base.fields import describe

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
OBJECT: dict[str, Any] = {"type": "object"}
REFERENCE = "#/components/schemas/{name}"
# What any request may be answered with, and why.
REFUSALS = {
    "400": "Something in the request cannot be served; the message says what.",
    "401": "The request has no valid API key.",
    "403": "The key may not do this, or the request comes from the page of another site.",
    "404": "There is no such model or path.",
    "408": "The body did not arrive in time.",
    "409": "It cannot be done in the present state.",
    "413": "The body is too large.",
    "429": "The queue is full; `Retry-After` says when to send the request again.",
    "499": "The client left before the answer.",
    "500": "The server failed; its log says why.",
    "501": "The server keeps no streams.",
    "503": "The server is starting or stopping.",
    "507": "The server's disk is full.",
}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path. body: the type that its body is read as. answer: the schema of status 200.

    events: whether it may answer with server-sent events. path: names in braces are parameters. query: of
    the query string.
    """

    method: str
    path: str
    summary: str
    body: type | None = None
    answer: dict[str, Any] = field(default_factory=lambda: OBJECT)
    content: str = "application/json"
    events: bool = False
    status: int = 200
    query: tuple[str, ...] = ()


def description(operations: Sequence[Operation], *, version: str) -> dict[str, Any]:
    """The OpenAPI document of these operations."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template=REFERENCE)
    describe(components)
    by_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        schema = None if operation.body is None else by_body[operation.body]
        paths.setdefault(operation.path, {})[operation.method.lower()] = _document(operation, schema)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "xl-export serve",
            "version": version,
            "description": "Language models with fixed memory: completions, scores and streams.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _document(operation: Operation, schema: dict[str, Any] | None) -> dict[str, Any]:
    content: dict[str, Any] = {operation.content: {"schema": operation.answer}}
    if operation.events:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(name="Error")}}}
    responses = {status: {"description": why, "content": error} for status, why in REFUSALS.items()}
    responses[str(operation.status)] = {"description": operation.summary, "content": content}
    names = [part[1:-1].partition(":")[0] for part in operation.path.split("/") if part.startswith("{")]
    text = {"type": "string"}
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": text} for name in operation.query
    ]
    document: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if parameters:
        document["parameters"] = parameters
    if schema is not None:
        document["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return document
