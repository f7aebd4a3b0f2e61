"""Streams when the server is killed, or its disk is full, at any step of any operation."""

from __future__ import annotations

import errno
import io
import os
import pickle
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Session
from runtimes.base.errors import UserError
from tests.serve.streams.conftest import Advance, Streams, assert_same
from tests.serve.streams.test_store import end_as_a_kill
from xl_export.serve.core.settings import StoreSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams import database
from xl_export.serve.streams.store import StreamStore

FULL = "database or disk is full"


@pytest.fixture(scope="module")
def states(session: Session, advance: Advance, tokens: np.ndarray) -> list[StreamState]:
    """A stream after 0, 5, 9 and 30 tokens."""
    state = StreamState.begin(session)
    found = [state]
    for begin, end in ((0, 5), (5, 9), (9, 30)):
        found.append(advance(found[-1], tokens[begin:end]))
    return found


def operations(
    store: StreamStore, states: list[StreamState], tokens: np.ndarray
) -> Iterator[tuple[str, str, int]]:
    """Does one operation after the other, and yields after each: the stream, what happened, its state."""
    yield "-", "begins", 0
    first = store.create("anna", states[0]).id
    yield first, "created", 0
    for after, appended in ((1, tokens[:5]), (2, tokens[5:9]), (3, None)):
        yield first, "changes", after
        with store.operation(first, "anna") as operation:
            operation.commit(states[after], appended=appended)
        yield first, "is", after
        if after == 2:
            fork = store.fork(first, "anna").id
            yield fork, "created", 2
    yield fork, "goes", 0
    store.delete(fork, "anna")
    yield fork, "gone", 0
    second = store.create("anna", states[2]).id  # so that the first leaves RAM
    yield second, "created", 2
    store.close()
    yield "-", "ends", 0


def settings(states: list[StreamState]) -> StoreSettings:
    return StoreSettings(ram_bytes=states[-1].num_bytes, replayed=10, flush=True)


def breaking(monkeypatch: pytest.MonkeyPatch, at: int, fault: Callable[[str], None]) -> list[int]:
    """Call number `at` that writes something ends in a fault: a statement of SQL, or a call for a file, of
    which half is written. Counts the calls.
    """
    count = [0]

    def broken(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            if name == "write_snapshot" and isinstance(given[1], io.BytesIO):
                return call(*given)
            count[0] += 1
            if count[0] == at:
                if name == "write_snapshot":
                    given[1].write(b"half")
                fault(name)
            return call(*given, **options)

        return counted

    class Connection(sqlite3.Connection):
        def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:  # type: ignore[override]
            if statement.lstrip().startswith(("SELECT", "PRAGMA", "ROLLBACK")):
                return super().execute(statement, *given)
            return broken("sql", super().execute)(statement, *given)  # type: ignore[no-any-return]

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **o: connect(*a, **o, factory=Connection))
    for name in ("fsync", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, broken(name, getattr(os, name)))
    monkeypatch.setattr(database, "write_snapshot", broken("write_snapshot", database.write_snapshot))
    return count


def killed_at(at: int, folder: Path, states: list[StreamState], tokens: np.ndarray) -> Any:
    """What a process has said of its operations until SIGKILL ended it at a call; and whether it did."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child computes nothing
        child = os.fork()
    if child == 0:
        with open(writing, "wb", buffering=0) as pipe:
            breaking(pytest.MonkeyPatch(), at, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            store = StreamStore(folder, settings(states))
            for said in operations(store, states, tokens):
                pipe.write(pickle.dumps(said))
        os._exit(0)
    os.close(writing)
    said = []
    with open(reading, "rb") as pipe:
        while True:
            try:
                said.append(pickle.load(pipe))
            except EOFError:
                break
    return said, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_sigkill_loses_at_most_the_operation_in_flight(
    streams: Streams,
    states: list[StreamState],
    tokens: np.ndarray,
    tmp_path: Path,
    each: int,
) -> None:
    at, goes_on = 1 - each, True
    while goes_on:
        at += each
        said, goes_on = killed_at(at, tmp_path / str(at), states, tokens)
        possible: dict[str, set[int | None]] = {}  # the states that a stream may have; None: it may be gone
        for name, what, number in said:
            if what in ("created", "is"):
                possible[name] = {number}
            elif what == "changes":
                possible[name].add(number)
            elif what == "goes":
                possible[name].add(None)
            elif what == "gone":
                del possible[name]
        store = StreamStore(tmp_path / str(at), settings(states))
        assert not any(stream.damaged for stream in store.all())
        there = {stream.id for stream in store.list("anna")}
        assert {name for name, states in possible.items() if None not in states} <= there
        for name in there:
            # A stream of which nothing was said was being made, or forked, at the end.
            numbers = possible.get(name, {0, 2})
            state = streams.read(store, name)
            (number,) = [
                each for each in numbers if each is not None and states[each].position == state.position
            ]
            assert_same(state, states[number])
        assert_no_file_is_left(tmp_path / str(at))
        store.close()
    assert at > 30, "the calls are counted"
    assert said[-1][1] == "ends"


def assert_no_file_is_left(folder: Path) -> None:
    """Each file is named by a row."""
    with sqlite3.connect(folder / "streams.sqlite") as rows:
        named = {file for (file,) in rows.execute("SELECT file FROM snapshot") if file is not None}
    assert {path.name for path in folder.glob("snapshots/*")} == named


def none_or_error(done: Iterator[tuple[str, str, int]], expected: dict[str, int]) -> UserError | None:
    """The error that ends the operations, if one does. expected: gets the state of each stream before it."""
    try:
        for name, what, number in done:
            if what in ("created", "is"):
                expected[name] = number
            elif what == "gone":
                del expected[name]
    except UserError as error:
        return error
    return None


def check_refused(
    store: StreamStore,
    folder: Path,
    error: UserError | None,
    expected: dict[str, int],
    states: list[StreamState],
    streams: Streams,
    tokens: np.ndarray,
) -> None:
    """Each stream is as it was before what was refused: in RAM, after a kill, and after an end; and it
    continues.
    """
    if error is not None:
        assert "the server could not write the stream (" in str(error)
        assert str(folder) not in str(error)
        assert_no_file_is_left(folder)
    for end in (None, "kill", "end"):
        if end == "kill" or store._closed:  # what a kill would leave now
            folder = shutil.copytree(folder, folder.with_name(f"{folder.name}-{end}"))
            end_as_a_kill(store)
            store = StreamStore(folder, settings(states))
            assert_no_file_is_left(folder)
        elif end == "end":
            store.close()
            store = StreamStore(folder, settings(states))
        assert not any(stream.damaged for stream in store.all())
        assert {stream.id for stream in store.list("anna")} == expected.keys()
        for name, number in expected.items():
            assert_same(streams.read(store, name), states[number])
    for name, number in expected.items():
        with store.operation(name, "anna") as operation:
            before = streams.current(operation)
            operation.commit(streams.advance(before, tokens[:3]), appended=tokens[:3])
        assert_same(streams.read(store, name), streams.advance(states[number], tokens[:3]))
    store.close()


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("each", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_is_refused_and_loses_nothing(
    streams: Streams,
    states: list[StreamState],
    tokens: np.ndarray,
    tmp_path: Path,
    each: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At any statement and any call for a file."""

    def full(what: str) -> None:
        raise sqlite3.OperationalError(FULL) if what == "sql" else OSError(errno.ENOSPC, FULL)

    at, refused = 1 - each, 0
    while True:
        at += each
        folder = tmp_path / str(at)
        store = StreamStore(folder, settings(states))
        store._database.close()
        expected: dict[str, int] = {}
        with monkeypatch.context() as patch:
            count = breaking(patch, at, full)
            store._database = database.Database(folder, flush=True)
            error = none_or_error(operations(store, states, tokens), expected)
        refused += error is not None
        check_refused(store, folder, error, expected, states, streams, tokens)
        if count[0] < at:
            break
    assert refused > 5


def test_a_stream_is_deleted_although_the_disk_is_full(
    states: list[StreamState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reserve is given up for that, once."""
    reserve = tmp_path / "reserve"

    class Connection(sqlite3.Connection):
        def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:  # type: ignore[override]
            if statement == "COMMIT" and full and reserve.exists() in full:
                raise sqlite3.OperationalError(FULL)
            return super().execute(statement, *given)

    connect, full = sqlite3.connect, list[bool]()
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **o: connect(*a, **o, factory=Connection))
    store = StreamStore(tmp_path, settings(states))
    names = [store.create("anna", states[2]).id for _ in range(2)]
    assert reserve.stat().st_size == database.RESERVE_BYTES
    full.append(True)
    with pytest.raises(database.UnwritableError):
        store.create("anna", states[2])
    store.delete(names[0], "anna")
    assert not reserve.exists()
    full.append(False)
    with pytest.raises(database.UnwritableError):
        store.delete(names[1], "anna")
    full.clear()
    assert [stream.id for stream in store.list("anna")] == names[1:]
    store.close()
    StreamStore(tmp_path, settings(states)).close()
    assert reserve.exists(), "the next start makes another one"


@pytest.mark.parametrize("step", [7000, pytest.param(600, marks=pytest.mark.slow)])
def test_files_that_cannot_grow_lose_nothing(
    streams: Streams,
    states: list[StreamState],
    tokens: np.ndarray,
    tmp_path: Path,
    step: int,
    inline: int,
) -> None:
    """The operating system refuses SQLite's own writes at any byte, as a full disk does."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size, refused = 33_000, 0  # SQLite's index of its log has 32 KB
    while True:
        folder = tmp_path / str(size)
        store = StreamStore(folder, settings(states))
        expected: dict[str, int] = {}
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            error = none_or_error(operations(store, states, tokens), expected)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        refused += error is not None
        check_refused(store, folder, error, expected, states, streams, tokens)
        if error is None:
            break
        size += step
    assert refused >= (1 if inline == 0 else 3)


FSYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
static int fails(void) { return access(getenv("FAILING"), F_OK) == 0 ? (errno = EIO, 1) : 0; }
int fsync(int fd) { return fails() ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { return fails() ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
"""
REFUSED = """
import os, shutil, sys
from pathlib import Path
import numpy as np
import runtimes
from xl_export.serve.core.settings import StoreSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.database import UnwritableError
from xl_export.serve.streams.store import StreamStore
folder, artefact, failing = Path(sys.argv[1]), sys.argv[2], os.environ["FAILING"]
fresh = StreamState.begin(runtimes.open_session(artefact, threads=1))
store = StreamStore(folder, StoreSettings(flush=True))
name = store.create("anna", fresh).id
later = fresh.memory.copy()
later.positions[:] = 3
Path(failing).touch()
try:
    with store.operation(name, "anna") as operation:
        state = StreamState(memory=later, logits=None, tail=np.arange(3), furthest=3)
        operation.commit(state, appended=np.arange(3))
except UnwritableError:
    shutil.copytree(folder, sys.argv[3])
    os.unlink(failing)
    print([StreamStore(Path(sys.argv[3]), StoreSettings()).find(name, "anna").position])
"""


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="it needs a C compiler")
def test_what_could_not_be_flushed_does_not_come_back(artefacts: dict[str, Path], tmp_path: Path) -> None:
    """SQLite's log has all of it then, and a kill follows."""
    (tmp_path / "fsync.c").write_text(FSYNC)
    shim = tmp_path / "fsync.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "fsync.c", "-ldl"], check=True)
    command = [sys.executable, "-c", REFUSED, tmp_path / "state", artefacts["ring"], tmp_path / "killed"]
    setting = {**os.environ, "LD_PRELOAD": str(shim), "FAILING": str(tmp_path / "failing")}
    done = subprocess.run(command, env=setting, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[0]\n", done.stdout + done.stderr
