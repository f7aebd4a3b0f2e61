"""The Open Inference Protocol: sequences of models with named inputs, and of language models."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from runtimes import Session, open_session
from runtimes.base.logits import log_probability
from runtimes.contract.spec import SPEC, load_spec
from tests.serve.http.conftest import HTTP, Running, running, sources
from tests.steps import observed
from xl_export.serve.core.settings import Limits, StoreSettings
from xl_export.serve.http import inference
from xl_export.serve.http.base import steps
from xl_export.serve.http.inference import HEADER, InferResult, ModelMetadata

Arrays = dict[str, np.ndarray]
TYPES = {"float32": "FP32", "int64": "INT64"}


@pytest.fixture(scope="module")
def server(policy: Path, artefacts: dict[str, Path]) -> Iterator[Running]:
    models = sources(("policy", policy), ("tiny", artefacts["ring"]))
    with running(models, limits=Limits(body_bytes=1 << 16), stream_limits=StoreSettings(streams=3)) as server:
        yield server


@pytest.fixture(scope="module")
def session(policy: Path) -> Session:
    return open_session(policy, threads=1, device="cpu")


def listed(inputs: Arrays) -> list[dict[str, Any]]:
    """Inputs in JSON."""
    return [
        {"name": name, "datatype": TYPES[x.dtype.name], "shape": list(x.shape), "data": x.tolist()}
        for name, x in inputs.items()
    ]


def asked(
    server: Running, inputs: list[dict[str, Any]], model: str = "policy", **fields: Any
) -> httpx.Response:
    return server.post(f"/v2/models/{model}/infer", {"inputs": inputs, **fields})


def outputs_of(answer: httpx.Response) -> Arrays:
    assert answer.status_code == 200, answer.text
    document = msgspec.json.decode(answer.content, type=InferResult)
    return {each.name: np.array(each.data).reshape(each.shape) for each in document.outputs}


def test_a_sequence_gives_the_outputs_of_a_session(server: Running, session: Session) -> None:
    """Two sequences in turns, one of them begun again, and ended."""
    memories = {7: session.start(1), "a name": session.start(1)}
    for number in range(12):
        name = 7 if number % 3 else "a name"
        begins = number in (0, 1, 8)
        if begins:
            memories[name] = session.start(1)
        inputs = observed(1, 1 + number % 4, number)
        expected, _ = session.step(inputs, memories[name])
        parameters = {"sequence_id": name, "sequence_start": begins, "sequence_end": number in (9, 11)}
        found = outputs_of(asked(server, listed(inputs), parameters=parameters))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], x) for name, x in expected.items())
    for name in (7, "a name"):
        refused = asked(server, listed(observed(1, 1, 0)), parameters={"sequence_id": name})
        assert "send sequence_start with its first request" in refused.json()["error"]
    assert server.get("/v1/streams").json()["data"] == []


def test_a_sequence_is_a_stream(server: Running, session: Session) -> None:
    memory = session.start(1)
    inputs = observed(1, 2, 0)
    session.step(inputs, memory)
    begun = asked(server, listed(inputs), id="mine", parameters={"sequence_id": 9, "sequence_start": True})
    assert begun.json()["id"] == "mine"
    state = begun.json()["parameters"]
    assert state["position"] == 2
    fork = server.post(f"/v1/streams/{state['stream']}/fork").json()["id"]
    expected, _ = session.step(inputs, memory)
    body = {"inputs": {name: x.tolist() for name, x in inputs.items()}}
    forked = server.post(f"/v1/streams/{fork}/step", body).json()["outputs"]
    assert np.array_equal(np.array(forked["worth"], np.float32), expected["worth"])
    again = {"sequence_id": 9, "position": 4}
    assert asked(server, listed(inputs), parameters=again).status_code == 409
    assert asked(server, listed(inputs), parameters=again | {"position": 2}).status_code == 200
    for name in (fork, state["stream"]):
        server.client.delete(f"{server.at}/v1/streams/{name}")
    assert asked(server, listed(inputs), parameters={"sequence_id": 9}).status_code == 400


def test_a_sequence_continues_on_another_artefact_of_the_same_weights(policy: Path, tmp_path: Path) -> None:
    inputs = listed(observed(1, 2, 0))
    start = {"sequence_id": 1, "sequence_start": True}
    served = sources(("policy", shutil.copytree(policy, tmp_path / "served")))
    with running(served, state=tmp_path / "state") as server:
        before = asked(server, inputs, parameters=start).json()["parameters"]["stream"]
        fork = server.post(f"/v1/streams/{before}/fork").json()["id"]
        lists = {each["name"]: each["data"] for each in inputs}
        expected = server.post(f"/v1/streams/{fork}/step", {"inputs": lists}).json()["outputs"]
    with open(tmp_path / "served" / SPEC, "ab") as file:
        file.write(b"\n")  # another identity
    with running(served, state=tmp_path / "state") as server:
        answer = asked(server, inputs, parameters={"sequence_id": 1}).json()
        assert answer["parameters"]["stream"] == before
        assert {each["name"]: each["data"] for each in answer["outputs"]}.keys() == expected.keys()
        for each in answer["outputs"]:
            assert np.array_equal(each["data"], np.ravel(expected[each["name"]]))


def test_sequences_are_bounded_like_streams(server: Running) -> None:
    inputs = listed(observed(1, 1, 0))
    for number in range(1, 5):
        answer = asked(server, inputs, parameters={"sequence_id": number, "sequence_start": True})
        assert answer.status_code == (200 if number < 4 else 403)
    assert "you have 3 streams" in answer.json()["error"]
    for number in range(1, 4):
        assert asked(server, inputs, parameters={"sequence_id": number, "sequence_end": True}).is_success


def test_arrays_may_follow_the_json_as_bytes(server: Running, session: Session) -> None:
    inputs = observed(1, 3, 0)
    body = {
        "inputs": [
            {**each, "data": None, "parameters": {"binary_data_size": x.nbytes}}
            for each, x in zip(listed(inputs), inputs.values(), strict=True)
        ],
        "outputs": [{"name": "worth"}, {"name": "best", "parameters": {"binary_data": False}}],
        "parameters": {"sequence_id": 1, "sequence_start": True, "binary_data_output": True},
    }
    head = msgspec.json.encode(body)
    content = head + b"".join(x.tobytes() for x in inputs.values())
    answer = server.post("/v2/models/policy/infer", content, headers={HEADER: str(len(head))})
    expected, _ = session.step(inputs, session.start(1))
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[HEADER])
    worth, best = msgspec.json.decode(answer.content[:length])["outputs"]
    assert worth["shape"] == [1, 3]
    assert worth["parameters"] == {"binary_data_size": 12}
    assert answer.content[length:] == expected["worth"].tobytes()
    assert best["data"] == expected["best"].ravel().tolist()
    for sent, told, sentence in (
        (content, str(len(content) + 1), "expected the bytes of the JSON"),
        (content, "x", "expected the bytes of the JSON"),
        (content, "1" * 5000, "expected the bytes of the JSON"),
        (content[:-4], str(len(head)), "goal has a binary_data_size of 8, and 4 bytes follow"),
        (content + b"1234", str(len(head)), "4 bytes follow the inputs"),
    ):
        refused = server.post("/v2/models/policy/infer", sent, headers={HEADER: told})
        assert refused.status_code == 400
        assert sentence in refused.json()["error"]
    assert asked(server, listed(inputs), parameters={"sequence_id": 1, "sequence_end": True}).is_success


def test_the_server_describes_itself_and_its_models(server: Running, policy: Path) -> None:
    assert server.get("/v2/health/live").json() == {"live": True}
    assert server.get("/v2/health/ready").json() == {"ready": True}
    assert "sequence" in server.get("/v2").json()["extensions"]
    assert server.get("/v2/models/policy/ready").json() == {"name": "policy", "ready": True}
    decoded = msgspec.json.decode(server.get("/v2/models/policy").content, type=ModelMetadata)
    document = msgspec.to_builtins(decoded)
    assert document["inputs"] == [
        {"name": "observation", "datatype": "FP32", "shape": [1, -1, 5]},
        {"name": "previous", "datatype": "INT64", "shape": [1, -1]},
        {"name": "goal", "datatype": "FP32", "shape": [1, 2]},
    ]
    assert [each["name"] for each in document["outputs"]] == ["action", "worth", "features", "best"]
    fixed = dataclasses.replace(load_spec(policy), fixed_rows=1)
    session = SimpleNamespace(spec=fixed, rule=fixed.rule)
    assert inference._tensor(session, fixed.inputs[0]).shape == [1, fixed.rule.segment, 5]  # type: ignore[arg-type]
    document = server.get("/v2/models/tiny").json()
    assert document["inputs"] == [{"name": "input_ids", "datatype": "INT64", "shape": [1, -1]}]
    size = server.server.models["tiny"].session.vocab.size
    assert document["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [1, -1, size]}]


def test_the_only_version_of_a_model_is_1(server: Running, session: Session) -> None:
    version = "/v2/models/policy/versions/1"
    metadata = server.get(version).json()
    assert metadata == server.get("/v2/models/policy").json()
    assert metadata["versions"] == ["1"]
    assert server.get(f"{version}/ready").json() == {"name": "policy", "ready": True}
    inputs = observed(1, 2, 0)
    ends = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    found = outputs_of(asked(server, listed(inputs), "policy/versions/1", parameters=ends))
    expected, _ = session.step(inputs, session.start(1))
    assert all(np.array_equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/policy/versions/2", 404),
        ("POST", "/v2/models/policy/versions/2/infer", 404),
        ("GET", "/v2/models/other/versions/1", 404),
        ("GET", "/v2/repository/index", 404),
        ("GET", "/v2/", 404),
        ("GET", "/v2/models/policy/infer", 405),
        ("DELETE", "/v2", 405),
        ("POST", "/v2/health/live", 405),
        ("POST", "/v2/models/policy/infer", 415),
        ("GET", "/v2/health/live", 403),
    ],
)
def test_an_error_is_a_sentence_wherever_it_comes_from(
    server: Running, method: str, path: str, status: int
) -> None:
    """Triton's client fails while it prints any other one."""
    headers = {415: {"Content-Encoding": "gzip"}, 403: {"Host": "evil.example"}}.get(status, {})
    answer = HTTP.request(method, server.at + path, json={}, headers=headers)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert answer.json()["error"].endswith(".")


def refused_step(**changed: Any) -> list[dict[str, Any]]:
    """Inputs of a step of two tokens, with changes to `observation`."""
    inputs = listed(observed(1, 2, 0))
    inputs[0] |= changed
    return inputs


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    (refused_step(name="other"), "the inputs are ['goal', 'other', 'previous']; expected"),
    (refused_step(datatype="FP64"), "the datatype of observation is 'FP64'; expected FP32 or INT64"),
    (refused_step(shape=[1, 2, 4]), "observation has 10 numbers of the type float64, which do not make"),
    (refused_step(shape=[-1, -2, 5]), "which do not make the shape [-1, -2, 5]"),
    (refused_step(data=[["a"]]), "observation is no array of numbers"),
    (
        refused_step(data=None),
        "observation has a binary_data_size of None, and 0 bytes follow; expected either data",
    ),
    ([*refused_step(), *refused_step()], "an input is given twice"),
]


@pytest.mark.parametrize(("inputs", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_does_not_fit_is_refused(server: Running, inputs: list[dict[str, Any]], sentence: str) -> None:
    answer = asked(server, inputs, parameters={"sequence_id": 1, "sequence_start": True})
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]
    assert server.get("/v1/streams").json()["data"] == []


def test_the_axes_of_a_shape_are_counted_first(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "math", None)  # a product would fail
    answer = asked(server, refused_step(shape=[1] * 100), parameters={"sequence_id": 1})
    assert answer.status_code == 400
    assert "which do not make the shape" in answer.json()["error"]


def test_requests_that_cannot_be_served_are_refused(server: Running) -> None:
    inputs = listed(observed(1, 1, 0))
    start = {"sequence_id": 1, "sequence_start": True}
    for fields, sentence in (
        ({"parameters": {"sequence_start": True}}, "sequence_id is 0; expected a number other than 0"),
        ({"parameters": {"sequence_id": "a" * 200}}, "a name of at most 128 characters"),
        ({"parameters": {"sequence_id": True}}, "parameters.sequence_id is a boolean"),
        (
            {"parameters": start, "outputs": [{"name": "x"}]},
            "the model has no output 'x'; expected some of action",
        ),
        ({"parameters": start | {"position": 7}}, "position is 7 with sequence_start, which begins at 0"),
        ({"parameters": start | {"priority": 1}}, "the field 'priority' of parameters is not known"),
    ):
        answer = asked(server, inputs, **fields)
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]
    assert asked(server, inputs, "none", parameters=start).status_code == 404


def test_a_sequence_of_a_language_model_returns_its_logits(
    server: Running, artefacts: dict[str, Path], tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens beyond a segment are cut, and the sequence is a stream that takes tokens in other ways too."""
    session = open_session(artefacts["ring"], threads=1)
    memory, at = session.start(1), 0
    for count in (1, 2, 8, 21, 3):
        ids = tokens[None, at : at + count]
        expected = [session.step(ids[:, first : first + 8], memory)[0] for first in range(0, count, 8)]
        parameters = {"sequence_id": 3, "sequence_start": at == 0, "position": at or None}
        answer = asked(server, listed({"input_ids": ids}), "tiny", parameters=parameters)
        (logits,) = outputs_of(answer).values()
        assert logits.shape == (1, count, session.vocab.size)
        assert np.abs(logits - np.concatenate(expected, axis=1)).max() < 1e-4  # the rest of a cut is padded
        at += count
    stream = f"/v1/streams/{answer.json()['parameters']['stream']}"
    bits = server.post(f"{stream}/append", {"tokens": tokens[at : at + 1].tolist(), "surprisal": True})
    told = -log_probability(expected[-1][:, -1:], tokens[None, at : at + 1])[0, 0] / np.log(2)
    assert abs(bits.json()["bits"][0] - told) < 1e-3
    monkeypatch.setattr(steps, "MAX_LOGITS", 9 * session.vocab.size)
    ends = {"sequence_id": 3, "sequence_end": True}
    for ids, sentence in (
        (np.zeros((1, 10), np.int64), "input_ids has 10 tokens, and an answer holds the logits after 9"),
        (np.zeros((2, 1), np.int64), "input_ids has the shape [2, 1]; expected [1, n]"),
        (np.full((1, 1), 10**6), "outside the vocabulary"),
        (np.zeros((1, 1), np.float32), "neither a text nor a list of token ids"),
    ):
        refused = asked(server, listed({"input_ids": ids}), "tiny", parameters=ends)
        assert refused.status_code == 400
        assert sentence in refused.json()["error"]
    assert server.get(stream).json()["position"] == at + 1
    assert asked(server, listed({"input_ids": tokens[None, :9]}), "tiny", parameters=ends).is_success
    assert server.get(stream).status_code == 404


@pytest.mark.slow
def test_tritons_own_client_follows_a_sequence(server: Running, session: Session) -> None:
    triton = pytest.importorskip(
        "tritonclient.http", reason="tritonclient is not installed; see make test-triton"
    )
    client = triton.InferenceServerClient(server.at.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("policy")
    assert client.get_server_metadata()["name"] == "xl-export"
    names = {each["name"]: each["datatype"] for each in client.get_model_metadata("policy")["inputs"]}
    memory = session.start(1)
    for number in range(8):
        inputs = observed(1, 1 + number % 4, number)
        given = []
        for name, x in inputs.items():
            given.append(triton.InferInput(name, x.shape, names[name]))
            given[-1].set_data_from_numpy(x, binary_data=number % 2 == 0)
        wanted = None
        if number > 3:
            wanted = [triton.InferRequestedOutput("worth", binary_data=number % 3 == 0)]
        ends = {"sequence_start": number == 0, "sequence_end": number == 7}
        answer = client.infer("policy", given, outputs=wanted, sequence_id=5, **ends)
        expected, _ = session.step(inputs, memory)
        for name in expected if wanted is None else ["worth"]:
            assert np.array_equal(answer.as_numpy(name), expected[name])
    with pytest.raises(triton.InferenceServerException, match="send sequence_start with its first request"):
        client.infer("policy", given, sequence_id=5, model_version="1")
    with pytest.raises(triton.InferenceServerException, match="versions/2"):
        client.infer("policy", given, sequence_id=5, model_version="2")
    client.close()
