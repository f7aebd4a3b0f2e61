"""A stream as one signed file: download it, keep it, move it to another server of the same artefact.

The file is a file of saved streams (docs/reference/saved-streams.md), so `load_memory`, C++ and JavaScript
read the memory in it. The header has the server's own facts as further texts. The first of them is the
signature, at a place that is always the same: it is checked before anything else of the file is read or
believed.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtimes.base.errors import ArtefactError, ConfigError, StreamError
from runtimes.base.files import atomic_file, open_file, reading, writing
from runtimes.base.tensors_file import LENGTH_BYTES, tensors_in
from runtimes.contract.checks import memory_of, refuse_no_streams
from runtimes.contract.memory import MAX_POSITION, write_memory
from runtimes.contract.session import Session, is_language_model
from runtimes.contract.tensors import row_bytes
from xl_export.serve.core.state import StreamState

KEY_FILE = "snapshot.key"
KEY_BYTES = 32
UNSIGNED = b"0" * 64  # takes the place of the signature while it is computed
BEFORE = b'{"__metadata__": {"signature": "'  # the beginning of every header
SIGNATURE_AT = LENGTH_BYTES + len(BEFORE)
FACTS_BYTES = 1 << 16  # of a header, without the logits and the tail: its tensors' names and places


def server_key(folder: Path) -> bytes:
    """The secret with which a server signs its snapshots: 32 random bytes in a file of its state folder.

    The file is made if there is none, readable only by its owner. Servers that share snapshots
    have copies of one file. Raises ConfigError for a file that others may read.
    """
    path = folder / KEY_FILE
    if not path.exists():
        _make_key(path)
    with reading(path), open_file(path) as stream:
        mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        text = stream.read(2 * KEY_BYTES + 2)
    if mode & 0o077:
        raise ConfigError(f"{path} has the mode {mode:03o}, so others may read it; run `chmod 600 {path}`.")
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{path} is not a key of {KEY_BYTES} bytes in hexadecimal; copy the key file of the server whose "
            "snapshots you want, or remove it to make a new one."
        )
    return key


def _make_key(path: Path) -> None:
    """Makes the file as a whole: of two servers that start at once, one makes it and both read it."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(f"{secrets.token_hex(KEY_BYTES)}\n".encode())
                stream.flush()
                os.fsync(stream.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(hidden, path)
        finally:
            hidden.unlink()


def write_snapshot(state: StreamState, path: Path, *, key: bytes) -> None:
    """Writes a stream to a signed file, atomically.

    The memory of a state is never stepped. So several threads may write one while an engine reads it.
    Raises UserError if the disk is full, and StreamError for a memory with values that are not finite.
    """
    logits = b"" if state.logits is None else np.ascontiguousarray(state.logits, "<f4").tobytes()
    notes = {
        "signature": UNSIGNED.decode(),
        "furthest": str(state.written),
        "tail": " ".join(map(str, state.tail.tolist())),
        "logits": base64.b64encode(logits).decode(),
        **({"note": state.note} if state.note else {}),
    }
    with atomic_file(path) as temporary, open(temporary, "wb+") as stream:
        write_memory(state.memory, stream, notes)
        stream.seek(0)
        signature = _signature(_header(stream, most=1 << 62), key)
        stream.seek(SIGNATURE_AT)
        stream.write(signature)


def read_snapshot(
    path: Path, session: Session, *, key: bytes, name: str = "the snapshot", note_bytes: int = 0
) -> StreamState:
    """The stream in a file that `write_snapshot` wrote, ready to go on bit for bit.

    name: of the file, for messages. note_bytes: of the longest note that it may have. Raises ArtefactError
    for a file that is altered or signed with another key, and StreamError for the stream of another artefact.
    The signature of the header is checked before it is parsed, and the SHA-256 in the header before the
    numbers become arrays. No more than a snapshot of this session has is read.
    """
    with reading(path), open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > (most := most_snapshot_bytes(session) + note_bytes):
            raise StreamError(
                f"{name} has {size:,} bytes, and one of this model has at most {most:,}; give a file that a "
                "server of this artefact wrote."
            )
        header = _header(stream, most=_most_header_bytes(session) + note_bytes)
        given = header[SIGNATURE_AT : SIGNATURE_AT + len(UNSIGNED)]
        if header[LENGTH_BYTES:SIGNATURE_AT] != BEFORE:
            raise ArtefactError(
                f"{name} does not begin as a snapshot of a stream does; give the file as the server sent it, "
                "every byte of it and nothing else."
            )
        if not hmac.compare_digest(given, _signature(header, key)):
            raise ArtefactError(
                f"{name} was altered, or no server with this key signed it; take it again from the server, "
                f"or give both servers the same {KEY_FILE}."
            )
        stream.seek(0)
        arrays, facts = tensors_in(stream, Path(name))
    refuse_no_streams(facts, arrays, name)
    memory = memory_of(facts, arrays, session, Path(name))
    tail = np.array(facts.get("tail", "").split(), np.int64)
    try:
        content = base64.b64decode(facts.get("logits", ""), validate=True)
    except binascii.Error as error:
        raise ArtefactError(f"{name} holds no readable logits; take it again from the server.") from error
    written = int(facts.get("furthest", "-1"))
    position = int(memory.positions[0])
    fits = len(content) in (0, _logits_bytes(session)) and len(tail) <= session.rule.segment + 1
    if memory.batch != 1 or not fits or not 0 <= position <= written <= MAX_POSITION:
        raise ArtefactError(f"{name} does not hold one whole stream; take it again from the server.")
    logits = np.frombuffer(content, "<f4").astype(np.float32) if content else None
    note = facts.get("note", "")
    return StreamState(memory=memory, logits=logits, tail=tail, written=written, note=note)


def most_snapshot_bytes(session: Session) -> int:
    """The size in bytes that no snapshot of this session exceeds: refuse larger ones before they are read."""
    numbers = row_bytes(session.state) + 8
    return LENGTH_BYTES + _most_header_bytes(session) + numbers


def _most_header_bytes(session: Session) -> int:
    """Facts and tensors' names and places, the tail (up to 20 digits an id), and the logits in base64."""
    tail = 20 * (session.rule.segment + 1)
    logits = 4 * ((_logits_bytes(session) + 2) // 3)
    return FACTS_BYTES + 256 * len(session.state) + tail + logits


def _logits_bytes(session: Session) -> int:
    """The bytes of the logits of one token; 0 for a model with named inputs."""
    return 4 * session.vocab.size if is_language_model(session) else 0


def _header(stream: BinaryIO, *, most: int) -> bytes:
    """The first bytes of a file: the length of its header and the header, unparsed, or as far as it goes."""
    length = stream.read(LENGTH_BYTES)
    return length + stream.read(min(int.from_bytes(length, "little"), most))


def _signature(header: bytes, key: bytes) -> bytes:
    """HMAC-SHA256 of length and header, in hexadecimal, as if the header had no signature yet.

    The header has the SHA-256 of the numbers, so this signs the whole file and reads a small part of it.
    """
    unsigned = header[:SIGNATURE_AT] + UNSIGNED + header[SIGNATURE_AT + len(UNSIGNED) :]
    return hmac.new(key, unsigned, hashlib.sha256).hexdigest().encode()
