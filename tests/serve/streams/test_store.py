"""The store of streams against a naive model of it: what was answered is there, bit for bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from runtimes import Session
from runtimes.base.errors import UserError
from tests.clock import set_clock
from tests.serve.streams.conftest import KEY, Advance, assert_same
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams import store as store_module
from xl_export.serve.streams.files import StreamFolder
from xl_export.serve.streams.index import (
    BusyStreamError,
    ClosedStoreError,
    DamagedStreamError,
    NoStreamError,
    Operation,
    StoreSettings,
    TooManyStreamsError,
)
from xl_export.serve.streams.store import StreamStore

Open = Callable[..., StreamStore]


@pytest.fixture
def open_store(session: Session, tmp_path: Path) -> Open:
    def opened(**sizes: int) -> StreamStore:
        return StreamStore(tmp_path, session, key=KEY, settings=StoreSettings(**sizes))

    return opened


def append(store: StreamStore, name: str, tokens: np.ndarray, advance: Advance, owner: str = "anna") -> None:
    with store.operation(name, owner) as operation:
        operation.commit(advance(current(operation, advance), tokens), appended=tokens)


def current(operation: object, advance: Advance) -> StreamState:
    """The stream as it is now, as a server gets it."""
    state, appended = operation.load()  # type: ignore[attr-defined]
    for tokens in appended:
        state = advance(state, tokens)
    if appended:
        operation.caught_up(state)  # type: ignore[attr-defined]
    return state


def read(store: StreamStore, name: str, advance: Advance, owner: str = "anna") -> StreamState:
    with store.operation(name, owner) as operation:
        return current(operation, advance)


@pytest.mark.parametrize("ram_bytes", [0, 1 << 20])
def test_a_fork_during_an_operation_is_the_stream_before(
    open_store: Open, fresh: StreamState, advance: Advance, ram_bytes: int
) -> None:
    store = open_store(ram_bytes=ram_bytes)
    name, tokens = store.create("anna", fresh).id, np.arange(1, 6)
    append(store, name, tokens[:2], advance)
    before = read(store, name, advance)
    with store.operation(name, "anna") as operation:
        state = advance(current(operation, advance), tokens[2:])
        fork = store.fork(name, "anna").id
        operation.commit(state, appended=tokens[2:])
        later = store.fork(name, "anna").id
    assert [store.find(each, "anna").position for each in (name, fork, later)] == [5, 2, 5]
    assert_same(read(store, fork, advance), before)
    assert_same(read(store, later, advance), read(store, name, advance))


def test_a_fork_never_sees_half_a_change(
    open_store: Open, fresh: StreamState, advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have what was appended, and the state in RAM does not have it yet."""
    store = open_store(ram_bytes=1 << 20)
    stream = store.create("anna", fresh)
    forks = []
    hold = Operation._hold

    def hold_late(operation: Operation, state: StreamState) -> None:
        if state.position and not forks:
            forks.append(threading.Thread(target=lambda: forks.append(store.fork(stream.id, "anna"))))
            forks[0].start()
            forks[0].join(0.1)
        hold(operation, state)

    monkeypatch.setattr(Operation, "_hold", hold_late)
    append(store, stream.id, np.arange(3), advance)
    forks[0].join()
    assert forks[1].position == forks[1].state.position


def test_one_operation_at_a_time(open_store: Open, fresh: StreamState, advance: Advance) -> None:
    store = open_store()
    name = store.create("anna", fresh).id
    with store.operation(name, "anna"):
        assert store.find(name, "anna").busy
        for other in (store.operation(name, "anna").__enter__, lambda: store.delete(name, "anna")):
            with pytest.raises(BusyStreamError, match="another operation is using the stream"):
                other()
    with pytest.raises(ZeroDivisionError), store.operation(name, "anna"):
        raise ZeroDivisionError
    assert not store.find(name, "anna").busy
    store.delete(name, "anna")
    with pytest.raises(NoStreamError):
        store.find(name, "anna")


def test_an_owner_has_so_many_bytes(open_store: Open, fresh: StreamState) -> None:
    row = sum(tensor.nbytes for tensor in fresh.memory.tensors.values())
    store = open_store(owner_bytes=2 * row + 1)
    names = [store.create("anna", fresh).id for _ in range(2)]
    for more in (lambda: store.create("anna", fresh), lambda: store.fork(names[0], "anna")):
        with pytest.raises(TooManyStreamsError, match=r"you have 2 streams .* may have 2; delete some"):
            more()
    store.create("ben", fresh)
    store.delete(names[0], "anna")
    store.create("anna", fresh)


def test_appended_tokens_cost_no_snapshot(
    open_store: Open, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    """A monitor that appends one event after the other writes a few bytes each."""
    store = open_store(replayed=10)
    name = store.create("anna", fresh).id
    for at in range(25):
        append(store, name, tokens[at : at + 1], advance)
    assert store.written == 1 + 2
    state = read(store, name, advance)
    store._stack.close()  # a kill: nothing is written
    assert_same(read(open_store(), name, advance), state)


def test_closing_waits_for_operations_and_nothing_is_written_afterwards(
    open_store: Open,
    fresh: StreamState,
    advance: Advance,
    tokens: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One operation ends while the store waits, and another one does not."""
    store = open_store()
    names = [store.create("anna", fresh).id for _ in range(2)]
    ends, late = store.begin(names[0], "anna"), store.begin(names[1], "anna")
    state = advance(fresh, tokens[:3])
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        if now == 0:
            ends.commit(state, appended=tokens[:3])
            ends.end()
        now += 1

    set_clock(monkeypatch, store_module, monotonic=lambda: now, sleep=sleep)
    store.close(within=5)
    for appended in (tokens[:3], None):
        with pytest.raises(UserError, match="the server has ended"):
            late.commit(state, appended=appended)
    store = open_store()
    assert [store.find(name, "anna").position for name in names] == [3, 0]


@pytest.mark.parametrize("lost", ["facts.json", "000000@0.stream"])
def test_a_damaged_folder_is_told_counted_and_left_alone(
    open_store: Open, fresh: StreamState, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    names = [store.create("anna", fresh).id for _ in range(2)]
    store.close()
    (store.path / names[0] / lost).unlink()
    store = open_store(streams=2)
    assert names[0] in caplog.text
    assert (len(store.streams), len(store.damaged)) == (1, 1)
    assert [stream.id for stream in store.list("anna")] == names[1:]
    owner_is_known = lost != "facts.json"
    if owner_is_known:
        with pytest.raises(TooManyStreamsError):
            store.create("anna", fresh)
    for closed in (False, True):
        if closed:
            store.close()
        holds = store.unserved() if closed else store
        for ask in (holds.find, holds.open_snapshot, holds.delete):
            with pytest.raises(DamagedStreamError, match="restore a snapshot of it"):
                ask(names[0], "anna")
        assert holds.held("anna")[0] == 1 + owner_is_known
        with pytest.raises(NoStreamError if owner_is_known else DamagedStreamError):
            holds.find(names[0], "bert")
    assert (store.path / names[0]).exists()


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="the system does not list open descriptors")
def test_operations_leave_no_descriptor_open(
    open_store: Open, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    store = open_store(ram_bytes=0, replayed=30)
    name = store.create("anna", fresh).id

    def all_operations() -> None:
        append(store, name, tokens[:1], advance)
        with store.operation(name, "anna") as operation:
            current(operation, advance)
            operation.snapshot().close()
        store.delete(store.fork(name, "anna").id, "anna")

    all_operations()
    before = len(os.listdir("/dev/fd"))
    for _ in range(50):
        all_operations()
    assert len(os.listdir("/dev/fd")) <= before  # descriptors of other tests may close meanwhile


def test_a_commit_survives_a_failing_eviction(
    open_store: Open,
    fresh: StreamState,
    advance: Advance,
    tokens: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a state leaves RAM and its snapshot fails, an operation on it begins: it keeps what it got."""
    store = open_store(ram_bytes=advance(fresh, tokens[:3]).num_bytes)
    name = store.create("anna", fresh).id
    append(store, name, tokens[:3], advance)
    begun: list[tuple[Operation, StreamState | None]] = []

    def failing(folder: StreamFolder, state: StreamState, *, key: bytes) -> None:
        operation = store.begin(name, "anna")
        begun.append((operation, operation.ready()))  # although its files are in use
        raise UserError("the memory holds values that are not finite.")

    with monkeypatch.context() as patch:
        patch.setattr(StreamFolder, "replace", failing)
        assert store.create("ben", advance(fresh, tokens[:9])).position == 9
    ((operation, state),) = begun
    assert state is not None
    assert operation.ready() is state
    operation.commit(advance(state, tokens[3:5]), appended=tokens[3:5])
    operation.end()
    read(store, store.create("ben", advance(fresh, tokens[:9])).id, advance, "ben")
    assert store.find(name, "anna").state is None
    assert_same(read(store, name, advance), advance(advance(fresh, tokens[:3]), tokens[3:5]))


def test_a_folder_is_given_back_once_nobody_writes_there(
    open_store: Open, fresh: StreamState, advance: Advance, tokens: np.ndarray
) -> None:
    store = open_store()
    name = store.create("anna", fresh).id
    append(store, name, tokens[:3], advance)
    with store.operation(name, "anna") as operation:
        writes = operation.stream.lock
    with writes:
        store.close(within=0.1)
        with pytest.raises(UserError, match=r"being written by another process \(keeping streams by process"):
            open_store()
    files = sorted(store.path.rglob("*"))
    store.settings = replace(store.settings, ram_bytes=0)
    store.make_room()  # of an operation that ends late
    assert sorted(store.path.rglob("*")) == files
    for late in (lambda: store.create("anna", fresh), lambda: store.begin(name, "anna")):
        with pytest.raises(ClosedStoreError):
            late()
    store._stack.close()
    assert_same(read(open_store(), name, advance), advance(fresh, tokens[:3]))


def test_random_operations_of_owners_equal_a_naive_model(
    session: Session, fresh: StreamState, advance: Advance, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state_bytes = advance(fresh, np.zeros(20, np.int64)).num_bytes
    sizes = StoreSettings(ram_bytes=2 * state_bytes, streams=4, replayed=12)
    owners = st.sampled_from(["anna", "ben"])
    texts = st.lists(st.integers(0, session.vocab.size - 1), max_size=20).map(lambda x: np.array(x, np.int64))

    class Machine(RuleBasedStateMachine):
        names = Bundle("names")

        def __init__(self) -> None:
            super().__init__()
            self.folder = tmp_path_factory.mktemp("store")
            self.store = StreamStore(self.folder, session, key=KEY, settings=sizes)
            self.model: dict[str, tuple[str, StreamState]] = {}

        @rule(target=names, owner=owners, tokens=texts)
        def create(self, owner: str, tokens: np.ndarray) -> str:
            state = advance(fresh, tokens)
            if sum(each == owner for each, _ in self.model.values()) == sizes.streams:
                with pytest.raises(TooManyStreamsError):
                    self.store.create(owner, state)
                return ""
            name = self.store.create(owner, state).id
            self.model[name] = owner, state
            return name

        @rule(target=names, name=names, owner=owners)
        def fork(self, name: str, owner: str) -> str:
            if self.model.get(name, ("", None))[0] != owner:
                with pytest.raises(NoStreamError):
                    self.store.fork(name, owner)
                return ""
            if sum(each == owner for each, _ in self.model.values()) == sizes.streams:
                with pytest.raises(TooManyStreamsError):
                    self.store.fork(name, owner)
                return ""
            fork = self.store.fork(name, owner).id
            self.model[fork] = self.model[name]
            return fork

        @rule(name=names, owner=owners, tokens=texts, appends=st.booleans(), commits=st.booleans())
        def advance(self, name: str, owner: str, tokens: np.ndarray, appends: bool, commits: bool) -> None:
            if self.model.get(name, ("", None))[0] != owner:
                with pytest.raises(NoStreamError), self.store.operation(name, owner):
                    pass
                return
            with self.store.operation(name, owner) as operation:
                state = current(operation, advance)
                assert_same(state, self.model[name][1])
                for piece in [tokens] if appends else tokens[:, None]:
                    state = advance(state, piece)
                if not commits:
                    return
                operation.commit(state, appended=tokens if appends else None)
            self.model[name] = owner, state

        @rule(name=consumes(names), owner=owners)
        def delete(self, name: str, owner: str) -> None:
            if self.model.get(name, ("", None))[0] != owner:
                with pytest.raises(NoStreamError):
                    self.store.delete(name, owner)
                return
            self.store.delete(name, owner)
            del self.model[name]

        @rule(killed=st.booleans())
        def restart(self, killed: bool) -> None:
            (self.store._stack if killed else self.store).close()
            self.store = StreamStore(self.folder, session, key=KEY, settings=sizes)

        @invariant()
        def everything_is_there(self) -> None:
            listed = [stream for owner in ("anna", "ben") for stream in self.store.list(owner)]
            assert {stream.id: (stream.owner, stream.position) for stream in listed} == {
                name: (owner, state.position) for name, (owner, state) in self.model.items()
            }
            assert self.store.ram_bytes <= sizes.ram_bytes
            assert len(self.store._ram) == sum(stream.state is not None for stream in listed)

        def teardown(self) -> None:
            for name, (owner, state) in self.model.items():
                assert_same(read(self.store, name, advance, owner), state)
            self.store.close()
            assert not self.store.damaged

    run_state_machine_as_test(Machine, settings=settings(max_examples=8, stateful_step_count=15))
