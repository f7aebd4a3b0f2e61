"""Streams while the disk of the server is slow: who waits for it, and who does not."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Session
from runtimes.contract.tensors import row_bytes
from tests.serve.http.conftest import HTTP
from tests.serve.http.streams.conftest import Keeping, created, owned
from tests.serve.http.test_clients import comes_true
from tests.serve.http.test_status import ANNA, BERT, bearer
from xl_export.serve.core.settings import StoreSettings
from xl_export.serve.http.base.keys import keys_of
from xl_export.serve.http.base.workers import INLINE_BYTES
from xl_export.serve.streams import database


class Slow:
    """While it is in use, no snapshot is written. waiting: how many are to be written."""

    def __init__(self) -> None:
        self.waiting, self._goes_on, self._write = 0, threading.Event(), database.write_snapshot

    def write(self, *given: Any, **options: Any) -> None:
        self.waiting += 1
        self._goes_on.wait(60)
        self._write(*given, **options)

    def end(self) -> None:
        self._goes_on.set()


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow()
    with monkeypatch.context() as patch:
        patch.setattr(database, "write_snapshot", slow.write)
        try:
            yield slow
        finally:
            slow.end()


def test_states_that_wait_for_the_disk_are_bounded(
    keeping: Keeping, session: Session, tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = row_bytes(session.state) + 4 * session.vocab.size
    with keeping(tmp_path, state_bytes=2 * state) as server, ThreadPoolExecutor() as threads:
        other = created(server, tokens[:5])
        with slow_disk(monkeypatch) as slow:
            waits = [threads.submit(created, server, tokens[:9]) for _ in range(2)]
            assert comes_true(lambda: slow.waiting == 2)
            fed = server.server.model(None).engine.scheduler.fed
            for path, body in (
                ("/v1/streams", {"tokens": [1]}),
                (f"{other.path}/append", {"tokens": [1]}),
                (f"{other.path}/continue", {"max_tokens": 1}),
                (f"{other.path}/rewind", {"tokens": 1}),
            ):
                refused = server.post(path, body)
                assert refused.status_code == 429, refused.text
                assert refused.json()["error"]["code"] == "queue_full"
                assert int(refused.headers["retry-after"]) >= 1
            assert server.server.model(None).engine.scheduler.fed == fed, "nothing was computed"
        for each in waits:
            assert each.result().append(tokens[:2])["stream"]["position"] == 11
        assert other.append(tokens[:1])["stream"]["position"] == 6, "nothing of what was refused was done"


def test_a_slow_disk_holds_up_no_work_on_texts(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More streams are written than any pool of this machine has threads."""
    pool = ThreadPoolExecutor()._max_workers
    with keeping(tmp_path) as server, ThreadPoolExecutor(pool + 1) as threads:
        before = len(server.get("/v1/streams").json()["data"])
        with slow_disk(monkeypatch) as slow:
            for _ in range(pool + 1):
                threads.submit(created, server)
            assert comes_true(lambda: slow.waiting >= pool)
            body = {"prompt": "a" * INLINE_BYTES, "max_tokens": 1}
            answer = HTTP.post(f"{server.at}/v1/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
            assert len(server.get("/v1/streams").json()["data"]) == before, "no stream was written"


def test_an_unreadable_disk_is_not_reported_as_damage(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeping(tmp_path) as server:
        name = created(server).name
    with keeping(tmp_path) as server, monkeypatch.context() as broken:

        def fails(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "Input/output error", str(tmp_path))

        broken.setattr(database, "read_snapshot", fails)
        answer = HTTP.post(f"{server.at}/v1/streams/{name}/append", json={"tokens": [1]}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stream_unreadable")
        assert str(tmp_path) not in answer.text


def test_a_damaged_stream_is_reported_to_owner_log_and_metrics(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "INLINE_BYTES", 0)
    options: dict[str, Any] = {"keys": keys_of([f"anna {ANNA}", f"bert {BERT}"], "keys")}
    with keeping(tmp_path, **options) as server:
        name = owned(server, ANNA).name
    (snapshot,) = tmp_path.glob("snapshots/*")
    snapshot.unlink()
    with keeping(tmp_path, store=StoreSettings(streams=1), **options) as server:
        path = f"/v1/streams/{name}"
        assert not HTTP.get(server.at + path, headers=bearer(ANNA)).json()["usable"]
        for method, at in (("POST", "/append"), ("GET", "/snapshot")):
            body = {"tokens": [1]} if method == "POST" else None
            asked = {"url": server.at + path + at, "json": body, "timeout": 60}
            answer = HTTP.request(method, headers=bearer(ANNA), **asked)
            assert answer.status_code == 410, answer.text
            assert answer.json()["error"]["code"] == "stream_damaged"
            assert str(tmp_path) not in answer.text
            assert HTTP.request(method, headers=bearer(BERT), **asked).status_code == 404
        assert server.post("/v1/streams", {}, headers=bearer(ANNA)).status_code == 403, "it still counts"
        assert "xl_export_streams_damaged 1.0" in server.get("/metrics", headers=bearer(ANNA)).text
        lines = [line for line in server.log.getvalue().splitlines() if "is damaged" in line]
        assert lines
        assert all(name in line and '"level":"error"' in line for line in lines)
        assert HTTP.delete(server.at + path, headers=bearer(ANNA)).is_success
        assert "xl_export_streams_damaged 0.0" in server.get("/metrics", headers=bearer(ANNA)).text
        owned(server, ANNA)
