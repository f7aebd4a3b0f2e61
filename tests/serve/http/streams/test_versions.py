"""Streams of several artefacts and versions in one store: nothing is lost or hidden."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtimes import Session
from runtimes.base.tensors_file import read_metadata
from tests.serve.http.conftest import HTTP, Running, running, sources
from tests.serve.http.streams.conftest import Stream, created, restored
from xl_export.artefact.export import export
from xl_export.serve.core.settings import StoreSettings


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
        assert f"belongs to the artefact {identity[:32]}, and this server has no model" in error["message"]
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
        identity = server.server.model(None).session.identity
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
        refused(server, fresh, server.get(fresh.path).json()["artefact"])
        assert listed(server)[stream.name]


def test_a_snapshot_that_needs_its_model_is_refused(
    artefacts: dict[str, Path], other_version: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    with running(sources(("tiny", artefacts["ring"])), state=tmp_path) as server:
        stream = created(server, tokens[:20])
        stream.append(tokens[20:25])
        for file in tmp_path.glob("streams.sqlite*"):  # as a kill would leave it
            shutil.copy(file, tmp_path / f"killed-{file.name}")
    for file in tmp_path.glob("killed-*"):
        file.rename(tmp_path / file.name.removeprefix("killed-"))
    with running(sources(("tiny", other_version)), state=tmp_path) as server:
        assert server.get(stream.path).json()["position"] == 25
        answer = server.get(f"{stream.path}/snapshot")
        assert answer.status_code == 409
        assert "the last 5 tokens of the stream" in answer.json()["error"]["message"]
        assert HTTP.delete(server.at + stream.path).is_success
        assert server.get(stream.path).status_code == 404


def test_other_exports_continue_a_stream_and_other_weights_only_adopt_it(
    artefacts: dict[str, Path],
    run: Path,
    make_run: Callable[..., Path],
    tokens: np.ndarray,
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    small = export(run, tmp_path / "small", memory="ring", memory_precision="int8")
    tuned = export(make_run(seed=5), tmp_path / "tuned", memory="ring")
    with running(sources(("tiny", artefacts["ring"])), state=state) as server:
        stream = created(server, tokens[:40])
        stream.append(tokens[40:45])
        expected = stream.fork().append(tokens[45:60])["bits"]
        first = server.server.models["tiny"].session.memory_identity.weights
    both = sources(("tuned", tuned), ("small", small))
    with running(both, state=state) as server:
        assert server.get(stream.path).json()["model"] == "small"
        bits = stream.on(server).append(tokens[45:60])["bits"]
        assert 0 < np.abs(np.array(bits) - expected).max() < 0.5, "of another precision"
        snapshot = stream.on(server).snapshot()
        identity = server.server.models["small"].session.identity
    only = sources(("tuned", tuned))
    with running(only, state=state) as server:
        refused(server, stream, identity)
        answer = restored(server, snapshot)
        assert answer.status_code == 400
        assert "--adopt-streams" in answer.json()["error"]["message"]
    with running(only, state=state, stream_limits=StoreSettings(adopt=True)) as server:
        assert server.get(stream.path).json()["model"] == "tuned"
        assert stream.on(server).append(tokens[60:65])["stream"]["position"] == 65
        moved = Stream(server, restored(server, snapshot).json()["id"])
        assert moved.append(tokens[60:65])["stream"]["position"] == 65
        logged = f"the stream {stream.name} continues with other weights than {first}"
        assert logged in server.log.getvalue()
        (tmp_path / "kept").write_bytes(stream.on(server).snapshot())
        assert read_metadata(tmp_path / "kept")["adopted"] == first
    with sqlite3.connect(state / "streams.sqlite") as rows:
        found = dict(rows.execute("SELECT id, adopted FROM stream"))
    assert (found[stream.name], found[moved.name]) == (first, first)
    with running(both, state=state) as server:
        assert server.get(stream.path).json()["model"] == "tuned", "the model that continued it"
