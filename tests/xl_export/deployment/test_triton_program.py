"""The model repository for the Python backend, served by the real Triton Inference Server."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtimes
from runtimes.contract.spec import load_spec
from tests.triton_program import MissingError, environment, serving
from xl_export.deployment.model_repository import read_sequence_graph, write_model, write_session
from xl_export.deployment.server_config import CONFIG, server_config

triton = pytest.importorskip(
    "tritonclient.grpc",
    reason="tritonclient is not installed; pip install tritonclient[grpc]",
    exc_type=ImportError,
)
ROOT = Path(__file__).parents[3]
ARTEFACT = ROOT / "tests" / "data" / "small"
# `make test-triton` keeps the client beside the packages of the tests, and names its folder here.
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
PIECE, IDLE_SECONDS = 6, 1.0  # the longest segment of the artefact; until a sequence is dropped
pytestmark = pytest.mark.slow  # it installs the server, and starts it for each test

Serve = Callable[..., AbstractContextManager["Client"]]


@pytest.fixture(scope="module")
def session() -> runtimes.Session:
    return runtimes.open_session(ARTEFACT, threads=1, device="cpu")


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`serve(idle=seconds, rows=number)`: a client of a server whose configuration was edited so."""
    try:
        folder = environment()
    except MissingError as error:
        pytest.skip(str(error))

    @contextlib.contextmanager
    def start(*, idle: float = 600, rows: int = 64) -> Iterator[Client]:
        config = write_session(ARTEFACT, tmp_path / "models") / CONFIG
        edited = re.sub(r"(idle_microseconds: )\d+", rf"\g<1>{int(idle * 1e6)}", config.read_text())
        config.write_text(re.sub(r"(candidate_sequences: )\d+", rf"\g<1>{rows}", edited))
        (tmp_path / "scratch").mkdir()
        with serving(folder, tmp_path / "models", scratch=tmp_path / "scratch") as address:
            client = Client(address)
            yield client
            client.service.close()

    return start


class Client:
    def __init__(self, address: str) -> None:
        self.address, self.service = address, triton.InferenceServerClient(address)

    def ask(self, sequence: int | str, tokens: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
        """The answer by name. options: targets, position, start, end; and those of the server's client."""
        inputs, words = self.request(sequence, tokens, **options)
        answer = self.service.infer(ARTEFACT.name, inputs, **words)
        arrays = {name: answer.as_numpy(name) for name in ("logits", "log_probs", "position")}
        return {name: array[0] for name, array in arrays.items() if array is not None}

    def request(
        self,
        sequence: int | str,
        tokens: np.ndarray,
        *,
        targets: np.ndarray | None = None,
        position: int | None = None,
        start: bool = False,
        end: bool = False,
        **words: Any,
    ) -> tuple[list[Any], dict[str, Any]]:
        sent = {"input_ids": tokens, "targets": targets}
        sent["position"] = None if position is None else np.array([position])
        inputs = []
        for name, array in sent.items():
            if array is not None:
                inputs.append(triton.InferInput(name, [1, len(array)], "INT64"))
                inputs[-1].set_data_from_numpy(np.asarray(array, np.int64)[None])
        return inputs, {
            "sequence_id": sequence,
            "sequence_start": start,
            "sequence_end": end,
            **words,
        }

    def executions(self) -> tuple[int, int]:
        """The numbers of requests and of calls of the model."""
        (facts,) = self.service.get_inference_statistics(ARTEFACT.name).model_stats
        return facts.inference_count, facts.execution_count


def text(session: runtimes.Session, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, session.vocab.size, length)


def test_interleaved_ragged_sequences_score_as_evaluate_does(
    session: runtimes.Session, serve: Serve, tmp_path: Path
) -> None:
    """Twelve sequences in threads of their own, in pieces of any length; eight at a time. And the example."""
    texts = {name: text(session, 60 + name, seed=name) for name in range(1, 13)}
    nats: dict[int, list[float]] = {name: [] for name in texts}

    def talk(client: Client, name: int) -> None:
        chance, tokens, at = random.Random(name), texts[name], 0
        while at < len(tokens) - 1:
            end = min(at + chance.randint(1, session.rule.segment), len(tokens) - 1)
            answer = client.ask(
                name,
                tokens[at:end],
                targets=tokens[at + 1 : end + 1],
                position=at,
                start=at == 0,
                end=end == len(tokens) - 1,
            )
            nats[name] += (-answer["log_probs"]).tolist()
            assert answer["position"] == end
            at = end

    with serve(rows=8) as client:
        talkers = [threading.Thread(target=talk, args=(client, name)) for name in texts]
        for talker in talkers:
            talker.start()
        for talker in talkers:
            talker.join()
        requests, calls = client.executions()
        folder, line = str(tmp_path / "models" / ARTEFACT.name), "abcabcabcabcab"
        program = [sys.executable, "examples/triton_client.py", client.address, folder]
        said = subprocess.run(program, input=f"{line}\n", cwd=ROOT, env=ENV, capture_output=True, text=True)
    (alone,) = runtimes.score_texts(session, [line])
    assert said.stdout.startswith(f"{alone.log_prob:.4f} nats, "), said
    for name, tokens in texts.items():
        expected = runtimes.evaluate(session, tokens).token_nats
        assert np.abs(np.array(nats[name]) - expected).max() < 1e-4
    assert calls < requests  # requests that wait at once are handed over together


def fresh(session: runtimes.Session, tokens: np.ndarray) -> np.ndarray:
    return session.predict(tokens[None], session.start(1))[0][0]


def test_the_server_reads_repositories_of_missing_backends(tmp_path: Path) -> None:
    """This build of it has the Python backend alone. A configuration that it does not understand has no
    version, and no backend is looked for.
    """
    try:
        folder = environment()
    except MissingError as error:
        pytest.skip(str(error))
    models = tmp_path / "models"
    for name in ("onnx", "wrong", "engine"):
        artefact = shutil.copytree(ARTEFACT, tmp_path / name)
        config = write_model(artefact, models) / CONFIG
        if name == "wrong":
            config.write_text(config.read_text().replace("initial_state {", "initial_states {", 1))
        if name == "engine":
            graph = read_sequence_graph(artefact, load_spec(artefact))
            words = {"name": name, "backend": "tensorrt", "most_rows": 4, "profiles": 2}
            config.write_text(server_config(graph, **words))  # type: ignore[arg-type]
    (tmp_path / "scratch").mkdir()
    with serving(folder, models, scratch=tmp_path / "scratch", strict=False) as address:
        client = Client(address)
        known = {model.name: model for model in client.service.get_model_repository_index().models}
        client.service.close()
    assert known["wrong"].version == ""
    for name, backend in (("onnx", "onnxruntime"), ("engine", "tensorrt")):
        assert f"unable to find backend library for backend '{backend}'" in known[name].reason


def test_the_state_of_an_idle_sequence_is_never_seen(session: runtimes.Session, serve: Serve) -> None:
    """triton-inference-server/server#5453: the server drops it and does not tell the model."""
    tokens = text(session, PIECE, seed=1)
    with serve(idle=IDLE_SECONDS, rows=2) as client:
        for name in (1, 2):
            client.ask(name, text(session, PIECE, seed=name + 10), start=True)
        time.sleep(4 * IDLE_SECONDS)  # the server looks at its sequences now and then
        with pytest.raises(triton.InferenceServerException, match="must specify the START flag"):
            client.ask(1, tokens)
        for name in (1, 3, 4):  # itself, others, and more than there are rows
            assert np.array_equal(client.ask(name, tokens, start=True)["logits"], fresh(session, tokens))


def test_the_state_of_a_cancelled_sequence_is_never_seen(session: runtimes.Session, serve: Serve) -> None:
    """triton-inference-server/server#7117. Requests of a stream of gRPC are cancelled at any moment.

    A sequence that goes on nevertheless gets the answer of all its tokens or an error, because it says where
    it believes to be. Its id is new: if the first request of a sequence never arrives, an id that was used
    before still means the former sequence. Cancelled requests outside of streams end this release of the
    server with a segmentation fault (server#7368, #8034), with any model.
    """
    chance, right, errors = random.Random(0), 0, set[str]()
    with serve(rows=128) as client:
        for turn in range(100):
            name, own = 1000 + turn, text(session, 3 * PIECE, seed=turn)
            service = triton.InferenceServerClient(client.address)
            service.start_stream(lambda **_: None)
            for at in (0, PIECE):
                inputs, words = client.request(name, own[at : at + PIECE], start=at == 0, position=at)
                service.async_stream_infer(ARTEFACT.name, inputs, **words)
                time.sleep(chance.choice([0, 0, 0.001, 0.003]))
            service.stop_stream(cancel_requests=chance.random() < 0.7)
            service.close()
            try:
                answer = client.ask(name, own[2 * PIECE :], position=2 * PIECE, end=turn % 2 == 0)
            except triton.InferenceServerException as error:
                errors.add(str(error)[:60])
            else:
                memory = session.start(1)
                for at in (0, PIECE):
                    session.predict(own[None, at : at + PIECE], memory)
                assert np.array_equal(answer["logits"], session.predict(own[None, 2 * PIECE :], memory)[0][0])
                right += 1
            other = chance.randint(1, 4)
            answer = client.ask(other, own[:PIECE], start=True, end=chance.random() < 0.5)
            assert np.array_equal(answer["logits"], fresh(session, own[:PIECE]))
    assert right > 10
    assert errors
