"""Long work is done on threads, and never on the event loop."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.serve.http.conftest import Running, running, sources
from xl_export.serve.core.settings import Limits
from xl_export.serve.http.base import encoding, workers
from xl_export.serve.http.openai import completions, score, tokens
from xl_export.serve.http.streams import work
from xl_export.serve.http.streams.documents import Report

MANY = 9  # long requests: more than any pool has threads


@pytest.fixture(scope="module")
def own(artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = Limits(prompt_tokens=100_000, texts=50)
    state = tmp_path_factory.mktemp("state")
    with running(sources(("tiny", artefacts["ring"])), limits=limits, state=state) as server:
        yield server


def test_short_requests_are_answered_while_long_texts_are_encoded(
    own: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, begun, goes_on = own.server.models["tiny"].session.vocab, threading.Event(), threading.Event()
    encode = vocab.encode

    def slowly(text: str | bytes) -> np.ndarray:
        if len(text) >= workers.LONG_BYTES:
            begun.set()
            assert goes_on.wait(60)
        return encode(text)

    monkeypatch.setattr(vocab, "encode", slowly)
    with ThreadPoolExecutor(MANY) as threads:
        long = [
            threads.submit(own.post, "/tokenize", {"prompt": "a" * workers.LONG_BYTES}) for _ in range(MANY)
        ]
        assert begun.wait(60)
        assert own.get("/health").status_code == 200
        assert own.post("/tokenize", {"prompt": "a" * 5000}).json()["count"] == 5000
        assert own.post("/v1/completions", {"prompt": "a" * 5000, "max_tokens": 1}).status_code == 200
        assert not any(each.done() for each in long)
        goes_on.set()
        assert {each.result().json()["count"] for each in long} == {workers.LONG_BYTES}


LONG = "a" * 50
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "repeated": ("/v1/completions", {"prompt": [1] * 50, "max_tokens": 3, "temperature": 0, "echo": True}),
    "log_probs": (
        "/v1/completions",
        {"prompt": LONG, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 5, "n": 2},
    ),
    "events": (
        "/v1/completions",
        {"prompt": LONG, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 5, "stream": True},
    ),
    "score": ("/v1/score", {"texts": [LONG, LONG, {"text": LONG, "context": "b"}], "tokens": True}),
    "stream": ("/v1/streams", {"text": LONG, "alternatives": 5}),
    "continued": ("/v1/streams/{stream}/continue", {"text": LONG, "max_tokens": 3, "temperature": 0}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_large_work_never_runs_on_the_event_loop(
    own: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer is the same as with all of it there, as of a small request."""
    path, content = REQUESTS[name]
    threads: dict[str, set[threading.Thread]] = {}

    def noting(owner: Any, function: str) -> None:
        called = getattr(owner, function)

        def noted(*arguments: Any, **named: Any) -> Any:
            threads.setdefault(function, set()).add(threading.current_thread())
            return called(*arguments, **named)

        monkeypatch.setattr(owner, function, noted)

    def answer() -> str:
        stream = own.post("/v1/streams", {}).json()["stream"]["id"]
        answered = own.post(path.format(stream=stream), content)
        assert answered.is_success, answered.text
        return re.sub(r'"(id|seed|created|used|cached_tokens)":("[^"]*"|\d+)', "", answered.text)

    for owner, function in (
        (own.server.models["tiny"].session.vocab, "encode"),
        (own.server.models["tiny"].session.vocab, "decoder"),
        (msgspec.json, "decode"),
        (encoding, "checked_ids"),
        (completions.Completion, "_repeated"),
        (completions.Completion, "_document"),
        (score.Scoring, "_document"),
        (tokens, "encode"),
        (Report, "_fields"),
        (work, "to_json"),
    ):
        noting(owner, function)
    monkeypatch.setattr(workers, "INLINE_BYTES", 1 << 30)
    expected = answer()
    loop = threads["decode"]
    assert len(loop) == 1
    assert len(threads) > 1
    monkeypatch.setattr(workers, "INLINE_BYTES", 0)
    threads.clear()
    assert answer() == expected
    threads.pop("decoder", None)  # an engine and a choice have one each
    assert not [function for function, found in threads.items() if found & loop]
