"""Sessions of every kind answer one client as they answer by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtimes import Session, evaluate, generate, open_session
from tests import host_gpu
from tests.serve.http.conftest import Running, running, sources
from tests.serve.http.streams.conftest import Stream, restored

# The ring of an exported run, other forms of it, the run itself, a recurrent cell (one token a step), a
# selective state space, and that on a device.
LANGUAGE_MODELS = ("ring", "shift", "hidden", "run", "lstm", "selective", "device")


@pytest.fixture(scope="module")
def folders(artefacts: dict[str, Path], run: Path, module_artefact: Callable[[str], Path]) -> dict[str, Path]:
    traced = {name: module_artefact(name) for name in ("lstm", "selective")}
    return {**artefacts, **traced, "run": run, "device": traced["selective"]}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], state: Path) -> Iterator[Running]:
    served = [
        replace(source, device="cuda") if source.name == "device" else source
        for source in sources(*((name, folders[name]) for name in LANGUAGE_MODELS))
    ]
    with pytest.MonkeyPatch.context() as patch:
        host_gpu.install(patch)
        with running(served, state=state) as server:
            yield server


def opened(folder: Path) -> Session:
    return open_session(folder, threads=1, device="cpu")


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_answers_as_its_session(
    name: str, server: Running, folders: dict[str, Path], tokens: np.ndarray
) -> None:
    session = opened(folders[name])
    facts = server.get(f"/v1/models/{name}").json()["xl_export"]
    assert isinstance(facts["rows_independent"], bool)
    body = {"model": name, "prompt": [tokens[:n].tolist() for n in (5, 9, 30)], "max_tokens": 12}
    choices = server.post("/v1/completions", {**body, "seed": 3, "top_k": 4}).json()["choices"]
    texts = ["", "", ""]
    sampler = session.sampler.replaced(top_k=4)
    for piece in generate(session, body["prompt"], max_tokens=12, seed=3, sampler=sampler):
        texts[piece.row] += piece.text
    assert [choice["text"] for choice in choices] == texts

    (scored,) = server.post("/v1/score", {"model": name, "texts": [tokens[:40].tolist()]}).json()["data"]
    assert abs(scored["log_prob"] + evaluate(session, tokens[:40]).token_nats.sum()) < 1e-2

    memory = session.start(1)
    size = min(4, session.rule.segment)
    for at in range(0, 3 * size, size):
        ids = tokens[None, at : at + size]
        given = {"name": "input_ids", "datatype": "INT64", "shape": list(ids.shape), "data": ids.tolist()}
        parameters = {"sequence_id": 1, "sequence_start": at == 0, "sequence_end": at == 2 * size}
        asked = {"inputs": [given], "parameters": parameters}
        (output,) = server.post(f"/v2/models/{name}/infer", asked).json()["outputs"]
        expected, memory = session.step(ids, memory)
        assert np.abs(np.reshape(output["data"], output["shape"]) - expected).max() < 1e-4


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_stream_is_appended_to_forked_restored_and_rewound_as_far_as_it_can_be(
    name: str, server: Running, folders: dict[str, Path], tokens: np.ndarray
) -> None:
    nats = evaluate(opened(folders[name]), tokens[:60]).token_nats / np.log(2)  # of the second token on
    made = server.post("/v1/streams", {"model": name, "tokens": tokens[:20].tolist()})
    stream = Stream(server, made.json()["stream"]["id"])
    assert np.abs(np.array(stream.append(tokens[20:45])["bits"]) - nats[19:44]).max() < 1e-2
    fork = stream.fork()
    if name not in ("ring", "run"):
        assert stream.append(tokens[45:46])["stream"]["rewindable"] == 0
        refused = server.post(f"{stream.path}/rewind", {"tokens": 1})
        assert refused.json()["error"]["code"] == "too_far_back"
        assert stream.post("rewind", {"tokens": 46})["position"] == 0
    copy = Stream(server, restored(server, fork.snapshot(), model=name).json()["id"])
    for each in (fork, copy):
        assert np.abs(np.array(each.append(tokens[45:60])["bits"]) - nats[44:59]).max() < 1e-2
