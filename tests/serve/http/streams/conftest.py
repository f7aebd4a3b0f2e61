"""Servers that keep streams, and a client of one stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtimes import Session
from tests.serve.http.conftest import HTTP, Running, running, sources
from xl_export.serve.core.settings import Limits, StoreSettings

LIMITS = Limits(body_bytes=1 << 16, prompt_tokens=4000, max_tokens=1_000_000, choices=16, texts=50)
Keeping = Callable[..., Any]


@pytest.fixture(scope="session")
def keeping(artefacts: dict[str, Path]) -> Keeping:
    """`keeping(folder, …)` → a server of the small model that keeps its streams there, as a context;
    with None they live as long as the server.
    """

    @contextmanager
    def keep(
        folder: Path | None,
        *,
        rows: int = 4,
        state_bytes: int = 4 << 30,
        limits: Limits = LIMITS,
        store: StoreSettings | None = None,
        **options: Any,
    ) -> Iterator[Running]:
        opened = sources(("tiny", artefacts["ring"]), rows=rows, state_bytes=state_bytes)
        with running(opened, limits=limits, state=folder, stream_limits=store, **options) as server:
            yield server

    return keep


@pytest.fixture(scope="session")
def kept(keeping: Keeping, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests that do not restart it."""
    with keeping(tmp_path_factory.mktemp("state")) as server:
        yield server


class Stream:
    """A client of one stream; every answer must be a success."""

    def __init__(self, server: Running, name: str) -> None:
        self.server, self.name = server, name

    @property
    def path(self) -> str:
        return f"/v1/streams/{self.name}"

    def post(self, what: str, body: object = None) -> Any:
        answer = self.server.post(f"{self.path}/{what}", body if body is not None else {})
        assert answer.status_code == (201 if what == "fork" else 200), answer.text
        return answer.json()

    def append(self, tokens: np.ndarray, **fields: Any) -> Any:
        return self.post("append", {"tokens": tokens.tolist(), **fields})

    def continue_(self, count: int, **fields: Any) -> Any:
        return self.post("continue", {"max_tokens": count, **fields})

    def fork(self) -> Stream:
        return Stream(self.server, self.post("fork")["id"])

    def snapshot(self) -> bytes:
        answer = self.server.get(f"{self.path}/snapshot")
        assert answer.is_success, answer.text
        return answer.content

    def on(self, server: Running) -> Stream:
        """The same stream on another server, or the same one after a restart."""
        return Stream(server, self.name)


def created(server: Running, tokens: np.ndarray | None = None, **fields: Any) -> Stream:
    """A new stream, which has been fed the tokens."""
    answer = server.post("/v1/streams", {} if tokens is None else {"tokens": tokens.tolist(), **fields})
    assert answer.status_code == 201, answer.text
    return Stream(server, answer.json()["stream"]["id"])


def continued(stream: Stream, **fields: Any) -> Iterator[dict[str, Any]]:
    """The events of a streamed `continue`, the last one with the result."""
    body = {**fields, "stream": True}
    with HTTP.stream("POST", f"{stream.server.at}{stream.path}/continue", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def owned(server: Running, key: str) -> Stream:
    """A new stream of the owner of the key."""
    answer = server.post("/v1/streams", {}, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 201, answer.text
    return Stream(server, answer.json()["stream"]["id"])


def restored(server: Running, content: bytes, **query: str) -> httpx.Response:
    """The answer to an upload of a snapshot."""
    return HTTP.post(f"{server.at}/v1/streams/restore", content=content, params=query, timeout=60)


def straight(session: Session, tokens: np.ndarray) -> np.ndarray:
    """Bits of each token but the first, computed by the session alone."""
    memory, found = session.start(1), []
    for at in range(0, len(tokens) - 1, session.rule.segment):
        piece = tokens[at : at + session.rule.segment]
        targets = tokens[at + 1 : at + 1 + session.rule.segment]
        log_probs, memory = session.score(piece[: len(targets)][None], targets[None], memory)
        found.append(log_probs[0])
    bits: np.ndarray = -np.concatenate(found) / np.log(2)
    return bits
