"""The store of streams against a naive model of it: what was answered is there, bit for bit."""

from __future__ import annotations

import os
import sqlite3
import threading
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

from runtimes import load_memory
from runtimes.base.errors import UserError
from tests.clock import set_clock
from tests.serve.streams.conftest import Streams, assert_same
from xl_export.serve.core.settings import StoreSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams import database
from xl_export.serve.streams import store as store_module
from xl_export.serve.streams.store import (
    BusyStreamError,
    ClosedStoreError,
    NoStreamError,
    StreamStore,
    TooManyStreamsError,
)


def end_as_a_kill(store: StreamStore) -> None:
    """Nothing more is written, and the folder is free."""
    store._database.close()
    store._stack.close()


@pytest.mark.parametrize("ram_bytes", [0, 1 << 20])
def test_a_fork_during_an_operation_is_the_stream_before(streams: Streams, ram_bytes: int) -> None:
    store = streams.open(ram_bytes=ram_bytes)
    name, tokens = store.create("anna", streams.fresh).id, np.arange(1, 6)
    streams.append(store, name, tokens[:2])
    before = streams.read(store, name)
    with store.operation(name, "anna") as operation:
        state = streams.advance(streams.current(operation), tokens[2:])
        fork = store.fork(name, "anna").id
        operation.commit(state, appended=tokens[2:])
        later = store.fork(name, "anna").id
    assert [store.find(each, "anna").position for each in (name, fork, later)] == [5, 2, 5]
    assert_same(streams.read(store, fork), before)
    assert_same(streams.read(store, later), streams.read(store, name))


def test_a_fork_never_sees_half_a_change(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database has what was appended, and the state in RAM does not have it yet."""
    store = streams.open(ram_bytes=1 << 20)
    stream = store.create("anna", streams.fresh)
    forks = []
    hold = StreamStore.hold

    def hold_late(store: StreamStore, stream: object, state: StreamState) -> None:
        if state.position and not forks:
            forks.append(threading.Thread(target=lambda: forks.append(store.fork(name, "anna"))))
            forks[0].start()
            forks[0].join(0.1)
        hold(store, stream, state)  # type: ignore[arg-type]

    name = stream.id
    monkeypatch.setattr(StreamStore, "hold", hold_late)
    streams.append(store, name, np.arange(3))
    forks[0].join()
    assert forks[1].position == forks[1].state.position


def test_forks_share_a_file_until_none_names_it(
    streams: Streams, tmp_path: Path, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart, which removes files that no row names; a download reads on meanwhile."""
    monkeypatch.setattr(database, "INLINE_BYTES", 0)
    store = streams.open(ram_bytes=0)
    state = streams.begun(tokens[:9])
    name = store.create("anna", state).id
    fork = store.fork(name, "anna").id
    (file,) = tmp_path.glob("snapshots/*")
    memory = load_memory(file, streams.session)
    np.testing.assert_array_equal(memory.positions, [9])
    with store.operation(name, "anna") as operation, operation.snapshot() as download:
        operation.remove()
        assert file.exists()
        store.delete(fork, "anna")
        assert list(tmp_path.glob("snapshots/*")) == []
        assert len(download.read()) > state.num_bytes
    name = store.create("anna", state).id
    end_as_a_kill(store)
    (tmp_path / "snapshots" / "left.stream").touch()
    store = streams.open()
    (file,) = tmp_path.glob("snapshots/*")
    assert_same(streams.read(store, name), state)


def test_a_file_is_removed_when_the_log_that_names_another_is_flushed(
    streams: Streams, tmp_path: Path, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure could leave a row that names a file which is gone."""
    monkeypatch.setattr(database, "INLINE_BYTES", 0)
    store = streams.open(ram_bytes=0)
    log = tmp_path / "streams.sqlite-wal"
    fsync, unlink = os.fsync, Path.unlink
    flushed: dict[str, bytes] = {}
    removed: list[Path] = []

    def noted_fsync(number: int) -> None:
        path = os.readlink(f"/proc/self/fd/{number}")
        if os.path.isfile(path):
            flushed[path] = Path(path).read_bytes()
        fsync(number)

    def noted_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".stream":
            assert flushed.get(str(log)) == log.read_bytes()
            removed.append(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "unlink", noted_unlink)
    name = store.create("anna", streams.fresh).id
    with store.operation(name, "anna") as operation:
        operation.commit(streams.begun(tokens[:9]))
    store.delete(name, "anna")
    assert len(removed) == 2


def test_a_missing_file_damages_each_stream_that_names_it(
    streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "INLINE_BYTES", 0)
    store = streams.open()
    name = store.create("anna", streams.fresh).id
    names = {name, store.fork(name, "anna").id}
    store.close()
    (file,) = tmp_path.glob("snapshots/*")
    file.unlink()
    assert {stream.id for stream in streams.open().all() if stream.damaged} == names


def test_a_removed_stream_leaves_no_file(
    streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its state was just being taken out of RAM."""
    monkeypatch.setattr(database, "INLINE_BYTES", 0)
    store = streams.open()
    stream = store.create("anna", streams.fresh)
    streams.append(store, stream.id, np.arange(3))
    store.delete(stream.id, "anna")
    store._write_ahead(stream)
    assert list(tmp_path.glob("snapshots/*")) == []


def test_one_operation_at_a_time(streams: Streams) -> None:
    store = streams.open()
    name = store.create("anna", streams.fresh).id
    with store.operation(name, "anna"):
        assert store.find(name, "anna").busy
        for other in (store.operation(name, "anna").__enter__, lambda: store.delete(name, "anna")):
            with pytest.raises(BusyStreamError, match="another operation is using the stream"):
                other()
    with pytest.raises(ZeroDivisionError), store.operation(name, "anna"):
        raise ZeroDivisionError
    assert not store.find(name, "anna").busy
    with pytest.raises(BusyStreamError, match="another request has just made"):
        store.create("anna", streams.fresh, name)
    assert store.create("ben", streams.fresh, name).id == name, "owners do not share names"
    store.delete(name, "anna")
    with pytest.raises(NoStreamError):
        store.find(name, "anna")


def test_an_owner_has_so_many_bytes(streams: Streams, tmp_path: Path) -> None:
    store = streams.open()
    each = store.create("anna", streams.fresh).snapshot_bytes
    store.close()
    store = streams.open(owner_bytes=int(2.5 * each))
    store.create("anna", streams.fresh)
    (name, _) = [stream.id for stream in store.list("anna")]
    for more in (lambda: store.create("anna", streams.fresh), lambda: store.fork(name, "anna")):
        with pytest.raises(TooManyStreamsError, match=r"you have 2 streams .*; delete some"):
            more()
    store.create("ben", streams.fresh)
    store.delete(name, "anna")
    store.create("anna", streams.fresh)


def test_appended_tokens_cost_no_snapshot(streams: Streams, tokens: np.ndarray) -> None:
    """A monitor that appends one event after the other writes a few bytes each."""
    store = streams.open(replayed=10)
    name = store.create("anna", streams.fresh).id
    for at in range(25):
        streams.append(store, name, tokens[at : at + 1])
    assert store._database.snapshots_written == 1 + 2
    state = streams.read(store, name)
    fork = store.fork(name, "anna").id
    end_as_a_kill(store)
    store = streams.open()
    assert_same(streams.read(store, name), state)
    assert_same(streams.read(store, fork), state)


def test_an_interrupt_leaves_no_file_and_no_transaction(
    streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "INLINE_BYTES", 0)
    store = streams.open()
    with monkeypatch.context() as patch:
        patch.setattr(database, "_inserted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.create("anna", streams.fresh)
    assert list(tmp_path.rglob("*.stream")) == []
    store.create("anna", streams.fresh)
    assert len(list(tmp_path.rglob("*.stream"))) == 1


def test_any_sqlite_tool_reads_and_copies_the_database(
    streams: Streams, tmp_path: Path, tokens: np.ndarray
) -> None:
    """While the server runs: this is what `sqlite3 .backup` does."""
    store = streams.open()
    name = store.create("anna", streams.fresh).id
    streams.append(store, name, tokens[:3])
    state = streams.read(store, name)
    (tmp_path / "copy").mkdir()
    with (
        sqlite3.connect(tmp_path / "streams.sqlite") as original,
        sqlite3.connect(tmp_path / "copy" / "streams.sqlite") as copy,
    ):
        assert original.execute("SELECT owner, id, position FROM stream").fetchall() == [("anna", name, 3)]
        original.backup(copy)
    streams.append(store, name, tokens[:9])
    copied = StreamStore(tmp_path / "copy", StoreSettings())
    assert_same(streams.read(copied, name), state)


def test_closing_waits_for_operations_and_nothing_is_written_afterwards(
    streams: Streams, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operation ends while the store waits, and another one does not."""
    store = streams.open()
    names = [store.create("anna", streams.fresh).id for _ in range(2)]
    ends, late = store.operation(names[0], "anna"), store.operation(names[1], "anna")
    first, second = ends.__enter__(), late.__enter__()
    state = streams.begun(tokens[:3])
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        if now == 0:
            first.commit(state, appended=tokens[:3])
            ends.__exit__(None, None, None)
        now += 1

    set_clock(monkeypatch, store_module, monotonic=lambda: now, sleep=sleep)
    store.close(within=5)
    for appended in (tokens[:3], None):
        with pytest.raises(UserError, match="the server has ended"):
            second.commit(state, appended=appended)
    late.__exit__(None, None, None)
    with pytest.raises(ClosedStoreError):
        store.create("anna", streams.fresh)
    store = streams.open()
    assert [store.find(name, "anna").position for name in names] == [3, 0]


def test_a_second_server_is_refused_until_nobody_writes(streams: Streams, tokens: np.ndarray) -> None:
    store = streams.open()
    name = store.create("anna", streams.fresh).id
    streams.append(store, name, tokens[:3])
    with store.find(name, "anna").lock:
        store.close(within=0.1)
        with pytest.raises(UserError, match=r"being written by another process \(keeping streams by process"):
            streams.open()
    end_as_a_kill(store)
    assert_same(streams.read(streams.open(), name), streams.begun(tokens[:3]))


@pytest.mark.parametrize("content", [b"no database at all, but long enough for a header" * 100, None])
def test_a_file_that_is_no_such_database_is_refused(
    streams: Streams, tmp_path: Path, content: bytes | None
) -> None:
    if content is None:
        with sqlite3.connect(tmp_path / "streams.sqlite") as other:
            other.execute("PRAGMA user_version = 99")
    else:
        (tmp_path / "streams.sqlite").write_bytes(content)
    with pytest.raises(UserError, match="has format 99" if content is None else "cannot be used"):
        streams.open()


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="the system does not list open descriptors")
def test_operations_leave_no_descriptor_open(
    streams: Streams, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "INLINE_BYTES", 0)
    store = streams.open(ram_bytes=0, replayed=30)
    name = store.create("anna", streams.fresh).id

    def all_operations() -> None:
        streams.append(store, name, tokens[:1])
        with store.operation(name, "anna") as operation:
            streams.current(operation)
        with store.operation(store.fork(name, "anna").id, "anna") as operation:
            streams.current(operation)
            operation.commit(streams.begun(tokens[:2]))
            operation.snapshot().close()
            operation.remove()

    all_operations()
    before = len(os.listdir("/dev/fd"))
    for _ in range(50):
        all_operations()
    assert len(os.listdir("/dev/fd")) <= before  # descriptors of other tests may close meanwhile


def test_a_commit_survives_a_failing_eviction(
    streams: Streams, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a state leaves RAM and its snapshot fails, an operation on it begins: it keeps what it got."""
    store = streams.open(ram_bytes=streams.begun(tokens[:3]).num_bytes)
    name = store.create("anna", streams.fresh).id
    streams.append(store, name, tokens[:3])
    begun = []

    def failing(*_: object, **__: object) -> None:
        operation = store.operation(name, "anna")
        begun.append((operation, entered := operation.__enter__(), entered.ready()))  # while it is written
        raise UserError("the memory holds values that are not finite.")

    with monkeypatch.context() as patch:
        patch.setattr(database.Database, "replace", failing)
        assert store.create("ben", streams.begun(tokens[:9])).position == 9
    ((context, operation, state),) = begun
    assert state is not None
    assert operation.ready() is state
    operation.commit(streams.advance(state, tokens[3:5]), appended=tokens[3:5])
    context.__exit__(None, None, None)
    streams.read(store, store.create("ben", streams.begun(tokens[:9])).id, "ben")
    assert store.find(name, "anna").state is None
    assert_same(streams.read(store, name), streams.advance(streams.begun(tokens[:3]), tokens[3:5]))


@pytest.mark.usefixtures("inline")
def test_random_operations_of_owners_equal_a_naive_model(
    streams: Streams, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state_bytes = streams.begun(np.zeros(20, np.int64)).num_bytes
    sizes = StoreSettings(ram_bytes=2 * state_bytes, streams=4, replayed=12)
    owners = st.sampled_from(["anna", "ben"])
    texts = st.lists(st.integers(0, streams.session.vocab.size - 1), max_size=20).map(
        lambda x: np.array(x, np.int64)
    )

    class Machine(RuleBasedStateMachine):
        names = Bundle("names")

        def __init__(self) -> None:
            super().__init__()
            self.folder = tmp_path_factory.mktemp("store")
            self.store = StreamStore(self.folder, sizes)
            self.model: dict[str, tuple[str, StreamState]] = {}

        @rule(target=names, owner=owners, tokens=texts)
        def create(self, owner: str, tokens: np.ndarray) -> str:
            state = streams.begun(tokens)
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
                state = streams.current(operation)
                assert_same(state, self.model[name][1])
                for piece in [tokens] if appends else tokens[:, None]:
                    state = streams.advance(state, piece)
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
            end_as_a_kill(self.store) if killed else self.store.close()
            self.store = StreamStore(self.folder, sizes)

        @invariant()
        def everything_is_there(self) -> None:
            listed = [stream for owner in ("anna", "ben") for stream in self.store.list(owner)]
            assert {stream.id: (stream.owner, stream.position) for stream in listed} == {
                name: (owner, state.position) for name, (owner, state) in self.model.items()
            }
            assert self.store._ram_bytes <= sizes.ram_bytes
            assert len(self.store._ram) == sum(stream.state is not None for stream in listed)

        def teardown(self) -> None:
            for name, (owner, state) in self.model.items():
                assert_same(streams.read(self.store, name, owner), state)
                self.store.delete(name, owner)
            with sqlite3.connect(self.folder / "streams.sqlite") as rows:
                for table in ("stream", "snapshot", "journal"):
                    assert rows.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,)
            assert list(self.folder.glob("snapshots/*")) == []
            self.store.close()

    run_state_machine_as_test(Machine, settings=settings(max_examples=8, stateful_step_count=15))
