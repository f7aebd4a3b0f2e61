"""Proof that what is on disk is intact: JSON with its own digest, and files with their size and SHA-256."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import Content, open_file, reading, sha256, write_json
from runtimes.base.records import from_json, to_json

Record = TypeVar("Record")
BLOCK = 1 << 23  # bytes that are read at a time


def identity_of(document: Any) -> str:
    """Hexadecimal SHA-256 of a JSON document. The order of its keys does not matter."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, document: dict[str, Any]) -> None:
    """Writes a JSON document together with its digest, atomically."""
    write_json(path, {**document, "digest": identity_of(document)})


def parse_sealed(
    cls: type[Record],
    data: Any,
    *,
    where: str,
    schema: int,
    what: str,
    again: str,
    document: Callable[[Record], dict[str, Any]] = to_json,
) -> Record:
    """The record in a sealed JSON document, its schema, keys, types and digest verified.

    where: the source, for messages. schema: the newest that this version reads. what: a noun for the folder.
    again: the imperative that makes it again. document: the JSON of a record, over which its digest is taken.
    Raises ArtefactError.
    """
    stated = data.get("schema") if isinstance(data, dict) else None
    if isinstance(stated, int) and stated > schema:
        raise ArtefactError(
            f"{where} has schema {stated}, and this version reads up to {schema}; "
            "update with `pip install -U xl-export`."
        )
    try:
        content = {k: v for k, v in data.items() if k != "digest"} if isinstance(data, dict) else data
        record = from_json(cls, content, where=where)
    except ConfigError as error:
        raise ArtefactError(
            f"{str(error).rstrip('.')}; the {what} is damaged or of another version of xl-export: {again}."
        ) from error
    if data.get("digest") != identity_of(document(record)):
        raise ArtefactError(f"{where} was altered: its digest does not match its content; {again}.")
    return record


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Hash and size of a file, as a sealed document records them."""

    sha256: str
    num_bytes: int


def file_facts(path: Path) -> FileFacts:
    """Hash and size of a file as it is now."""
    return FileFacts(sha256=sha256(path), num_bytes=path.stat().st_size)


def verify_file(path: Path, facts: FileFacts, *, record: str, again: str) -> None:
    """Raises ArtefactError where a file is not the one that `record` lists.

    again: the imperative that makes the file again.
    """
    _refuse_other_size(path, facts, again=again)
    _refuse_other_hash(path, sha256(path), facts, record=record, again=again)


def read_verified(path: Path, facts: FileFacts, *, record: str, again: str) -> bytearray:
    """The content of a file that is the one that `record` lists; raises ArtefactError where it is another.

    The file is read once, and what is returned is what was hashed: whatever happens to the file afterwards
    changes nothing.
    """
    _refuse_other_size(path, facts, again=again)  # before memory is taken for it
    content = bytearray(facts.num_bytes)
    with _verifying(path, memoryview(content), facts, record=record, again=again):
        return content


@contextlib.contextmanager
def reading_verified(path: Path, facts: FileFacts, *, record: str, again: str) -> Iterator[memoryview]:
    """The content of a large file, which another thread hashes while the body of the `with` statement runs.

    Raises ArtefactError at the end of the body, also in the place of the body's own Exception, where the file
    is not the one that `record` lists. Until then the body must give nothing away that it made of the
    content. Other errors of the body, such as KeyboardInterrupt, go through at once.
    """
    _refuse_other_size(path, facts, again=again)  # before memory is taken for it
    # NumPy asks for huge pages, and the first use of their memory takes less time.
    content = memoryview(np.empty(facts.num_bytes, np.uint8))
    with _verifying(path, content, facts, record=record, again=again):
        yield content


@contextlib.contextmanager
def reading_files(
    folder: Path,
    files: Mapping[str, FileFacts],
    *,
    wanted: Collection[str],
    large: Collection[str],
    record: str,
    again: str,
) -> Iterator[dict[str, Content]]:
    """The content of the wanted files of a folder, each of which is the one that `record` lists.

    files: all that `record` lists; those that are not wanted are verified too. large: names of files that
    `reading_verified` reads; all others are verified before the body of the `with` statement runs.
    """
    contents: dict[str, Content] = {}
    with contextlib.ExitStack() as verified_later:
        for name, facts in files.items():
            path = folder / name
            if name not in wanted:
                verify_file(path, facts, record=record, again=again)
            elif name in large:
                content = reading_verified(path, facts, record=record, again=again)
                contents[name] = verified_later.enter_context(content)
            else:
                contents[name] = read_verified(path, facts, record=record, again=again)
        yield contents


@contextlib.contextmanager
def _verifying(
    path: Path, content: memoryview, facts: FileFacts, *, record: str, again: str
) -> Iterator[None]:
    """Fills `content` from a file, and hashes it in another thread until the end of the body."""
    digest = hashlib.sha256()
    hasher, hashed = ThreadPoolExecutor(1), []
    try:
        with reading(path), open_file(path) as stream:
            at = 0
            while at < len(content) and (length := stream.readinto(content[at : at + BLOCK])):
                hashed.append(hasher.submit(digest.update, content[at : at + length]))
                at += length
        if at < len(content):  # it was cut since its size was seen, and the rest of `content` was never read
            raise _other_size(path, at, facts, again=again)
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # perhaps for the reason that the file was altered, which is said first
            failure = error
        for part in hashed:
            part.result()
        _refuse_other_hash(path, digest.hexdigest(), facts, record=record, again=again)
        if failure:
            raise failure
    finally:
        hasher.shutdown(cancel_futures=True)  # what still waits is of no use after an error, such as Ctrl-C


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
