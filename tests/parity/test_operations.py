"""One recording of operations, answered by every implementation and compared with the naive reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import runtimes
from tests.parity.operations import (
    HttpServer,
    Implementation,
    Program,
    Reference,
    ReplicaClient,
)
from tests.serve.http.conftest import running, sources
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.http.base.limits import Limits
from xl_export.serve.replica import Replica
from xl_export.serve.shared import SharedStreams

MODELS = (
    *("ring", "shift", "hidden", "words, adaptive softmax", "bytes, groups of heads", "subwords, zeros"),
    *("empty weights", "empty weights, hidden", "memory of bytes"),
)
SERVED = ("ring", "bytes, groups of heads")
BATCHES = {"check", "score", "generate", "fork", "save", "load", "step", "predict", "restart"}


@pytest.fixture(scope="module")
def reference(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Reference]:
    """`reference(name)` → the answers for a model."""

    @functools.cache
    def of(name: str) -> Reference:
        return Reference.of(model(name), tmp_path_factory.mktemp("python"), rounds=name == "memory of bytes")

    return of


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("language", ["cpp", "javascript"])
def test_libraries_answer_as_the_naive_reference(
    name: str,
    language: str,
    model: Callable[[str], Path],
    reference: Callable[[str], Reference],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    program: Program = request.getfixturevalue(language)
    opened = program.ask("open", model=str(model(name)))
    assert opened.get("memory", "in place") == "in place"
    assert reference(name).check(program, tmp_path) >= BATCHES


@pytest.mark.slow
@pytest.mark.parametrize("language", ["cpp", "javascript"])
def test_a_padded_vocabulary_passes_its_check(
    language: str, padded_artefact: Path, request: pytest.FixtureRequest
) -> None:
    program: Program = request.getfixturevalue(language)
    program.ask("open", model=str(padded_artefact))
    assert program.ask("check")["passed"]


@pytest.fixture(params=["server", "replica"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Path], Implementation]]:
    with ExitStack() as stack:

        def serve(folder: Path) -> Implementation:
            if request.param == "server":
                server = stack.enter_context(
                    running(sources(("m", folder)), limits=Limits(max_tokens=99), state=tmp_path / "state")
                )
                client = HttpServer(server.at)
                stack.callback(client.close)
                return client
            SharedStreams.prepare(str(tmp_path / "shared"))
            session = runtimes.open_session(folder, threads=1, device="cpu")
            streams = SharedStreams(str(tmp_path / "shared"), session)
            replica = Replica(session, streams, settings=EngineSettings(rows=4), ram_bytes=1 << 20)
            stack.callback(replica.stop)
            asking = ReplicaClient(replica)
            stack.callback(asking.close)
            return asking

        yield serve


@pytest.mark.parametrize("name", SERVED)
def test_servers_answer_as_the_naive_reference(
    name: str,
    served: Callable[[Path], Implementation],
    model: Callable[[str], Path],
    reference: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    (scratch := tmp_path / "own").mkdir()
    assert reference(name).check(served(model(name)), scratch) >= {"score", "generate"}
