"""Streams of models with named inputs: arrays as JSON and as safetensors."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save

from runtimes import Session, open_session
from tests.serve.http.conftest import Running, running, sources
from tests.serve.http.streams.conftest import LIMITS, created, restored
from tests.steps import observed
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.streams.documents import SAFETENSORS, CreateResult, StepResult
from xl_export.serve.http.streams.work import StreamWork
from xl_export.serve.streams import store

FILE = {"content-type": SAFETENSORS}


@pytest.fixture(scope="module")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    state = tmp_path_factory.mktemp("state")
    with running(sources(("policy", policy)), limits=LIMITS, state=state) as server:
        yield server


@pytest.fixture(scope="module")
def session(policy: Path) -> Session:
    return open_session(policy, threads=1, device="cpu")


def lists(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: x.tolist() for name, x in inputs.items()}


def test_nothing_calls_a_policy_a_language_model(server: Running) -> None:
    answer = server.post("/v1/streams", {})
    msgspec.json.decode(answer.content, type=CreateResult)
    assert set(answer.json()) == {"object", "stream"}
    facts = server.get("/v1/models/policy").json()["xl_export"]
    assert facts["vocabulary"] is facts["growing_bytes_per_token"] is None
    page = server.get("/").text
    assert "<title>xl-export</title>" in page
    assert "language model" not in page.lower()


def test_json_and_safetensors_give_the_outputs_of_a_session(server: Running, session: Session) -> None:
    stream = created(server)
    memory = session.start(1)
    for number in range(12):
        inputs = observed(1, 1 + number % 4, number)
        at = int(memory.positions[0])
        expected, _ = session.step(inputs, memory)
        if number % 2:
            answer = server.post(f"{stream.path}/step", {"inputs": lists(inputs), "position": at})
            document = msgspec.json.decode(answer.content, type=StepResult)
            position = document.stream.position
            found = {name: np.array(x, expected[name].dtype) for name, x in document.outputs.items()}
        else:
            content = save(inputs, {"position": str(at)})
            answer = server.post(f"{stream.path}/step", content, headers=FILE)
            assert answer.headers["content-type"] == SAFETENSORS
            found = load(answer.content)
            header = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
            position = json.loads(header["__metadata__"]["stream"])["position"]
        assert all(np.array_equal(found[name], x) for name, x in expected.items())
        assert position == memory.positions[0]
    again = server.post(f"{stream.path}/step", {"inputs": lists(inputs), "position": at})
    assert again.status_code == 409
    assert again.json()["error"]["position"] == memory.positions[0]


def test_streams_of_steps_are_saved_forked_rewound_and_deleted(
    server: Running, session: Session, policy: Path
) -> None:
    inputs = [lists(observed(1, 3, number)) for number in range(3)]
    stream = created(server)
    stream.post("step", {"inputs": inputs[0]})
    fork = stream.fork()
    snapshot = stream.snapshot()
    other = restored(server, snapshot).json()["id"]
    expected = stream.post("step", {"inputs": inputs[1]})["outputs"]
    assert fork.post("step", {"inputs": inputs[1]})["outputs"] == expected
    assert server.post(f"/v1/streams/{other}/step", {"inputs": inputs[1]}).json()["outputs"] == expected
    first = created(server).post("step", {"inputs": inputs[2]})["outputs"]
    assert stream.post("rewind", {"tokens": 6})["position"] == 0
    assert stream.post("step", {"inputs": inputs[2]})["outputs"] == first
    refused = server.post(f"{stream.path}/rewind", {"tokens": 1})
    assert "only a ring of an artefact can be rewound in part" in refused.json()["error"]["message"]
    assert server.client.delete(server.at + fork.path).json()["deleted"]
    assert server.get(fork.path).status_code == 404


def test_streams_of_steps_continue_after_a_kill(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are fed again from a journal, whose beginning became a snapshot."""
    monkeypatch.setattr(store, "JOURNAL_BYTES", 1 << 12)
    inputs = lists(observed(1, 4, 0))
    with running(sources(("policy", policy)), state=tmp_path / "state") as server:
        stream = created(server)
        for number in range(40):
            stream.post("step", {"inputs": lists(observed(1, 1 + number % 4, number))})
        fork = stream.fork()
        copy = shutil.copytree(tmp_path / "state", tmp_path / "killed")
        expected = stream.post("step", {"inputs": inputs})["outputs"]
    with sqlite3.connect(copy / "streams.sqlite") as rows:
        journals = rows.execute("SELECT SUM(LENGTH(fed)) FROM journal GROUP BY stream").fetchall()
    assert journals
    assert all(size <= 2 * store.JOURNAL_BYTES for (size,) in journals)
    with running(sources(("policy", policy)), state=copy) as server:
        for each in (stream, fork):
            assert each.on(server).post("step", {"inputs": inputs})["outputs"] == expected


def test_a_step_that_overflows_leaves_the_stream(server: Running) -> None:
    stream = created(server)
    inputs = lists(observed(1, 1, 0))
    answer = server.post(f"{stream.path}/step", {"inputs": inputs | {"observation": [[[1e39] * 5]]}})
    assert answer.status_code == 400
    assert "observation has a number that is not finite" in answer.json()["error"]["message"]
    assert stream.post("step", {"inputs": inputs})["stream"]["position"] == 1


def test_a_memory_that_overflows_is_refused_despite_finite_outputs(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = created(server)
    session = server.server.models["policy"].session
    compute = session.step

    def overflows(*given: Any) -> Any:
        outputs, memory = compute(*given)
        next(iter(memory.tensors.values()))[:] = np.inf
        return outputs, memory

    monkeypatch.setattr(session, "step", overflows)
    answer = server.post(f"{stream.path}/step", {"inputs": lists(observed(1, 1, 0))})
    assert answer.status_code == 400
    assert "the step has made numbers that are not finite" in answer.json()["error"]["message"]
    assert server.get(stream.path).json()["position"] == 0


def test_a_step_whose_client_has_left_changes_nothing(server: Running) -> None:
    stream = created(server)
    work = StreamWork(server.server.model(None), "", LIMITS)
    work.leave()
    step = work.lasting(work.step(stream.name, lists(observed(1, 2, 0))))
    with pytest.raises(RefusedError):
        asyncio.run_coroutine_threadsafe(step, server.loop).result(60)
    assert server.get(stream.path).json()["position"] == 0


def test_inputs_that_do_not_fit_leave_the_stream(server: Running) -> None:
    """What a session refuses is in tests/test_sessions.py."""
    stream = created(server)
    inputs = observed(1, 2, 0)
    for changed, sentence in (
        ({"other": 1}, "the inputs are ['goal', 'observation', 'other'"),
        ({"observation": [[1], [1, 2]]}, "observation is no array of numbers; give"),
        ({"goal": [["a", "b"]]}, "goal is no array of numbers"),
        ({"previous": [[0, 3]]}, "previous has the id 3; expected 0 to 2"),
    ):
        answer = server.post(f"{stream.path}/step", {"inputs": lists(inputs) | changed})
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
    for content, sentence in (
        (b"", "the body is not a safetensors file of arrays of int64"),
        (save(inputs)[:-4], "the body is not a safetensors file"),
        (save(inputs, {"position": "1" * 5000}), "expected a number"),
        (save({"goal": np.zeros((1, 2))}), "the body is not a safetensors file"),
    ):
        answer = server.post(f"{stream.path}/step", content, headers=FILE)
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
    assert server.get(stream.path).json()["position"] == 0


def test_what_needs_a_language_model_says_so(server: Running) -> None:
    stream = created(server)
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/score", {"texts": ["a"]}),
        ("/tokenize", {"prompt": "a"}),
        ("/v1/streams", {"text": "a"}),
        (f"{stream.path}/append", {"tokens": [1]}),
        (f"{stream.path}/continue", {}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "this artefact is no language model: its step reads" in message
        assert message.endswith("; send its inputs to /v1/streams/ID/step.")
    assert server.get("/v1/models").json()["data"][0]["xl_export"]["vocabulary"] is None
    assert "xl_export_engine_steps_total" in server.get("/metrics").text
