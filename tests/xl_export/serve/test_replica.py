"""Replicas that share a folder of streams, in one process: whoever answers, and whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import runtimes
from runtimes.base.errors import UserError
from runtimes.contract.tensors import row_bytes
from tests.coroutines import in_thread
from xl_export.serve import replica as replica_module
from xl_export.serve.core.admission import StoppedError
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.workers import BACKGROUND
from xl_export.serve.http.streams.documents import ElsewhereError
from xl_export.serve.replica import Replica, SharedStreams, UnavailableError
from xl_export.serve.streams import database
from xl_export.serve.streams.database import DamagedStreamError, Stream, UnreadableError

ARTEFACT = Path(__file__).parents[2] / "data" / "small"
STREAMS = 5


@pytest.fixture(scope="module")
def session() -> runtimes.Session:
    return runtimes.open_session(ARTEFACT, threads=1, device="cpu")


@contextlib.contextmanager
def replica(session: runtimes.Session, folder: Path, *, streams_in_ram: int = 3) -> Iterator[Replica]:
    folder.mkdir(exist_ok=True)
    size = row_bytes(session.state) + 8 * session.vocab.size + 1000
    made = Replica(
        session,
        SharedStreams(folder, session, ram_bytes=streams_in_ram * size),
        EngineSettings(rows=2),
    )
    try:
        yield made
    finally:
        made.stop()


def drawn(chance: random.Random, position: int) -> dict[str, Any]:
    """The body of a request."""
    body: dict[str, Any] = {"position": position, "max_tokens": chance.choice([0, 1, 4])}
    body |= chance.choice([{"text": "abc, the"}, {"tokens": [chance.randint(0, 20)]}])
    return body | {"score": chance.random() < 0.5, "seed": chance.randint(0, 9)}


def test_the_answers_are_those_of_one_replica(session: runtimes.Session, tmp_path: Path) -> None:
    """Each request goes to any of three replicas; one of them dies between any two, and another one comes."""
    chance = random.Random(0)
    at = dict.fromkeys((f"stream-{number}" for number in range(STREAMS)), 0)

    async def talk(alone: Replica, several: list[Replica], stack: contextlib.ExitStack, shared: Path) -> None:
        for turn in range(30):
            name = chance.choice(list(at))
            body = drawn(chance, at[name])
            expected = await alone.answer(name, body)
            assert await chance.choice(several).answer(name, body) == expected
            assert await chance.choice(several).answer(name, body) == expected  # its client asks again
            at[name] = expected["position"]
            if turn % 10 == 9:
                several.pop(0).stop()
                several.append(stack.enter_context(replica(session, shared)))

    with contextlib.ExitStack() as stack:
        shared = tmp_path / "shared"
        alone = stack.enter_context(replica(session, tmp_path / "alone", streams_in_ram=100))
        several = [stack.enter_context(replica(session, shared)) for _ in range(3)]
        in_thread(talk(alone, several, stack, shared))
    assert sum(at.values()) > 80


def test_a_slow_replica_does_not_undo_what_another_one_did(
    session: runtimes.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def race(slow: Replica, fast: Replica) -> None:
        first = await fast.answer("a", {"position": 0, "text": "abc"})
        may_write, begun = threading.Event(), threading.Event()

        commit = slow._streams.commit

        def commit_late(stream: Stream, state: StreamState, note: str) -> None:
            begun.set()
            may_write.wait(30)
            commit(stream, state, note)

        monkeypatch.setattr(slow._streams, "commit", commit_late)
        body = {"position": first["position"], "text": "de"}
        late = asyncio.ensure_future(slow.answer("a", body))
        await asyncio.to_thread(begun.wait, 30)
        monkeypatch.undo()
        second = await fast.answer("a", body)
        third = await fast.answer("a", {"position": second["position"], "text": "x"})
        may_write.set()
        with pytest.raises(UnavailableError, match="another replica has gone on"):
            await late
        with pytest.raises(ElsewhereError, match=f"is at position {third['position']} "):
            await slow.answer("a", body)

    with replica(session, tmp_path) as slow, replica(session, tmp_path) as fast:
        in_thread(race(slow, fast))


def test_a_request_without_a_seed_draws_the_same_tokens_everywhere(
    session: runtimes.Session, tmp_path: Path
) -> None:
    body = {"position": 0, "text": "abc", "max_tokens": 30, "temperature": 2.0}

    async def ask(made: Replica) -> None:
        first = await made.answer("a", body)
        assert (await made.answer("b", {**body, "seed": None}))["tokens"] == first["tokens"]

    with replica(session, tmp_path) as made:
        in_thread(ask(made))


def test_damaged_streams_are_refused_and_deleted_ones_restart(
    session: runtimes.Session, tmp_path: Path
) -> None:
    """Also by a replica that had the stream in RAM, and although the row looks the same."""

    async def use(one: Replica, other: Replica) -> None:
        first = await one.answer("a", {"position": 0, "text": "abc", "score": True})
        (file,) = tmp_path.glob("streams-*.sqlite")
        with sqlite3.connect(file) as rows:
            ((whole,),) = rows.execute("SELECT content FROM snapshot")
        for place in (2, 200, len(whole) // 2, len(whole) - 1):
            with sqlite3.connect(file) as rows:
                changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
                rows.execute("UPDATE snapshot SET content = ?", (changed,))
            with pytest.raises(DamagedStreamError):
                await other.answer("a", {"position": 3, "text": "d"})
        assert await one.delete("a")
        assert not await other.delete("a")
        assert await other.answer("a", {"position": 0, "text": "abd", "score": True}) != first
        assert await one.answer("a", {"position": 3, "text": "c"}) == await other.answer(
            "a", {"position": 3, "text": "c"}
        )

    with replica(session, tmp_path) as one, replica(session, tmp_path) as other:
        in_thread(use(one, other))


BODIES: list[tuple[object, str]] = [
    ([], "the body is a list; expected an object"),
    ({"text": "a"}, "the field 'position' is missing"),
    ({"position": 0}, "give either text or tokens"),
    ({"position": 0, "text": "a", "tokens": [1]}, "give either text or tokens"),
    ({"position": 0, "text": "a" * 70_000}, "accepts 65,536"),
    ({"position": 0, "text": "a", "max_tokens": 1, "seed": 1 << 64}, "seed is"),
]


def test_a_database_that_another_program_holds_is_unreadable(
    session: runtimes.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0)
    with replica(session, tmp_path) as one:
        in_thread(one.answer("a", {"position": 0, "text": "ab"}))
        (path,) = tmp_path.glob("*.sqlite")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(UnreadableError, match="try again"):
                in_thread(one.answer("a", {"position": 2, "text": "ab"}))


def test_what_does_not_fit_is_refused_in_a_sentence(session: runtimes.Session, tmp_path: Path) -> None:
    async def ask(one: Replica) -> None:
        for body, sentence in BODIES:
            with pytest.raises(RefusedError, match=sentence):
                await one.answer("a", body)
        for name in ("", "../a", "a/b", "é"):
            with pytest.raises(UserError, match="the name of the stream"):
                await one.answer(name, {"position": 0, "text": "a"})
        with pytest.raises(ElsewhereError, match="is at position 0 and the request says 7"):
            await one.answer("a", {"position": 7, "text": "a"})

    with replica(session, tmp_path) as one:
        in_thread(ask(one))
    assert streams_in(tmp_path) == []


def test_a_request_whose_client_leaves_is_done_once(session: runtimes.Session, tmp_path: Path) -> None:
    async def leave(one: Replica) -> None:
        deliver, drawing, may_go_on = one._engine._deliver, threading.Event(), threading.Event()

        def held_up(delivery: Any) -> None:
            drawing.set()
            may_go_on.wait(30)
            deliver(delivery)

        one._engine._deliver = held_up
        body = {"position": 0, "text": "a", "max_tokens": 50}
        left = asyncio.ensure_future(one.answer("a", body))
        await asyncio.to_thread(drawing.wait, 30)
        left.cancel()
        for busy in (one.answer("a", body), one.delete("a")):
            with pytest.raises(UnavailableError, match="another request is using the stream a"):
                await busy
        may_go_on.set()
        await asyncio.wait(list(BACKGROUND))
        assert (await one.answer("a", body))["position"] == 51
        assert left.cancelled()
        assert one._engine.scheduler.drawn == 50

    with replica(session, tmp_path) as one:
        in_thread(leave(one))


def test_a_replica_that_stops_sends_its_clients_elsewhere(session: runtimes.Session, tmp_path: Path) -> None:
    with replica(session, tmp_path) as one:
        one.stop()
        with pytest.raises(StoppedError):
            in_thread(one.answer("a", {"position": 0, "text": "a"}))


def test_a_too_large_body_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BODY_BYTES", 20)
    read = [0]

    async def parts(content: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(content), 4):
            read[0] += 4
            yield content[at : at + 4]

    def body(content: bytes, **headers: str) -> object:
        return in_thread(asyncio.wait_for(replica_module.read_body(headers, parts(content)), 30))

    assert body(b'{"position": 0}') == {"position": 0}
    for content in (b"{", b"[" * 20, b"\xff"):
        with pytest.raises(RefusedError, match="the body is not"):
            body(content)
    read[0] = 0
    with pytest.raises(RefusedError, match="larger than 20 bytes"):
        body(bytes(4000))
    assert read[0] == 24
    with pytest.raises(RefusedError, match="Content-Encoding: gzip"):
        body(gzip.compress(b"{}"), **{"content-encoding": "gzip"})
    assert read[0] == 24


def streams_in(folder: Path) -> list[str]:
    found = []
    for file in folder.glob("streams-*.sqlite"):
        with sqlite3.connect(file) as rows:
            found += [name for (name,) in rows.execute("SELECT id FROM stream")]
    return sorted(found)


def test_names_are_spread_over_a_fixed_number_of_files(session: runtimes.Session, tmp_path: Path) -> None:
    """A stream stays in its file, however many replicas there are."""
    names = [f"stream-{number}" for number in range(20)]

    async def begin(one: Replica) -> None:
        for name in names:
            await one.answer(name, {"position": 0, "text": "a"})
        assert not await one.delete("nothing")

    with replica(session, tmp_path) as one:
        in_thread(begin(one))
    assert streams_in(tmp_path) == sorted(names)
    assert 1 < len(list(tmp_path.glob("streams-*.sqlite"))) <= replica_module.DATABASE_FILES
