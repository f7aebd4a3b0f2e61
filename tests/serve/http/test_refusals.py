"""Whatever a client sends, it gets one sentence, and never a traceback or status 500."""

from __future__ import annotations

import gzip
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.serve.http.conftest import HTTP
from xl_export.serve.core.admission import StoppedError
from xl_export.serve.core.task import Ended
from xl_export.serve.http.base.errors import RefusedError, refusal_of, refuse_failure

COMPLETIONS = "/v1/completions"


def refused(answer: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    """The error of an answer, which is one sentence with these words."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message = error["message"]
    assert message.endswith("."), message
    assert "\n" not in message
    assert "Traceback" not in message
    for word in words:
        assert word in message, message
    return error


FIELDS: dict[str, list[Any]] = {
    "n": [17, 1.5],
    "best_of": [0],
    "max_tokens": [65],
    "temperature": [-0.1],
    "logprobs": [21, True],
    "seed": [1 << 64],
    "stop": ["", ["a"] * 17, "x" * 1001],
    "logit_bias": [{"103": 1}, {"1": 101}],
    "suffix": ["after"],
    "min_tokens": [3],
    "stream_options": [{"include_usage": True}],
    "prompt": ["", [], ["a", 1], [103], "\u4e00", ["a"] * 17, "a" * 2001, None],
    "messages": [[]],
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_cannot_be_served_is_refused_by_name(served, field: str) -> None:
    for value in FIELDS[field]:
        error = refused(served.post(COMPLETIONS, {"prompt": "a", field: value}), 400)
        assert error["param"] == field


def test_a_field_with_a_wrong_name_is_refused_with_the_right_one(served) -> None:
    refused(served.post(COMPLETIONS, {"prompt": "a", "max_completion_tokens": 3}), 400, "'max_tokens'")


@pytest.mark.parametrize("neutral", [{"presence_penalty": 0}, {"suffix": None}, {"user": "x"}, {"top_k": -1}])
def test_a_field_that_asks_for_nothing_is_taken(served, neutral: dict) -> None:
    assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **neutral}).status_code == 200


LEAST = {"ignore_eos": True, "min_tokens": 3}
# Method, path, body, and the status and words that answer it.
REQUESTS: list[tuple[str, str, Any, int, str]] = [
    ("POST", COMPLETIONS, {**LEAST, "max_tokens": 1}, 400, "max_tokens"),
    ("POST", COMPLETIONS, {**LEAST, "stop": "x"}, 400, "stop"),
    ("POST", COMPLETIONS, {"best_of": 2, "n": 1, "stream": True}, 400, "best_of"),
    ("POST", COMPLETIONS, {"n" * 60_000: 1}, 400, "nnnn"),
    ("POST", COMPLETIONS, {"prompt": "a", "bos": True}, 400, "bos"),
    ("POST", COMPLETIONS, {"model": "gpt"}, 404, "'gpt'"),
    ("POST", f"{COMPLETIONS}?stream=true", {}, 400, "body"),
    ("POST", COMPLETIONS, b"{}", 400, "'prompt'"),
    ("POST", COMPLETIONS, {"prompt": "a" * (1 << 16)}, 413, "65,536"),
    ("POST", "/v1/score", {"texts": [{"txt": "a"}]}, 400, "'txt'"),
    ("POST", "/v1/score", {"texts": ["a"] * 51}, 400, "51"),
    ("POST", "/v1/score", {"texts": ["a"], "bos": True}, 400, "bos"),
    ("POST", "/v1/score", {"texts": ["\u4e00"]}, 400, "text 0"),
    ("POST", "/v1/score", {"texts": [[100_000]]}, 400, "100000"),
    ("POST", "/v1/score", {"texts": ["a" * 2001]}, 400, "2,001"),
    ("POST", "/tokenize", {"text": "a"}, 400, "prompt"),
    ("POST", "/tokenize", {"prompt": "\u4e00"}, 400, "\u4e00"),
    ("POST", "/detokenize", {"tokens": [-1]}, 400, "-1"),
    ("GET", "/tokenizer_info?stream=true", None, 400, "'stream'"),
    ("POST", "/v1/chat/completions", {}, 404, "/v1/completions"),
    ("GET", COMPLETIONS, None, 405, "POST"),
    ("PATCH", "/v1/models", None, 405, "GET or HEAD"),
    ("PATCH", "/v1/streams/restore", None, 405, "POST"),
    ("GET", "/v1/streams//append", None, 404, "/openapi.json"),
    ("GET", "/v1/streams/%2e%2e%2fstreams.sqlite", None, 404, "/openapi.json"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"), REQUESTS, ids=lambda each: str(each)[:30]
)
def test_a_wrong_request_is_refused_in_one_sentence(
    served, method: str, path: str, body: Any, status: int, words: str
) -> None:
    if isinstance(body, dict) and path.startswith(COMPLETIONS):
        body = {"prompt": "a", **body}
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = HTTP.request(method, served.at + path, **content)
    error = refused(answer, status, words)
    assert len(error["message"]) < 400
    assert len(error["param"] or "") <= 60
    assert ("allow" in answer.headers) == (status == 405)
    assert (error["code"] == "model_not_found") == ("gpt" in str(body))


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b'{"prompt":"\xff"}',
    b'{"prompt":"\\ud800"}',
    b"[" * 5000,
    b'{"prompt":1e999}',
]


@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_body_is_refused(served, body: bytes) -> None:
    refused(served.post(COMPLETIONS, body), 400)


LONG = {"prompt": "a" * 101, "max_tokens": 0, "echo": True}
MANY = {"prompt": "a", "max_tokens": 51, "n": 2}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**LONG, "logprobs": 4}, "logprobs"),
        ({**LONG, "logprobs": 0}, "logprobs"),
        ({**LONG, "logprobs": 0, "stream": True}, "logprobs"),
        ({**MANY, "logprobs": 0}, "max_tokens"),
        (MANY, "max_tokens"),
        ({**MANY, "n": 1, "best_of": 2}, "max_tokens"),
        ({**MANY, "n": 1, "prompt": ["a", "b"]}, "max_tokens"),
        (LONG, None),
        ({**MANY, "max_tokens": 50}, None),
        ({**MANY, "stream": True}, None),
    ],
)
def test_an_answer_holds_at_most_so_many_numbers(
    served, body: dict, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server, "limits", replace(served.server.limits, log_probs=100))
    answer = served.post(COMPLETIONS, body)
    if param is None:
        assert answer.status_code == 200
    else:
        assert refused(answer, 400, "100")["param"] == param


def test_a_too_large_body_is_refused_unread(served) -> None:
    def parts():
        for _ in range(20):
            yield b'"' + b"a" * 8000

    answer = HTTP.post(served.at + COMPLETIONS, content=parts())
    refused(answer, 413)
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, deflate"])
@pytest.mark.parametrize(
    "path", [COMPLETIONS, *(f"/v1/{x}" for x in ("score", "streams", "streams/restore"))]
)
def test_a_compressed_body_is_refused_by_the_name_of_its_header(served, path: str, encoding: str) -> None:
    content = gzip.compress(b'{"prompt": "a"}')
    answer = served.post(path, content, headers={"Content-Encoding": encoding})
    refused(answer, 415, f"Content-Encoding: {encoding}")
    assert answer.headers["accept-encoding"] == "identity"


def test_a_body_that_says_that_it_is_not_compressed_is_read(served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert served.post(COMPLETIONS, body, headers={"Content-Encoding": "Identity"}).is_success


def test_requests_of_other_sites_are_refused(served) -> None:
    refused(served.get("/v1/models", headers={"Host": "evil.example:80"}), 403, "evil.example")
    refused(served.get("/v1/models", headers={"Origin": "http://evil.example"}), 403, "evil.example")
    assert served.get("/v1/models", headers={"Origin": served.at}).status_code == 200


def test_every_field_is_described(served) -> None:
    schemas = served.get("/openapi.json").json()["components"]["schemas"]
    fields = {name: schema["properties"] for name, schema in schemas.items() if "properties" in schema}
    assert {"CompletionBody", "ScoreBody", "ContinueBody", "RewindBody"} <= set(fields)
    silent = [
        (body, name) for body, own in fields.items() for name in own if not own[name].get("description")
    ]
    assert silent == [], "describe them where they are declared"


@pytest.mark.parametrize(
    ("ended", "status", "code", "words"),
    [
        (Ended(reason="failed", error="a step failed."), 500, "engine_failed", "a step failed."),
        (Ended(reason="cancelled", error="it was not read."), 503, "not_read", "it was not read."),
        (Ended(reason="cancelled"), 503, "stopping", "ask again in a moment"),
        (Ended(reason="stopped"), 503, "stopping", "ask again in a moment"),
    ],
)
def test_a_client_is_told_why_the_server_ended_its_task(
    ended: Ended, status: int, code: str, words: str
) -> None:
    with pytest.raises((RefusedError, StoppedError), match=words) as raised:
        refuse_failure(ended)
    refusal = refusal_of(raised.value)
    assert (refusal.status, refusal.code) == (status, code)
