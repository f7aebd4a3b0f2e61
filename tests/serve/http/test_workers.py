"""Work on threads: tenants in turn, nothing long on the event loop, and large documents in steps."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from runtimes.contract.vocabulary import SubwordVocab, subword
from tests.coroutines import in_thread
from tests.serve.http.conftest import Running, running, sources
from tests.serve.http.test_clients import comes_true
from xl_export.serve.http.base import encoding, limits, workers
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.limits import Limits
from xl_export.serve.http.base.workers import Steps, Workers, aside, finished
from xl_export.serve.http.openai import completions, score, tokens
from xl_export.serve.http.streams import work
from xl_export.serve.http.streams.documents import TokenReport

MANY = 3  # long requests: more than the threads of long work


@pytest.fixture(scope="module")
def own(artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = Limits(prompt_tokens=30_000, texts=50)
    state = tmp_path_factory.mktemp("state")
    with running(sources(("tiny", artefacts["ring"])), limits=limits, state=state) as server:
        yield server


def test_short_requests_are_answered_while_long_texts_are_encoded(
    own: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, begun, goes_on = own.server.models["tiny"].session.vocab, threading.Event(), threading.Event()
    encode = vocab.encode

    def slowly(text: str | bytes) -> np.ndarray:
        if len(text) > 20_000:
            begun.set()
            assert goes_on.wait(60)
        return encode(text)

    monkeypatch.setattr(vocab, "encode", slowly)
    with ThreadPoolExecutor(MANY) as threads:
        long = [threads.submit(own.post, "/tokenize", {"prompt": "a" * 25_000}) for _ in range(MANY)]
        assert begun.wait(60)
        assert own.get("/health").status_code == 200
        assert own.post("/tokenize", {"prompt": "a" * 5000}).json()["count"] == 5000
        assert own.post("/v1/completions", {"prompt": "a" * 5000, "max_tokens": 1}).status_code == 200
        assert not any(each.done() for each in long)
        goes_on.set()
        assert {each.result().json()["count"] for each in long} == {25_000}


def steps(turns: list[str], name: str, count: int) -> Steps[str]:
    """A job that notes each of its turns."""
    for _ in range(count):
        turns.append(name)
        yield
    return name


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is one step."""
    monkeypatch.setattr(workers, "TURN", 0)


async def begun_in_order(pool: Workers, turns: list[str], *jobs: tuple[str, str, int]) -> list[str]:
    """The results of jobs (tenant, name, steps), which begin when all are there."""
    go = threading.Event()
    first = asyncio.ensure_future(pool.run("first", go.wait, 60))
    await asyncio.sleep(0)
    running = [
        asyncio.ensure_future(pool.run(tenant, steps, turns, name, count)) for tenant, name, count in jobs
    ]
    await asyncio.sleep(0)
    go.set()
    assert await first
    return await asyncio.gather(*running)


def test_tenants_take_turns_whatever_each_has_sent(every_step: None) -> None:
    turns: list[str] = []
    jobs = [("anna", "a1", 4), ("anna", "a2", 4), ("anna", "a3", 4), ("bert", "b", 4)]
    assert in_thread(begun_in_order(Workers("test"), turns, *jobs)) == ["a1", "a2", "a3", "b"]
    assert turns[:8] == ["a1", "b", "a2", "b", "a3", "b", "a1", "b"]
    assert turns[8:] == ["a2", "a3", "a1", "a2", "a3", "a1", "a2", "a3"]


def test_a_tenant_has_at_most_half_of_the_threads() -> None:
    async def run() -> None:
        pool, go, inside = Workers("test", 4), threading.Event(), []

        def job(name: str) -> str:
            inside.append(name)
            assert go.wait(60)
            return name

        anna = [asyncio.ensure_future(pool.run("anna", job, "anna")) for _ in range(6)]
        await asyncio.to_thread(comes_true, lambda: len(inside) == 2)
        bert = asyncio.ensure_future(pool.run("bert", job, "bert"))
        assert await asyncio.to_thread(comes_true, lambda: "bert" in inside)
        assert inside.count("anna") == 2
        go.set()
        assert await asyncio.gather(*anna, bert) == ["anna"] * 6 + ["bert"]

    in_thread(run())


def test_a_job_whose_client_has_left_has_no_further_turn(every_step: None) -> None:
    async def run() -> list[str]:
        pool, turns, go, closed = Workers("test"), [], threading.Event(), threading.Event()

        def endless() -> Steps[None]:
            try:
                while True:
                    go.set()
                    yield
            finally:
                closed.set()

        left = asyncio.ensure_future(pool.run("", endless))
        await asyncio.to_thread(go.wait, 60)
        left.cancel()
        await pool.run("", steps, turns, "next", 1)
        assert closed.is_set()
        return turns

    assert in_thread(run()) == ["next"]


def test_an_error_of_a_job_reaches_its_request() -> None:
    def fails() -> Steps[None]:
        yield
        raise RefusedError("no")

    for size in (0, workers.INLINE, workers.SHORT):
        with pytest.raises(RefusedError, match="no"):
            in_thread(aside(size, "", fails))


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
        (limits, "refuse_many_values"),
        (encoding, "checked_ids"),
        (completions._Prompt, "score"),
        (completions.Completion, "_repeated"),
        (TokenReport, "feed"),
        (completions, "json_steps"),
        (score, "json_steps"),
        (tokens, "json_steps"),
        (work, "json_steps"),
    ):
        noting(owner, function)
    monkeypatch.setattr(workers, "INLINE", 1 << 30)
    expected = answer()
    loop = threads["refuse_many_values"]
    assert len(loop) == 1
    assert len(threads) > 1
    monkeypatch.setattr(workers, "INLINE", 0)
    threads.clear()
    assert answer() == expected
    threads.pop("decoder", None)  # an engine and a choice have one each
    assert not [function for function, found in threads.items() if found & loop]


@pytest.mark.parametrize("text", ["a" * 5000, "é\n\nwas\n" * 1000])
def test_a_long_text_is_encoded_as_the_vocabulary_encodes_it(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subword, "PIECE", 1000)
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    model = tokenizers.models.WordLevel({"[U]": 0, "a": 1, "b": 2, "was": 3}, unk_token="[U]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    vocab = SubwordVocab("tokenizers", made.to_str().encode())
    steps = encoding.encoding(vocab, text, what="the text", param="text")
    assert next(steps) is None, "after a piece of it"
    np.testing.assert_array_equal(finished(steps), vocab.encode(text))


DOCUMENTS = [
    {},
    [],
    {"a": 1, "b": [], "c": None, 'é"': "text"},
    {"tokens": list(range(10_000)), "bits": [None, *(x / 7 for x in range(9_000))]},
    {"choices": [{"index": 0, "logprobs": {"tokens": ["é"] * 5000, "top": [None, {"a": -0.5}] * 4000}}] * 3},
    {"data": [{"id": n, "each": [{"id": n, "text": "x"}] * n} for n in range(90)]},
    [1, [2, 3], {"a": []}],
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_in_steps_is_the_whole_document(document: Any) -> None:
    assert finished(encoding.json_steps(document)) == msgspec.json.encode(document)


LIMITS = Limits(prompt_tokens=100_000, texts=10, choices=2)


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "' + ",[{" * 50_000 + '"}',
        '{"prompt": "' + '\\",[' * 50_000 + '"}',
        '{"prompt": [' + ",".join(["12"] * 100_000) + "]}",
        '"' + "\\" * 200_001,
        '{"prompt": "' + 'a\\"' * 400_000 + '", "a": "' + ",[{" * 50_000 + '"}',
    ],
    ids=["in a text", "behind quotes", "ids", "half an escape", "escaped quotes"],
)
def test_a_body_within_the_limit_of_values_is_decoded(content: str) -> None:
    finished(limits.refuse_many_values(content.encode(), LIMITS))
    finished(limits.refuse_many_values(content, LIMITS))


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": [' + ",".join(["1"] * 110_000) + "]}",
        '{"prompt": [' + ",".join(["[]"] * 50_000) + "]}",
        '{"texts": [' + ",".join(['{"text":"\\\\"}'] * 10_000) + "]}",
    ],
    ids=["ids", "lists", "objects"],
)
def test_a_body_of_too_many_values_is_refused(content: str) -> None:
    with pytest.raises(RefusedError, match="which no request needs here"):
        finished(limits.refuse_many_values(content.encode(), LIMITS))
