"""Streams when the server is killed, or its disk is full, at any step of any operation."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Session
from runtimes.base.errors import UserError
from tests.serve.streams.conftest import KEY, Advance, assert_same
from tests.serve.streams.test_store import current, read
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.index import StoreSettings
from xl_export.serve.streams.store import StreamStore

# What changes something on a disk: the store is ended before and in the middle of each call of these.
CALLS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "pwrite", "fsync")


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


def breaking(monkeypatch: pytest.MonkeyPatch, at: int, fault: Callable[[], None]) -> list[int]:
    """Lets call number `at` of CALLS end in a fault; all but the end of a line is written. Counts them."""
    count = [0]

    def broken(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def counted(*given: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                if name == "pwrite":
                    call(given[0], given[1][:-1], given[2])
                fault()
            return call(*given, **options)

        return counted

    for name in CALLS:
        monkeypatch.setattr(os, name, broken(name))
    return count


def killed_at(at: int, folder: Path, session: Session, states: list[StreamState], tokens: np.ndarray) -> Any:
    """What a process has said of its operations until SIGKILL ended it at a call; and whether it did."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child computes nothing
        child = os.fork()
    if child == 0:
        with open(writing, "wb", buffering=0) as pipe:
            breaking(pytest.MonkeyPatch(), at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            store = StreamStore(folder, session, key=KEY, settings=settings(states))
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


def none_or_error(done: Iterator[tuple[str, str, int]], streams: dict[str, int]) -> UserError | None:
    """The error that ends the operations, if one does. streams: gets the state of each stream before it."""
    try:
        for name, what, number in done:
            if what in ("created", "is"):
                streams[name] = number
            elif what == "gone":
                del streams[name]
    except UserError as error:
        return error
    return None


@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_sigkill_loses_at_most_the_operation_in_flight(
    session: Session,
    states: list[StreamState],
    advance: Advance,
    tokens: np.ndarray,
    tmp_path: Path,
    each: int,
) -> None:
    at, goes_on = 1 - each, True
    while goes_on:
        at += each
        said, goes_on = killed_at(at, tmp_path / str(at), session, states, tokens)
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
        store = StreamStore(tmp_path / str(at), session, key=KEY, settings=settings(states))
        assert not store.damaged
        there = {stream.id for stream in store.list("anna")}
        assert {name for name, states in possible.items() if None not in states} <= there
        for name in there:
            # A stream of which nothing was said was being made, or forked, at the end.
            numbers = possible.get(name, {0, 2})
            state = read(store, name, advance)
            (number,) = [
                each for each in numbers if each is not None and states[each].position == state.position
            ]
            assert_same(state, states[number])
        hidden = [path for path in store.path.rglob(".*") if path.name != ".writer"]
        assert hidden == [], "nothing unfinished is left"
        store.close()
    assert at > 40, "the calls are counted"
    assert said[-1][1] == "ends"


@pytest.mark.parametrize("each", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_is_refused_and_loses_nothing(
    session: Session,
    states: list[StreamState],
    advance: Advance,
    tokens: np.ndarray,
    tmp_path: Path,
    each: int,
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    at, refused = 1 - each, 0
    while True:
        at += each
        store = StreamStore(tmp_path / str(at), session, key=KEY, settings=settings(states))
        streams: dict[str, int] = {}
        with pytest.MonkeyPatch.context() as patch:
            count = breaking(patch, at, full)
            error = none_or_error(operations(store, states, tokens), streams)
        if error is not None:
            refused += 1
            assert "No space left on device" in str(error)
            assert str(tmp_path) not in str(error)
        for again in (False, True):
            if again or store.closed:
                store.close()
                store = StreamStore(tmp_path / str(at), session, key=KEY, settings=settings(states))
            assert {stream.id for stream in store.list("anna")} == streams.keys()
            for name, number in streams.items():
                assert_same(read(store, name, advance), states[number])
        for name, number in streams.items():  # and each goes on
            with store.operation(name, "anna") as operation:
                operation.commit(advance(current(operation, advance), tokens[:3]), appended=tokens[:3])
            assert_same(read(store, name, advance), advance(states[number], tokens[:3]))
        store.close()
        if count[0] < at:
            break
    assert refused > 10


def test_flush_writes_new_names_before_removing_old_files(
    session: Session, states: list[StreamState], tokens: np.ndarray, tmp_path: Path, monkeypatch: Any
) -> None:
    """The order of the calls: a new name, then the fsync of its folder, then the answer or the removal."""
    calls: list[tuple[str, str]] = []

    def traced(name: str) -> None:
        call = getattr(os, name)

        def noted(first: Any, *rest: Any, **options: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else first)
            target = Path(rest[0]) if name in ("replace", "rename") else path
            calls.append((name, target.name))
            return call(first, *rest, **options)

        monkeypatch.setattr(os, name, noted)

    bounds = StoreSettings(replayed=10, flush=True)
    store = StreamStore(tmp_path, session, key=KEY, settings=bounds)
    for name in ("replace", "rename", "fsync", "unlink"):
        traced(name)

    def order(*wanted: tuple[str, str]) -> None:
        """The wanted calls are among the calls, in this order; the calls are forgotten."""
        places = [calls.index(each) for each in wanted]
        assert places == sorted(places), (wanted, calls)
        calls.clear()

    name = store.create("anna", states[0]).id
    order(("fsync", f".{name}.new"), ("rename", name), ("fsync", store.path.name))
    with store.operation(name, "anna") as operation:
        operation.commit(states[1], appended=tokens[:5])
    calls.clear()
    fork = store.fork(name, "anna").id
    order(("fsync", "000000.journal"), ("rename", fork), ("fsync", store.path.name))
    with store.operation(name, "anna") as operation:  # more tokens than a journal may have
        operation.commit(states[3], appended=tokens[5:30])
    order(("replace", "000001@30.stream"), ("fsync", name), ("unlink", "000000@0.stream"))
    with store.operation(fork, "anna") as operation:  # this replaces the journal, too
        operation.snapshot().close()
    order(("replace", "000001@5.stream"), ("fsync", fork), ("unlink", "000000.journal"))
    store.close()
