"""The body of a request: read within the limits, decoded, and told in words where it is wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

import msgspec
from starlette.requests import Request

from xl_export.serve.http.base.errors import ClientLeftError, RefusedError
from xl_export.serve.http.base.limits import Limits
from xl_export.serve.http.base.server import Server, tenant_of
from xl_export.serve.http.base.workers import Steps, aside

FEW = 8  # fields that a message may list
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a half of a pair, in JSON's spelling
COUNTED = 1 << 17  # bytes of a body whose values are counted before they are made
WINDOW = 1 << 18  # bytes in which they are counted at once, which takes a fraction of a millisecond
FIELDS = 8  # values that belong to one list or object, beside token ids
LONGEST_NAME = 60  # characters of a field's name that are told or compared
Body = TypeVar("Body")
Result = TypeVar("Result")
KINDS = {  # how messages name msgspec's types
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "a boolean",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


async def read_body(request: Request, server: Server) -> bytearray:
    """The body of a request; raises RefusedError where it is too large or does not arrive in time, or where
    others have sent too much.
    """
    limits = server.limits
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.body_bytes:  # nothing of it is read
        raise _too_large(limits.body_bytes)
    try:
        return await asyncio.wait_for(_read(request, server), limits.body_seconds)
    except asyncio.TimeoutError:
        raise RefusedError(
            f"the body did not arrive within {limits.body_seconds:g} seconds; send it faster, or in parts.",
            status=408,
            code="timeout",
            closes=True,
        ) from None


async def read_json(request: Request, server: Server, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The body as the decoder's type; raises RefusedError with one sentence for anything else."""
    body = await read_body(request, server)
    request.scope["state"]["size"] = len(body)
    return await of_body(request, _decoded, body, decoder, server.limits)


def _decoded(body: bytearray, decoder: msgspec.json.Decoder[Body], limits: Limits) -> Steps[Body]:
    yield from refuse_many_values(body, limits)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body:
            raise RefusedError("the request has no body; send a JSON object.") from None
        raise RefusedError(decoding_error(error, decoder.type, body), param=_field(error)) from None


async def of_body(request: Request, function: Callable[..., Steps[Result]], *arguments: Any) -> Result:
    """What a function returns of the body that `read_json` has read; see `aside`."""
    return await aside(request.scope["state"]["size"], tenant_of(request).name, function, *arguments)


def refuse_many_values(body: bytes | bytearray | str, limits: Limits) -> Steps[None]:
    """Raises RefusedError for a large body with more values than any request has that is served. Making them
    would hold Python's lock for seconds. Strings are skipped, in parts so that other threads go on.
    """
    if isinstance(body, str):
        body = body.encode()
    if len(body) < COUNTED:
        return
    most_containers = 2 * limits.texts + limits.choices
    most = limits.prompt_tokens + FIELDS * most_containers
    values = containers = at = 0
    while at < len(body):
        string = body.find(b'"', at, at + WINDOW)
        end = min(len(body), at + WINDOW) if string < 0 else string
        values += body.count(b",", at, end)
        containers += body.count(b"[", at, end) + body.count(b"{", at, end)
        if values > most or containers > most_containers:
            raise RefusedError(
                f"the body has more than {most:,} values, or {most_containers:,} lists and objects, which no "
                "request needs here; send fewer at once."
            )
        yield
        at = end if string < 0 else (yield from _end_of_string(body, string))


def _end_of_string(body: bytes | bytearray, begin: int) -> Steps[int]:
    """The place behind a string of JSON that begins here; behind the body if it does not end."""
    at, size = begin + 1, 64  # most strings are short: a large part of the body would be copied for each
    while at < len(body):
        window = bytes(body[at : at + size])
        escapes = len(window) - len(window.rstrip(b"\\"))
        if escapes % 2 and at + len(window) < len(body):  # what the last backslash escapes is in the next one
            window = window[:-1]
        quote = window.replace(b"\\\\", b"..").replace(b'\\"', b"..").find(b'"')
        if quote >= 0:
            return at + quote + 1
        at += len(window)
        size = min(2 * size, WINDOW)
        yield
    return len(body)


def decoding_error(error: Exception, expected: Any = None, body: bytes | bytearray = b"") -> str:
    """One sentence for a document that is not what was expected.

    expected: a msgspec.Struct or a union of them; its fields are compared with one that is not known. body:
    what was decoded.
    """
    if isinstance(error, UnicodeDecodeError):
        return "the body is not UTF-8; send a JSON object that is encoded as UTF-8."
    if isinstance(error, RecursionError):
        return "the body is nested too deeply; send a plain JSON object."
    if isinstance(error, msgspec.ValidationError):
        return _misfit(str(error), expected)
    if "truncated" in str(error):  # msgspec calls half of a surrogate pair so too
        if SURROGATE.search(body):
            return "a text in the body has half of a character, such as \\ud800; send whole characters."
        return "the body is not JSON, because it ends too early; send a whole JSON object."
    why = str(error).removeprefix("JSON is malformed: ").rstrip(".")
    return f"the body is not JSON ({why:.200}); send a JSON object."


def _misfit(reason: str, expected: Any) -> str:
    """One sentence for a document with a field that is not what was expected, from msgspec's message."""
    name = reason.partition("`")[2].partition("`")[0][: LONGEST_NAME + 1]
    if "unknown field" in reason:
        fields = [] if " - at " in reason else _fields(expected)
        if near := get_close_matches(name, fields):
            # Letters alone take max_completion_tokens for min_tokens.
            words = set(name.split("_"))
            meant = max(near, key=lambda field: len(words.intersection(field.split("_"))))
            mend = f"did you mean {meant!r}? If not, leave it out, or see /openapi.json for those that are"
        elif 0 < len(fields) <= FEW:
            mend = f"expected {', '.join(fields)}"
        else:
            mend = "leave it out, or see /openapi.json for those that are"
        within = re.search(r" - at `\$\.?([^`]*)`", reason)
        of = f" of {within[1].replace('[...]', '[]'):.60}" if within else ""
        return f"the field {name!r:.60}{of} is not known here; {mend}."
    if "missing required field" in reason:
        return f"the field {name!r} is missing; give it, as /openapi.json describes it."
    place = re.search(r"- at (`key` in )?`\$\.?([^`]*)`", reason)
    what = place[2].replace("[...]", "[]") if place and place[2] else "the body"
    if place and place[1]:
        what = f"a key of {what}"
    if found := re.match(r"Expected `([^`]*)`, got `([^`]*)`", reason):
        *kinds, last = [KINDS.get(kind, kind) for kind in found[1].split(" | ")]
        expected = f"{', '.join(kinds)} or {last}" if kinds else last
        given = KINDS.get(found[2], found[2])
        if found[2] == "float" and "int" in found[1] and "float" not in found[1]:
            given = "a number with a point or an exponent"
        return f"{what:.60} is {given}; expected {expected}."
    return f"{what:.60} does not fit ({reason.partition(' - at ')[0].rstrip('.'):.200}); see /openapi.json."


def _fields(expected: Any) -> list[str]:
    """The fields of a msgspec.Struct, of those of a union, or of nothing."""
    structs = [kind for kind in (expected, *get_args(expected)) if hasattr(kind, "__struct_fields__")]
    return [field.encode_name for kind in structs for field in msgspec.structs.fields(kind)]


async def _read(request: Request, server: Server) -> bytearray:
    body = bytearray()  # which grows in place: joining parts of 16 MB takes the event loop milliseconds
    most = server.limits.body_bytes
    account = server.bodies.account(tenant_of(request).name)
    request.scope["state"]["held"].callback(account.close)
    try:
        more_comes = True
        while more_comes:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            part, more_comes = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(part) > most:  # of a body whose length was not declared
                raise _too_large(most)
            account.change(len(part))
            body += part
        return body
    except BaseException:
        # An error and the frames that it passed hold each other until the garbage collector comes by.
        body.clear()
        raise
    finally:
        part, message = b"", {}


def _too_large(most: int) -> RefusedError:
    return RefusedError(
        f"the body is larger than {most:,} bytes; send less at once.",
        status=413,
        code="body_too_large",
        closes=True,
    )


def _field(error: Exception) -> str | None:
    """The field of the body that a validation error names."""
    message = str(error)
    if "unknown field" in message or "missing required field" in message:
        return message.partition("`")[2].partition("`")[0][:LONGEST_NAME]
    name = re.search(r"`\$\.(\w+)", message)
    return name[1] if name else None
