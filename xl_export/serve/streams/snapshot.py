"""A stream as one file of saved streams: download it, keep it, restore it on another server.

`load_memory`, C++ and JavaScript read the memory in it (docs/reference/saved-streams.md). The header has the
server's own facts as further texts: the last tokens, the logits of the next one, and how far the ring was
written. A client may send any file, so each fact is checked before it is used. A file that passes all checks
can only give wrong answers to the client that sent it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.tensors_file import LENGTH_BYTES, tensors_in
from runtimes.contract.memory import MAX_POSITION
from runtimes.contract.saved_streams import memory_of, refuse_no_streams, write_memory
from runtimes.contract.session import Session, is_language_model
from xl_export.serve.core.state import StreamState

FACTS = ("furthest", "tail", "logits")
FACTS_BYTES = 1 << 16  # of a header, without the logits and the tail: its tensors' names and places
DIGITS = 19  # decimal digits of the largest position


def write_snapshot(state: StreamState, stream: BinaryIO) -> None:
    """Writes a stream to a file that is open for writing.

    The memory of a state is never stepped, so several threads may write it while an engine reads it. Raises
    StreamError for a memory with values that are not finite.
    """
    logits = b"" if state.logits is None else np.ascontiguousarray(state.logits, "<f4").tobytes()
    facts = {
        "furthest": str(state.furthest),
        "tail": " ".join(map(str, state.tail.tolist())),
        "logits": base64.b64encode(logits).decode(),
    }
    write_memory(state.memory, stream, {**facts, "facts_sha256": _digest(facts)})


def read_snapshot(
    stream: BinaryIO, session: Session, *, name: str = "the snapshot", adopt: bool = False
) -> StreamState:
    """The stream in a file that `write_snapshot` wrote, which continues bit for bit, or in one with a single
    row that `save_memory` wrote.

    name: of the file, for messages. adopt: whether other weights may have computed it. Raises ArtefactError
    for a damaged file, and StreamError for a stream that the session cannot continue. Nothing is read of
    a file that is larger than any snapshot.
    """
    size = stream.seek(0, io.SEEK_END)
    if size > (most := most_snapshot_bytes(session)):
        raise StreamError(
            f"{name} has {size:,} bytes, and one of this model has at most {most:,}; give a snapshot of a "
            "stream of this model."
        )
    stream.seek(0)
    if int.from_bytes(stream.read(LENGTH_BYTES), "little") > _most_header_bytes(session):
        raise ArtefactError(f"{name} does not begin as a snapshot of a stream does; take it again.")
    stream.seek(0)
    arrays, facts = tensors_in(stream, Path(name))
    refuse_no_streams(facts, arrays, name)
    memory = memory_of(facts, arrays, session, name, adopt=adopt)
    if memory.batch != 1:
        raise ArtefactError(f"{name} holds {memory.batch} streams; expected one.")
    own = not {"tail", "logits", "facts_sha256"}.isdisjoint(facts)
    if own and facts.get("facts_sha256") != _digest(facts):
        raise ArtefactError(f"{name} is damaged: its facts do not match their SHA-256; take it again.")
    position = int(memory.positions[0])
    segment = session.rule.segment
    vocab = session.vocab.size if is_language_model(session) else 0
    try:
        tail = np.array([_number(text, vocab - 1) for text in facts.get("tail", "").split()], np.int64)
        # Without this fact the tokens of a whole segment may have been written over: none is taken back.
        furthest = _number(facts.get("furthest", str(min(position + segment, MAX_POSITION))), MAX_POSITION)
        logits = np.frombuffer(base64.b64decode(facts.get("logits", ""), validate=True), "<f4")
    except ValueError as error:
        raise ArtefactError(f"{name} has facts of a stream that cannot be read ({error}).") from error
    if len(logits) not in (0, vocab) or len(tail) > min(position, segment + 1) or furthest < position:
        raise ArtefactError(f"{name} has facts that do not fit its memory; take it again from the server.")
    if len(logits) and not np.isfinite(logits.max()):  # -inf is the logit of a token that never follows
        raise ArtefactError(f"{name} has logits without a finite maximum; take it again from the server.")
    return StreamState(
        memory=memory, logits=logits.astype(np.float32) if len(logits) else None, tail=tail, furthest=furthest
    )


def most_snapshot_bytes(session: Session) -> int:
    """The size in bytes that no snapshot exceeds that this session can continue, in whatever precision."""
    sizes: list[int] = [
        max(4, np.dtype(tensor.dtype).itemsize) * math.prod(tensor.row) for tensor in session.state
    ]
    return LENGTH_BYTES + _most_header_bytes(session) + sum(sizes) + 8


def _most_header_bytes(session: Session) -> int:
    """Facts and tensors' names and places, the tail (up to 20 digits an id), and the logits in base64."""
    vocab = session.vocab.size if is_language_model(session) else 0
    return FACTS_BYTES + 256 * len(session.state) + 20 * (session.rule.segment + 1) + 6 * vocab


def _digest(facts: Mapping[str, str]) -> str:
    """The SHA-256 of the facts; the file has another one of the memory."""
    return hashlib.sha256("\n".join(facts.get(name, "") for name in FACTS).encode()).hexdigest()


def _number(text: str, most: int) -> int:
    """A whole number from 0 to `most`; raises ValueError for any other text."""
    if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS) or int(text) > most:
        raise ValueError(f"{text!a:.30} is no number from 0 to {most}")
    return int(text)
