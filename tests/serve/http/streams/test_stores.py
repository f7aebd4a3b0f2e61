"""The stores of several artefacts: opened once each, and closed at one time."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtimes import Session
from xl_export.serve.http.base.server import Stores
from xl_export.serve.streams.index import StoreSettings
from xl_export.serve.streams.store import StreamStore


def test_models_of_an_artefact_share_a_store(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store_of(identity: str) -> StreamStore:
        return stores.acquire(SimpleNamespace(identity=identity * 64, state=session.state))  # type: ignore[arg-type]

    stores = Stores(tmp_path, StoreSettings())
    first, second, other = store_of("a"), store_of("a"), store_of("b")
    assert first is second
    assert first is not other
    together, close = threading.Barrier(2, timeout=20), StreamStore.close
    closed: list[StreamStore] = []

    def slowly(store: StreamStore, *, within: float) -> None:
        together.wait()  # one after the other, they would wait for ever
        close(store, within=within)
        closed.append(store)

    monkeypatch.setattr(StreamStore, "close", slowly)
    stores.release("a" * 64)
    threads = [threading.Thread(target=stores.release, args=(each * 64,)) for each in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id(store) for store in closed} == {id(first), id(other)}
    assert store_of("a") is not first, "the folder was given back"
