"""Proof that what is on disk is intact: JSON with its own digest, and files with their size and SHA-256."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Annotated, TypeVar

import numpy as np

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import atomic_file, open_file, read_bytes, read_json, reading, sha256
from runtimes.base.ranges import Range
from runtimes.base.records import Word, from_json, json_text, to_json

Record = TypeVar("Record")
Count = Annotated[int, Range(0, 2**53 - 1, whole=True)]  # what every language has exactly
HEXADECIMAL = "0123456789abcdef"
SHA256 = Word("64 lower-case hexadecimal digits", HEXADECIMAL, HEXADECIMAL, 64, 64)
READ_BYTES = 1 << 23  # bytes that are read at a time
LAST_LINE = re.compile(rb'\s*:\s*"[0-9a-f]{64}"\s*}\s*')  # of a sealed file, after the key "digest"


def write_sealed(path: Path, record: Record) -> Record:
    """Writes a record with the field `identity` as JSON, atomically; returns it with the identity it has now.

    The last line of the file is a digest: the SHA-256 of all bytes before the key `"digest"`. The identity
    is the SHA-256 of the whole file, as `sha256sum` prints it; the file does not hold it. So neither depends
    on how a parser reads numbers.
    """
    document = record.to_json() if hasattr(record, "to_json") else to_json(record)
    del document["identity"]
    text = json_text(document, indent=2, ensure_ascii=False)
    head = text.removesuffix("\n}").encode() + b",\n  "
    content = head + f'"digest": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)
    return dataclasses.replace(record, identity=hashlib.sha256(content).hexdigest())  # type: ignore[type-var]


def read_sealed(cls: type[Record], path: Path, *, schema: int, what: str, again: str) -> Record:
    """The record in a sealed JSON file, its schema, keys, types and digest verified, with its `identity`.

    cls: has the field `identity`, which the file does not have. schema: the newest that this version reads.
    what: a noun for the folder. again: the imperative that makes it again. Raises ArtefactError.
    """
    content = read_bytes(path)
    data = read_json(path, content)
    stated = data.get("schema") if isinstance(data, dict) else None
    if isinstance(stated, int) and stated > schema:
        raise ArtefactError(
            f"{path} has schema {stated}, and this version reads up to {schema}; update xl-export."
        )
    other = f"the {what} is damaged or of another version of xl-export: {again}."
    if not isinstance(data, dict) or "identity" in data or content.startswith(codecs.BOM_UTF8):
        raise ArtefactError(f"{path} is not the JSON of the {what}; {other}")
    head, _, tail = bytes(content).rpartition(b'"digest"')
    if data.pop("digest", None) != hashlib.sha256(head).hexdigest() or not LAST_LINE.fullmatch(tail):
        raise ArtefactError(f"{path} was altered: its digest does not match its content; {again}.")
    try:
        return from_json(cls, data | {"identity": hashlib.sha256(content).hexdigest()}, where=str(path))
    except ConfigError as error:
        raise ArtefactError(f"{str(error).rstrip('.')}; {other}") from error


def refuse_other_identity(path: Path, found: str, expected: str | None) -> None:
    """Raises ArtefactError if an identity is expected and another one was found."""
    if expected is not None and found != expected:
        raise ArtefactError(
            f"{path} has the identity {found}, expected {expected:.64}; copy the expected one there, or "
            "change the expected identity."
        )


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Hash and size of a file, as a sealed document records them."""

    sha256: Annotated[str, SHA256]
    num_bytes: Count


def file_facts(path: Path) -> FileFacts:
    """Hash and size of a file as it is now."""
    return FileFacts(sha256=sha256(path), num_bytes=path.stat().st_size)


def verify_file(path: Path, facts: FileFacts, *, record: str, again: str) -> None:
    """Raises ArtefactError if a file is not the one that `record` lists.

    again: the imperative that makes the file again.
    """
    _refuse_other_size(path, facts, again=again)
    _refuse_other_hash(path, sha256(path), facts, record=record, again=again)


def read_verified(path: Path, facts: FileFacts, *, record: str, again: str) -> bytes:
    """The content of a file that is the one that `record` lists; raises ArtefactError for another one.

    The file is read once, and what is returned is what was hashed: later changes of the file do not matter.
    """
    _refuse_other_size(path, facts, again=again)  # before memory is taken for it
    content = read_bytes(path)
    if len(content) != facts.num_bytes:
        raise _other_size(path, len(content), facts, again=again)
    _refuse_other_hash(path, hashlib.sha256(content).hexdigest(), facts, record=record, again=again)
    return content


@contextlib.contextmanager
def reading_verified(path: Path, facts: FileFacts, *, record: str, again: str) -> Iterator[memoryview]:
    """The content of a large file, which another thread hashes while the body of the `with` statement runs.

    Raises ArtefactError at the end of the body, also instead of the body's own Exception, if the file is not
    the one that `record` lists. Until then the body must not pass on anything that it made from the content.
    Other errors of the body, such as KeyboardInterrupt, pass at once.
    """
    _refuse_other_size(path, facts, again=again)  # before memory is taken for it
    # NumPy asks for huge pages, and the first use of their memory takes less time.
    content = memoryview(np.empty(facts.num_bytes, np.uint8))
    digest = hashlib.sha256()
    parts: SimpleQueue[memoryview | None] = SimpleQueue()

    def hash_parts() -> None:
        while (part := parts.get()) is not None:
            digest.update(part)

    hasher = Thread(target=hash_parts, daemon=True)
    hasher.start()
    failure: Exception | None = None
    try:
        with reading(path), open_file(path) as stream:
            at = 0
            while at < len(content) and (length := stream.readinto(content[at : at + READ_BYTES])):
                parts.put(content[at : at + length])
                at += length
        if at < len(content):  # it was cut since its size was read, and the rest was never filled
            raise _other_size(path, at, facts, again=again)
        try:
            yield content
        except Exception as error:  # perhaps because the file was altered, which is reported first
            failure = error
    finally:
        parts.put(None)
    hasher.join()
    _refuse_other_hash(path, digest.hexdigest(), facts, record=record, again=again)
    if failure:
        raise failure


def _refuse_other_size(path: Path, facts: FileFacts, *, again: str) -> None:
    if not path.is_file():
        raise ArtefactError(f"{path} is missing; copy the whole folder, or {again}.")
    size = path.stat().st_size
    if size != facts.num_bytes:
        raise _other_size(path, size, facts, again=again)


def _other_size(path: Path, size: int, facts: FileFacts, *, again: str) -> ArtefactError:
    return ArtefactError(f"{path} has {size} bytes, expected {facts.num_bytes}; copy it again, or {again}.")


def _refuse_other_hash(path: Path, digest: str, facts: FileFacts, *, record: str, again: str) -> None:
    if digest != facts.sha256:
        raise ArtefactError(
            f"{path} was altered: its SHA-256 is not the one in {record}; copy it again, or {again}."
        )
