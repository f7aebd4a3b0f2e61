"""The stores of several artefacts: opened once each, and closed at one time."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtimes import Session
from xl_export.serve.http.base.stores import StoreLease, Stores
from xl_export.serve.streams.facts import StoreSettings
from xl_export.serve.streams.store import StreamStore


def test_models_of_an_artefact_share_a_store(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lease(identity: str) -> StoreLease:
        return stores.lease(SimpleNamespace(identity=identity * 64, state=session.state))  # type: ignore[arg-type]

    stores = Stores(tmp_path, StoreSettings())
    first, second, other = lease("a"), lease("a"), lease("b")
    assert first.store is second.store
    assert first.store is not other.store
    together, close = threading.Barrier(2, timeout=20), StreamStore.close
    closed: list[StreamStore] = []

    def slowly(store: StreamStore, *, within: float) -> None:
        together.wait()  # one after the other, they would wait for ever
        close(store, within=within)
        closed.append(store)

    monkeypatch.setattr(StreamStore, "close", slowly)
    first.close()
    threads = [threading.Thread(target=each.close) for each in (second, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id(store) for store in closed} == {id(first.store), id(other.store)}
    assert lease("a").store is not first.store, "the folder was given back"
