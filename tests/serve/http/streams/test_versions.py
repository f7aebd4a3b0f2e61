"""The stores of several artefacts and versions: each is opened once, and nothing of it is lost or hidden."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runtimes import Session
from tests.serve.http.conftest import HTTP, Running, running, sources
from tests.serve.http.streams.conftest import Stream, created, restored
from xl_export.artefact.export import export
from xl_export.serve.http.base.server import Stores
from xl_export.serve.streams.index import StoreSettings
from xl_export.serve.streams.store import StreamStore


@pytest.fixture(scope="module")
def other_version(run: Path, session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rule = replace(session.rule, mem_len=session.rule.mem_len // 2)
    return export(run, tmp_path_factory.mktemp("version") / "other", memory="ring", rule=rule)


def listed(server: Running) -> dict[str, bool]:
    return {each["id"]: each["usable"] for each in server.get("/v1/streams").json()["data"]}


def refused(server: Running, stream: Stream, identity: str) -> None:
    """Only what needs no model is done."""
    for what, body in (
        ("append", {"tokens": [1]}),
        ("continue", {}),
        ("rewind", {"tokens": 1}),
        ("fork", {}),
    ):
        answer = server.post(f"{stream.path}/{what}", body)
        assert answer.status_code == 409, answer.text
        error = answer.json()["error"]
        assert error["code"] == "other_artefact"
        assert f"belongs to the artefact {identity}, which this server does not serve" in error["message"]
    facts = server.get(stream.path).json()
    assert (facts["usable"], facts["model"], facts["artefact"]) == (False, None, identity)


def test_streams_of_another_version_are_kept_and_counted(
    artefacts: dict[str, Path], other_version: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    first, other = (sources(("tiny", each)) for each in (artefacts["ring"], other_version))
    bounds = StoreSettings(streams=3)
    with running(first, state=tmp_path, stream_limits=bounds) as server:
        stream, second = created(server, tokens[:20]), created(server, tokens[:20])
        stream.append(tokens[20:25])
        expected = stream.fork().append(tokens[25:30])["bits"]
        identity = server.server.model(None).session.identity[:32]
    with running(other, state=tmp_path, stream_limits=bounds) as server:
        assert list(listed(server).values()) == [False] * 3
        refused(server, stream, identity)
        assert server.post("/v1/streams", {}).status_code == 403, "the old streams count"
        assert HTTP.delete(server.at + second.path).is_success
        fresh = created(server)
        snapshot = stream.on(server).snapshot()
        assert restored(server, snapshot).status_code == 403
        assert fresh.append(tokens[:3])["stream"]["position"] == 3
    with running(first, state=tmp_path) as server:
        assert stream.on(server).append(tokens[25:30])["bits"] == expected, "bit for bit"
        assert (
            Stream(server, restored(server, snapshot).json()["id"]).append(tokens[25:30])["bits"] == expected
        )
        refused(server, fresh, server.get("/v1/streams").json()["data"][-1]["artefact"])
        assert listed(server)[stream.name]


def test_a_snapshot_that_needs_its_model_is_refused(
    artefacts: dict[str, Path], other_version: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    with running(sources(("tiny", artefacts["ring"])), state=tmp_path) as server:
        stream = created(server, tokens[:20])
        stream.append(tokens[20:25])
        shutil.copytree(tmp_path / "streams", tmp_path / "killed")  # as a kill would leave it
    shutil.rmtree(tmp_path / "streams")
    (tmp_path / "killed").rename(tmp_path / "streams")
    for writer in tmp_path.rglob(".writer"):
        writer.unlink()
    with running(sources(("tiny", other_version)), state=tmp_path) as server:
        assert server.get(stream.path).json()["position"] == 25
        answer = server.get(f"{stream.path}/snapshot")
        assert answer.status_code == 409
        assert "the last 5 tokens of the stream" in answer.json()["error"]["message"]
        assert HTTP.delete(server.at + stream.path).is_success
        assert server.get(stream.path).status_code == 404


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
