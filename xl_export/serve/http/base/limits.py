"""Limits of what one client may ask, accounts of what all ask at once, and bodies decoded within them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar, get_args

import msgspec

from xl_export.serve.core.settings import Limits
from xl_export.serve.http.base.errors import RefusedError

MAX_LISTED_FIELDS = 8  # in a message
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a half of a pair, in JSON's spelling
LONGEST_NAME = 60  # characters of a field's name that are shown or compared
Body = TypeVar("Body")
KINDS = {  # how messages name msgspec's types
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "a boolean",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
BOUNDS = {">=": "at least", "<=": "at most", ">": "more than"}


class Bound:
    """Counts what the requests that are served or wait have at once. Only the event loop uses it.

    what: what is counted, in messages.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self.total = 0
        """Amount held now."""

    def take(self, count: int) -> None:
        """Adds `count`, until `give_back`; raises RefusedError if the total is too large."""
        if self.total + count > self._most:
            raise RefusedError(
                f"the server has {self.total:,} {self._what} at once and may have no more than "
                f"{self._most:,}; ask again when a request has ended.",
                status=429,
                code="too_many",
                retry_after=1,
            )
        self.total += count

    def give_back(self, count: int) -> None:
        """Subtracts `count`."""
        self.total -= count

    @contextmanager
    def one(self) -> Iterator[None]:
        """While the block runs, there is one more; raises what `take` raises."""
        self.take(1)
        try:
            yield
        finally:
            self.give_back(1)


def refuse_compressed(headers: Mapping[str, str]) -> None:
    """Raises RefusedError for a body that would have to be decompressed, which could make it any size."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise RefusedError(
            f"the body has the header Content-Encoding: {encoding:.40}; send it uncompressed, without that "
            "header.",
            status=415,
            code="compressed",
            closes=True,
        )


def refuse_outside(name: str, value: int, least: int, most: int) -> None:
    """Raises RefusedError for a field that is not within its range."""
    if not least <= value <= most:
        raise RefusedError(f"{name} is {value}; expected {least} to {most}.", param=name)


def refuse_long_prompt(limits: Limits, tokens: int, param: str) -> None:
    """Raises RefusedError for more tokens than a request may have."""
    if tokens > limits.prompt_tokens:
        raise RefusedError(
            f"the request has {tokens:,} tokens or more, and this server accepts {limits.prompt_tokens:,}; "
            "send fewer, or append them to a stream in parts.",
            param=param,
            code="prompt_too_long",
        )


def refuse_long_answer(limits: Limits, tokens: int, likeliest: int | None, param: str) -> None:
    """Raises RefusedError for more tokens than an answer can hold.

    likeliest: how many of the likeliest tokens each has, next to its own log-probability; None for tokens
    without log-probabilities, of which one choice of `max_tokens` is held however large that limit is.
    """
    most = max(limits.log_probs, limits.max_tokens) if likeliest is None else limits.log_probs
    count = tokens * (1 + (likeliest or 0))
    if count > most:
        kind = "tokens" if likeliest is None else "log-probabilities"
        raise RefusedError(
            f"the answer could have {count:,} {kind} at once, and this server holds {most:,}; ask for fewer, "
            "in parts, or for a stream.",
            param=param,
        )


# Reads a body that need not be JSON, from its bytes, the headers and the limits.
Reads: TypeAlias = Callable[[bytearray, Mapping[str, str], Limits], Any]


def decoded(body: bytearray, kind: type[Body]) -> Body:
    """A body in JSON as that type; raises RefusedError with one sentence for anything else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise misfit(error, kind, body) from None


def misfit(error: Exception, expected: Any, body: bytes | bytearray | str = b"") -> RefusedError:
    """The refusal of a document that is not what was expected, from msgspec's error.

    expected: a msgspec.Struct or a union of them; its fields are compared with one that is not known. body:
    what was decoded.
    """
    why = str(error)
    if isinstance(error, msgspec.ValidationError):
        return _wrong_field(why, expected, body)
    if isinstance(error, UnicodeDecodeError):
        return RefusedError("the body is not UTF-8; send a JSON object that is encoded as UTF-8.")
    if isinstance(error, RecursionError):
        return RefusedError("the body is nested too deeply; send a plain JSON object.")
    if not body:
        return RefusedError("there is no body; send a JSON object.")
    if "truncated" in why:  # msgspec calls half of a surrogate pair so too
        if not isinstance(body, str) and SURROGATE.search(body):
            return RefusedError("a text has half of a character, such as \\ud800; send whole characters.")
        return RefusedError("the body is not JSON, because it ends too early; send a whole JSON object.")
    why = why.removeprefix("JSON is malformed: ").rstrip(".")
    return RefusedError(f"the body is not JSON ({why:.200}); send a JSON object.")


def _wrong_field(why: str, expected: Any, body: bytes | bytearray | str) -> RefusedError:
    """The refusal of a document with a field that is not what was expected."""
    reason, _, place = why.partition(" - at ")
    where = place.rpartition("`$")[2].strip("`.").replace("[...]", "[]")[:LONGEST_NAME]
    if " field `" in reason:
        name = reason.partition("`")[2].partition("`")[0][:LONGEST_NAME]
        if "missing" in reason:
            return RefusedError(
                f"the field {name!r} is missing; see /openapi.json for what it is.", param=name
            )
        fix = "leave it out, or see /openapi.json for those that are"
        fields = [] if where else _fields(expected)
        if near := get_close_matches(name, fields):
            # By letters, max_completion_tokens would be closest to min_tokens.
            words = set(name.split("_"))
            meant = max(near, key=lambda field: len(words.intersection(field.split("_"))))
            fix = f"did you mean {meant!r}? If not, {fix}"
        elif 0 < len(fields) <= MAX_LISTED_FIELDS:
            fix = f"expected {', '.join(fields)}"
        of = f" of {where}" if where else ""
        return RefusedError(f"the field {name!r}{of} is not known here; {fix}.", param=name)
    what = where or "the body"
    param = re.match(r"\w*", where)[0] or None  # type: ignore[index]
    if place.startswith("`key`"):
        what = f"a key of {what}"
    if bound := re.fullmatch(r"Expected `(?:int|float)` (>=|<=|>) (\S+)", reason):
        sentence = f"{what} is {_value_at(place, body)}; expected {BOUNDS[bound[1]]} {float(bound[2]):g}."
        return RefusedError(sentence, param=param)
    found = re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", reason)
    if found is None:
        return RefusedError(
            f"{what} does not fit ({reason.rstrip('.'):.200}); see /openapi.json.", param=param
        )
    *kinds, last = [KINDS.get(kind, kind) for kind in found[1].split(" | ")]
    wanted = f"{', '.join(kinds)} or {last}" if kinds else last
    given = KINDS.get(found[2], found[2])
    if found[2] == "float" and "float" not in found[1]:
        given = "a number with a point or an exponent"
    return RefusedError(f"{what} is {given}; expected {wanted}.", param=param)


def _value_at(place: str, body: bytes | bytearray | str) -> str:
    """The number at a place of a document that msgspec names, such as `$.tokens[2]`."""
    if "..." in place:  # a value of an object
        return "out of range"
    value = msgspec.json.decode(body)
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
        value = value[name] if name else value[int(index)]
    return f"{value!r:.40}"


def _fields(expected: Any) -> list[str]:
    """The fields of a msgspec.Struct, of all members of a union, or of nothing."""
    structs = [kind for kind in (expected, *get_args(expected)) if hasattr(kind, "__struct_fields__")]
    return [field.encode_name for kind in structs for field in msgspec.structs.fields(kind)]


def too_large(most: int, fix: str = "send less at once") -> RefusedError:
    """The refusal of a body of more bytes."""
    return RefusedError(
        f"the body is larger than {most:,} bytes; {fix}.", status=413, code="body_too_large", closes=True
    )
