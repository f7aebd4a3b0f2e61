"""Files of streams that a client may have made: whatever they hold is refused, or harms only that client."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtimes
from runtimes import Session
from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.tensors_file import read_tensors, write_tensors
from tests.serve.streams.conftest import Advance, assert_same
from xl_export.serve.core.state import StreamState, most_rewound
from xl_export.serve.streams import snapshot
from xl_export.serve.streams.snapshot import most_snapshot_bytes, read_snapshot, write_snapshot

Arrays = dict[str, np.ndarray]
Change = Callable[[Arrays, dict[str, str]], Any]


@pytest.fixture
def state(fresh: StreamState, advance: Advance, tokens: np.ndarray) -> StreamState:
    return advance(fresh, tokens[:45])


@pytest.fixture
def file(state: StreamState, tmp_path: Path) -> Path:
    path = tmp_path / "a.stream"
    with open(path, "wb") as stream:
        write_snapshot(state, stream)
    return path


def read(content: bytes | Path, session: Session) -> StreamState:
    return read_snapshot(io.BytesIO(content.read_bytes() if isinstance(content, Path) else content), session)


def test_a_snapshot_is_the_stream(
    file: Path, state: StreamState, session: Session, fresh: StreamState, tokens: np.ndarray
) -> None:
    """Also one without logits, as at position 0 and after a rewind. Python reads its memory."""
    assert_same(read(file, session), state)
    assert file.stat().st_size <= most_snapshot_bytes(session)
    buffer = io.BytesIO()
    write_snapshot(fresh, buffer)
    assert_same(read(buffer.getvalue(), session), fresh)
    assert state.logits is not None
    never = replace(
        state, logits=put(state.logits.copy(), -np.inf)
    )  # a token that the model never lets follow
    write_snapshot(never, buffer := io.BytesIO())
    assert_same(read(buffer.getvalue(), session), never)
    memory, going_on = runtimes.load_memory(file, session), tokens[45:53][None]
    expected, _ = session.step(going_on, state.memory.copy())
    np.testing.assert_array_equal(session.step(going_on, memory)[0], expected)


def test_a_saved_memory_is_a_stream_that_goes_on_but_not_back(
    state: StreamState, session: Session, tmp_path: Path, advance: Advance, tokens: np.ndarray
) -> None:
    runtimes.save_memory(state.memory, tmp_path / "memory")
    found = read(tmp_path / "memory", session)
    assert (found.logits, len(found.tail), most_rewound(found, session=session)) == (None, 0, 0)
    first, second = advance(found, tokens[45:50]).logits, advance(state, tokens[45:50]).logits
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(first, second)


def with_logits(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def changed(arrays: Arrays, facts: dict[str, str]) -> None:
        logits = change(np.frombuffer(base64.b64decode(facts["logits"]), "<f4").copy())
        facts["logits"] = base64.b64encode(logits.tobytes()).decode()

    return changed


def with_memory(change: Callable[[np.ndarray], Any]) -> Change:
    def changed(arrays: Arrays, facts: dict[str, str]) -> None:
        name = next(name for name in arrays if name != "positions")
        arrays[name] = change(arrays[name].copy())

    return changed


def put(array: np.ndarray, value: float) -> np.ndarray:
    array.flat[0] = value
    return array


def twice(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2, axis=0)


HOSTILE: list[tuple[str, Change]] = [
    ("is no number from 0 to", lambda arrays, facts: facts.update(tail="1 " * 8 + "9999")),
    ("is no number from 0 to", lambda arrays, facts: facts.update(tail="-1")),
    ("is no number from 0 to", lambda arrays, facts: facts.update(tail="1" * 5000)),
    ("is no number from 0 to", lambda arrays, facts: facts.update(tail="1_0")),
    ("do not fit its memory", lambda arrays, facts: facts.update(tail="1 " * 500)),
    ("is no number from 0 to", lambda arrays, facts: facts.update(furthest="9" * 19)),
    ("is no number from 0 to", lambda arrays, facts: facts.update(furthest="")),
    ("do not fit its memory", lambda arrays, facts: facts.update(furthest="3")),
    ("cannot be read", lambda arrays, facts: facts.update(logits="AAAA")),
    ("cannot be read", lambda arrays, facts: facts.update(logits="é")),
    ("do not fit its memory", with_logits(lambda logits: logits[1:])),
    ("without a finite maximum", with_logits(lambda logits: put(logits, np.nan))),
    ("without a finite maximum", with_logits(lambda logits: put(logits, np.inf))),
    ("does not begin as", lambda arrays, facts: facts.update(page="x" * (1 << 20))),
    ("holds no stream", lambda arrays, facts: facts.update(format="another")),
    ("holds no stream", lambda arrays, facts: arrays.pop("positions")),
    ("other weights computed", lambda arrays, facts: facts.update(weights="0" * 64)),
    ("another memory", lambda arrays, facts: facts.update(layout="0" * 64)),
    ("holds no stream", lambda arrays, facts: facts.pop("layout")),
    ("damaged", lambda arrays, facts: arrays.update(positions=np.array([[45]]))),
    ("damaged", lambda arrays, facts: arrays.update(positions=np.array([1 << 63], np.uint64).view(np.int64))),
    ("damaged|holds 2 streams", lambda arrays, facts: arrays.update(positions=np.array([45, 45]))),
    ("holds 2 streams", lambda arrays, facts: arrays.update({n: twice(x) for n, x in arrays.items()})),
    ("damaged", lambda arrays, facts: arrays.update(extra=np.zeros(1, np.float32))),
    ("not finite", with_memory(lambda array: put(array, np.nan))),
    ("not finite", with_memory(lambda array: put(array, -np.inf))),
    ("damaged", with_memory(lambda array: array[..., :-1])),
    ("damaged", with_memory(lambda array: array.astype(np.int64))),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_what_a_client_made_up_is_refused(
    file: Path, session: Session, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although all hashes in the file are right."""
    sentence, change = HOSTILE[number]
    arrays, facts = read_tensors(file)
    facts = {name: text for name, text in facts.items() if name not in ("sha256", "facts_sha256")}
    change(arrays, facts)
    buffer = io.BytesIO()
    write_tensors(buffer, arrays, {**facts, "facts_sha256": snapshot._digest(facts)})
    monkeypatch.setattr(
        snapshot, "most_snapshot_bytes", lambda session: 1 << 62
    )  # the header has a bound too
    with pytest.raises((ArtefactError, StreamError), match=sentence):
        read(buffer.getvalue(), session)


def test_every_altered_byte_is_refused(file: Path, session: Session) -> None:
    """The places are spread over the whole file; the name of the artefact is for information only."""
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    end = len(content[:header].rstrip())
    told = content.index(b'"artefact": "')
    free = range(told, told + 80)
    for place in sorted({*range(0, end, 7), *range(header, len(content), 997), len(content) - 1} - {*free}):
        altered = bytearray(content)
        altered[place] ^= 1
        with pytest.raises((ArtefactError, StreamError)):
            read(bytes(altered), session)
    for length in (0, 5, header - 1, header, len(content) - 1):
        with pytest.raises((ArtefactError, StreamError)):
            read(content[:length], session)


def test_a_file_of_10_gb_is_refused_unread(file: Path, session: Session) -> None:
    """It has holes: reading it would fill the memory."""
    with open(file, "r+b") as stream:
        stream.truncate(10 << 30)
        with pytest.raises(StreamError, match=r"10,737,418,240 bytes, and one of this model has at most \d"):
            read_snapshot(stream, session)


def test_values_that_are_not_finite_are_not_saved(state: StreamState) -> None:
    next(iter(state.memory.tensors.values())).flat[0] = np.nan
    with pytest.raises(StreamError, match="not finite"):
        write_snapshot(state, io.BytesIO())
