"""Signed files of streams: nothing is believed of a file that this server, or one with its key, has not
written.
"""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import numpy as np
import pytest

import runtimes
from runtimes import Session
from runtimes.base.errors import ArtefactError, ConfigError, StreamError
from tests.serve.streams.conftest import KEY, Advance, assert_same
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams import snapshot
from xl_export.serve.streams.snapshot import most_snapshot_bytes, read_snapshot, server_key, write_snapshot


@pytest.fixture
def state(fresh: StreamState, advance: Advance, tokens: np.ndarray) -> StreamState:
    return advance(fresh, tokens[:45])


@pytest.fixture
def file(state: StreamState, tmp_path: Path) -> Path:
    write_snapshot(state, tmp_path / "a.stream", key=KEY)
    return tmp_path / "a.stream"


def test_a_snapshot_is_the_stream(file: Path, state: StreamState, session: Session) -> None:
    assert_same(read_snapshot(file, session, key=KEY), state)
    assert file.stat().st_size <= most_snapshot_bytes(session)


def test_a_stream_without_logits_is_kept(fresh: StreamState, session: Session, tmp_path: Path) -> None:
    """As it is at position 0 and after a rewind."""
    write_snapshot(fresh, tmp_path / "a", key=KEY)
    assert_same(read_snapshot(tmp_path / "a", session, key=KEY), fresh)


def test_python_reads_the_memory_as_saved_streams(
    file: Path, state: StreamState, session: Session, tokens: np.ndarray
) -> None:
    memory = runtimes.load_memory(file, session)
    going_on = tokens[45:53][None]
    expected, _ = session.step(going_on, state.memory.copy())
    np.testing.assert_array_equal(session.step(going_on, memory)[0], expected)


def test_every_altered_byte_is_refused(file: Path, session: Session, tmp_path: Path) -> None:
    """The places are spread over the whole file; bytes of the header are altered one after the other."""
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = {*range(0, header, 7), *range(header, len(content), 997), len(content) - 1}
    other = tmp_path / "b"
    for place in sorted(places):
        altered = bytearray(content)
        altered[place] ^= 1
        other.write_bytes(altered)
        with pytest.raises((ArtefactError, StreamError)):
            read_snapshot(other, session, key=KEY)
    for length in (0, 5, header - 1, header, len(content) - 1):
        other.write_bytes(content[:length])
        with pytest.raises((ArtefactError, StreamError)):
            read_snapshot(other, session, key=KEY)


def test_nothing_is_parsed_before_the_signature_fits(
    file: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("the file was parsed")

    monkeypatch.setattr(snapshot, "tensors_in", parse)
    with pytest.raises(ArtefactError, match="no server with this key signed it"):
        read_snapshot(file, session, key=bytes(32))
    with pytest.raises(AssertionError, match="parsed"):
        read_snapshot(file, session, key=KEY)


def test_the_stream_of_another_artefact_is_refused(
    file: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(session.memory_identity, weights="0" * 64)
    monkeypatch.setattr(session, "memory_identity", other)
    with pytest.raises(StreamError, match="other weights computed"):
        read_snapshot(file, session, key=KEY)


def test_a_file_of_10_gb_is_refused_unread(file: Path, session: Session) -> None:
    """It has holes: reading it would fill the memory."""
    with open(file, "r+b") as stream:
        stream.truncate(10 << 30)
    with pytest.raises(StreamError, match=r"10,737,418,240 bytes, and one of this model has at most \d"):
        read_snapshot(file, session, key=KEY)


def test_values_that_are_not_finite_are_not_saved(state: StreamState, tmp_path: Path) -> None:
    next(iter(state.memory.tensors.values())).flat[0] = np.nan
    with pytest.raises(StreamError, match="not finite"):
        write_snapshot(state, tmp_path / "a.stream", key=KEY)
    assert list(tmp_path.iterdir()) == []


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    key = server_key(folder)
    assert len(key) == 32
    assert server_key(folder) == key != server_key(tmp_path / "other")
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640"):
        server_key(folder)
    file.chmod(0o600)
    file.write_text("abc")
    with pytest.raises(ConfigError, match="not a key of 32 bytes"):
        server_key(folder)
