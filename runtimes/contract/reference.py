"""The reference of an artefact: tokens and the trained model's answers, which any session can replay.

The streams of a reference start with empty memory and run well past the memory length in segments of 1, 7 and
T tokens. One row is restarted on the way. Restarts, segments and answers are all in the file, so replaying
needs no PyTorch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import atomic_file, read_json
from runtimes.base.logits import are_log_probs, log_probability, log_sum_exp
from runtimes.base.records import from_json, to_json
from runtimes.base.sealed import read_verified
from runtimes.contract.session import Session
from runtimes.contract.spec import ANSWERS, EXPORT_AGAIN, REFERENCE, SPEC, Spec

Ints = tuple[int, ...]
Bools = tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Tokens, how they are fed, and the answers to them."""

    tokens: np.ndarray  # int64 [B, N + 1]
    segments: np.ndarray  # int64: the lengths of the segments; their sum is N
    restarts: np.ndarray  # bool [segments, B]: the rows that start a new text at a segment
    log_probs: np.ndarray  # float32 [B, N]: of each next token
    last: np.ndarray  # float32 [B, V]: log-probabilities of every symbol after the last token


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """Where an array is: little-endian numbers of a file from byte `offset`, the last axis fastest."""

    file: str
    dtype: Literal["float32"]
    shape: Ints
    offset: int


@dataclass(frozen=True, kw_only=True)
class ReferenceFile:
    """The content of `reference.json`: a `Reference` whose answers are in `reference.bin`."""

    tokens: tuple[Ints, ...]
    segments: Ints
    restarts: tuple[Bools, ...]
    log_probs: StoredArray
    last: StoredArray


def replay(
    session: Session,
    tokens: np.ndarray,
    segments: Iterable[int],
    restarts: np.ndarray,
    *,
    lead: Iterable[int] = (),
    whole: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """log p of each next token [B, N], and of every symbol after the last token [B, V], over chained
    segments.

    lead: lengths of segments that are fed before; then all rows start a new text. whole: whether the answers
    are computed from the logits of all tokens, which graphs with a large vocabulary return only on request.
    """
    memory = session.start(len(tokens))
    taken = set(session.paths.taken) if session.paths else set()
    for length in lead:
        session.step(tokens[:, :length], memory)
    memory.positions[:] = 0
    if session.paths:
        session.paths.without(taken)  # nothing was compared
    pieces = []
    at = 0
    before_last = None
    for length, restart in zip(segments, restarts, strict=True):
        memory.positions[restart] = 0
        piece = tokens[:, at : at + length]
        if (
            at + length == tokens.shape[1] - 1
        ):  # the last segment is fed twice: it is scored, then predicted from
            before_last = memory.copy()
        targets = tokens[:, at + 1 : at + length + 1]
        if whole:
            logits, memory = session.step(piece, memory)
            log_probs = log_probability(logits, targets)
        else:
            log_probs, memory = session.score(piece, targets, memory)
        pieces.append(log_probs)
        at += length
    assert before_last is not None, "the segments do not end with the tokens"
    last, _ = session.predict(piece, before_last)
    return np.concatenate(pieces, axis=1), last - log_sum_exp(last)[:, None]


def save_reference(folder: Path, reference: Reference) -> None:
    """Writes a reference as `reference.json` and `reference.bin`, which need no library to be read."""
    answers = {"log_probs": reference.log_probs, "last": reference.last}
    stored = {}
    offset = 0
    with atomic_file(folder / ANSWERS) as temporary, open(temporary, "wb") as stream:
        for name, array in answers.items():
            content = np.ascontiguousarray(array, "<f4").tobytes()
            stream.write(content)
            stored[name] = StoredArray(file=ANSWERS, dtype="float32", shape=array.shape, offset=offset)
            offset += len(content)
    document = ReferenceFile(
        tokens=reference.tokens.tolist(),
        segments=reference.segments.tolist(),
        restarts=reference.restarts.tolist(),
        **stored,
    )
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in to_json(document).items()]
    with atomic_file(folder / REFERENCE) as temporary:
        temporary.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n", encoding="utf-8")


def load_reference(folder: Path, spec: Spec) -> Reference:
    """The reference in the folder of an artefact or of an engine, its hashes, shapes and values checked.

    Raises ArtefactError if anything does not fit.
    """
    path = folder / REFERENCE
    contents = {
        name: read_verified(folder / name, spec.files[name], record=SPEC, again=EXPORT_AGAIN)
        for name in (REFERENCE, ANSWERS)
    }
    arrays = _read_arrays(path, contents)
    reference = Reference(**arrays)
    batch, length = reference.log_probs.shape if reference.log_probs.ndim == 2 else (0, 0)
    expected = {
        "tokens": ("int64", (batch, length + 1)),
        "segments": ("int64", reference.segments.shape[:1]),
        "restarts": ("bool", (*reference.segments.shape[:1], batch)),
        "log_probs": ("float32", (batch, length)),
        "last": ("float32", (batch, spec.model.vocab_size)),
    }
    found = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    fits = (
        found == expected
        and reference.log_probs.size
        and reference.segments.ndim == 1
        and reference.segments.sum() == length
    )
    tokens = reference.tokens
    if not fits or reference.segments.min() < 1 or tokens.min() < 0 or tokens.max() >= spec.model.vocab_size:
        raise ArtefactError(f"{path} does not hold a reference of this model; export the artefact again.")
    if not (are_log_probs(reference.log_probs) and are_log_probs(reference.last)):
        raise ArtefactError(f"{path} has answers that are not log-probabilities; export the artefact again.")
    return reference


def _read_arrays(path: Path, contents: dict[str, bytes]) -> dict[str, np.ndarray]:
    """The arrays in `reference.json` and `reference.bin`; no memory is taken before their sizes are known."""
    data = read_json(path, contents[REFERENCE])
    try:
        document = from_json(ReferenceFile, data, where=str(path))
        arrays = {
            "tokens": np.array(document.tokens, np.int64),
            "segments": np.array(document.segments, np.int64),
            "restarts": np.array(document.restarts, bool),
        }
    except ConfigError as error:
        raise ArtefactError(f"{str(error).rstrip('.')}; export the artefact again.") from error
    except (ValueError, OverflowError) as error:  # rows of unequal length, or an integer beyond 64 bits
        raise ArtefactError(
            f"{path} has rows of unequal length or numbers beyond 64 bits; export the artefact again."
        ) from error
    content = contents[ANSWERS]
    for name, stored in (("log_probs", document.log_probs), ("last", document.last)):
        count = math.prod(stored.shape)
        inside = (
            stored.file == ANSWERS and min((stored.offset, *stored.shape)) >= 0 and len(stored.shape) == 2
        )
        if not inside or stored.offset + 4 * count > len(content):
            raise ArtefactError(
                f"{path} says that {name} has the shape {list(stored.shape)!s:.60} from byte "
                f"{stored.offset!s:.30} of {stored.file!a:.60} on, which {ANSWERS} with its {len(content)} "
                "bytes does not hold; export the artefact again."
            )
        flat = np.frombuffer(content, "<f4", count, stored.offset)
        arrays[name] = flat.reshape(stored.shape).astype(np.float32)
    return arrays
