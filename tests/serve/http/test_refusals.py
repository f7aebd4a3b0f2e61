"""Whatever a client sends, it gets one sentence, and never a traceback or status 500."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.serve.http.conftest import HTTP
from xl_export.serve.core.task import Ended, Reason
from xl_export.serve.http import app
from xl_export.serve.http.base.errors import RefusedError, refuse_failure

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


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("n", 0, "expected 1 to 16"),
        ("n", 17, "expected 1 to 16"),
        ("n", 1.5, "n is a number with a point or an exponent; expected an integer or null"),
        ("best_of", 0, "best_of is 0"),
        ("max_tokens", -1, "expected 0 to 64"),
        ("max_tokens", 65, "expected 0 to 64"),
        ("temperature", -0.1, "temperature is -0.1"),
        ("temperature", 1e300, "temperature is 1e+300; expected 0 to 1,000,000."),
        ("logprobs", 21, "expected 0 to 20"),
        ("logprobs", True, "logprobs is a boolean; expected an integer or null"),
        ("seed", -1 << 64, "expected -2^63 to 2^64 - 1"),
        ("seed", 1 << 64, "seed is"),
        ("stop", "", "empty"),
        ("stop", ["a"] * 17, "at most 16"),
        ("logit_bias", {"103": 1}, "token 103"),
        ("logit_bias", {"1": 101}, "bias 101"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("suffix", "after", "cannot fill a gap"),
        ("presence_penalty", 2.5, "presence_penalty is 2.5; expected -2 to 2."),
        ("frequency_penalty", -3, "expected -2 to 2."),
        ("repetition_penalty", 0, "repetition_penalty is 0.0; expected 0.01 to 100."),
        ("min_p", 1.1, "min_p is 1.1; expected 0 to 1."),
        ("top_p", -0.1, "top_p is -0.1; expected above 0 and at most 1."),
        ("top_p", 1.5, "top_p is 1.5; expected above 0 and at most 1."),
        ("top_k", -2, "top_k is -2; expected at least 1."),
        ("min_tokens", 3, "set ignore_eos to true"),
        ("stop", "x" * 1001, "has 1,001 characters; expected at most 1,000"),
        ("max_tokens", 2.5, "a number with a point or an exponent; expected an integer"),
        ("stream_options", {"include_usage": True}, "without stream"),
        ("prompt", "", "prompt 0"),
        ("prompt", [], "prompt is empty"),
        ("prompt", ["a", 1], "mixes"),
        ("prompt", [[]], "no token ids"),
        ("prompt", [103], "103"),
        ("prompt", [1 << 70], "prompt"),
        ("prompt", "\u4e00", "\u4e00"),
        ("prompt", ["a"] * 17, "choices"),
        ("prompt", "a" * 2001, "2,001 tokens"),
        ("prompt", None, "prompt is null; expected a text or a list"),
        ("model", 3, "model"),
        ("tools", [], "'tools' is not known"),
        ("messages", [], "'messages' is not known here; leave it out"),
        ("max_completion_tokens", 3, "did you mean 'max_tokens'?"),
        ("max_token", 3, "'max_token' is not known here; did you mean 'max_tokens'? If not, leave it out"),
    ],
)
def test_a_field_that_cannot_be_served_is_refused_by_name(served, field: str, value: Any, words: str) -> None:
    error = refused(served.post(COMPLETIONS, {"prompt": "a", field: value}), 400, words)
    assert error["param"] == field


@pytest.mark.parametrize("neutral", [{"presence_penalty": 0}, {"suffix": None}, {"user": "x"}, {"top_k": -1}])
def test_a_field_that_asks_for_nothing_is_taken(served, neutral: dict) -> None:
    assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **neutral}).status_code == 200


LEAST = {"ignore_eos": True, "min_tokens": 3}
# Method, path, body, and the status and words that answer it.
REQUESTS: list[tuple[str, str, Any, int, str]] = [
    (
        "POST",
        COMPLETIONS,
        {"ignore_eos": True, "min_tokens": 3, "max_tokens": 1},
        400,
        "max_tokens of at least 3",
    ),
    (
        "POST",
        COMPLETIONS,
        {"ignore_eos": True, "min_tokens": 3, "stop": "x"},
        400,
        "leave one of min_tokens and",
    ),
    ("POST", COMPLETIONS, {"best_of": 2, "n": 1, "stream": True}, 400, "best_of is 2"),
    ("POST", COMPLETIONS, {"n" * 60_000: 1}, 400, "is not known here"),
    ("POST", COMPLETIONS, {"model": "gpt"}, 404, "'gpt'"),
    ("POST", f"{COMPLETIONS}?stream=true", {}, 400, "expected none, since fields go into the body"),
    ("POST", COMPLETIONS, b'{"prompt":"\\ud800"}', 400, "half of a character"),
    ("POST", COMPLETIONS, b'{"prompt":"a"', 400, "because it ends too early; send a whole"),
    ("POST", COMPLETIONS, b'{"prompt":"\xff"}', 400, "is not UTF-8"),
    ("POST", COMPLETIONS, b"{}", 400, "'prompt' is missing"),
    ("POST", COMPLETIONS, b"", 400, "has no body"),
    ("POST", COMPLETIONS, {"prompt": "a" * (1 << 16)}, 413, "65,536 bytes"),
    ("GET", COMPLETIONS, None, 405, "GET"),
    ("POST", "/v1/score?stream=true", {"texts": ["ab"]}, 400, "expected none, since fields go into the body"),
    ("POST", "/v1/score", {"texts": [{"txt": "a"}]}, 400, "the field 'txt' of texts["),
    ("POST", "/v1/score", {"texts": []}, 400, "0 texts"),
    ("POST", "/v1/score", {"texts": ["a"] * 51}, 400, "51 texts"),
    ("POST", "/v1/score", {"texts": ["a"], "bos": True}, 400, "bos needs a token"),
    ("POST", "/v1/score", {"texts": ["a"], "eos": True}, 400, "eos needs a token"),
    ("POST", "/v1/score", {"texts": ["\u4e00"]}, 400, "text 0"),
    ("POST", "/v1/score", {"texts": [[100_000]]}, 400, "100000"),
    ("POST", "/v1/score", {"texts": ["a" * 2001]}, 400, "2,001 tokens"),
    ("POST", "/tokenize", {"text": "a"}, 400, "expected prompt"),
    ("POST", "/tokenize", {"prompt": "a", "model": "gpt"}, 404, "tiny"),
    ("POST", "/tokenize", {"prompt": "\u4e00"}, 400, "\u4e00"),
    ("POST", "/detokenize", {"tokens": [-1]}, 400, "-1"),
    ("GET", "/tokenizer_info?stream=true", None, 400, "'stream' is not known here; expected model"),
    ("GET", "/v3", None, 404, "/openapi.json"),
    *(("POST", path, {}, 404, path) for path in app.REFUSED),
    ("PATCH", "/v1/streams/a", None, 405, "does not answer PATCH; send DELETE or GET or HEAD."),
    ("PATCH", "/v1/streams/restore", None, 405, "does not answer PATCH; send POST."),
    ("PATCH", "/v1/models", None, 405, "does not answer PATCH; send GET or HEAD."),
    ("GET", "/v1/completion", None, 404, "/v1/completions was probably meant."),
    ("GET", "/v1/streams/stream-1/rewnd", None, 404, "/v1/streams/stream-1/rewind was probably meant."),
    ("GET", "/v1/streams/stream-1/ws", None, 404, "connect to it with a WebSocket."),
    ("GET", "/v1/completions/", None, 404, "/v1/completions was probably meant."),
    ("GET", "/v1/streams//append", None, 404, "as if the id of a stream were missing."),
    ("GET", "/v1/streams/%2e%2e%2fsnapshot.key", None, 404, "see /openapi.json for what there is."),
    ("GET", "/nothing", None, 404, "see /openapi.json for what there is."),
    ("GET", f"/v1/streams/{'x' * 200}/rewnd", None, 404, "see /openapi.json for what there is."),
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
    if status == 405:
        assert set(answer.headers["allow"].split(", ")) <= {"DELETE", "GET", "HEAD", "POST"}
    assert (error["code"] == "model_not_found") == ("gpt" in str(body))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"\xff\xfe{}", b'{"prompt":"\\ud800"}', b"[" * 5000, b'{"prompt":1e999}'],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/score", "/tokenize", "/detokenize"])
def test_a_malformed_body_is_refused(served, path: str, body: bytes) -> None:
    refused(served.post(path, body), 400)


def test_more_log_probabilities_than_an_answer_holds_are_refused(
    served, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(served.server.limits, log_probs=1000)
    monkeypatch.setattr(served.server, "limits", limits)
    body = {"prompt": "a" * 200, "max_tokens": 1, "logprobs": 4, "echo": True}
    error = refused(served.post(COMPLETIONS, body), 400, "logprobs is 4 for 201 tokens", "1,000")
    assert error["param"] == "logprobs"
    assert served.post(COMPLETIONS, {**body, "echo": False}).status_code == 200


@pytest.mark.parametrize("log_probs", [None, 0])
def test_more_tokens_than_an_answer_holds_are_streamed_or_refused(
    served, log_probs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server, "limits", replace(served.server.limits, log_probs=100))
    body = {"prompt": "a", "max_tokens": 51, "n": 2, "logprobs": log_probs}
    for fields in (body, {**body, "n": 1, "best_of": 2}, {**body, "n": 1, "prompt": ["a", "b"]}):
        error = refused(served.post(COMPLETIONS, fields), 400, "could have 102", "holds 100")
        assert error["param"] == "max_tokens"
    for fields in ({"max_tokens": 50}, {"stream": True}):
        assert served.post(COMPLETIONS, {**body, **fields}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_log_probs_of_echoed_prompts_are_bounded_in_streams_too(
    served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server, "limits", replace(served.server.limits, log_probs=100))
    body = {"prompt": "a" * 101, "max_tokens": 0, "echo": True, "stream": stream}
    assert served.post(COMPLETIONS, body).status_code == 200
    error = refused(served.post(COMPLETIONS, {**body, "logprobs": 0}), 400, "101 log-probabilities")
    assert error["param"] == "logprobs"


def test_a_too_large_body_is_refused_unread(served) -> None:
    def parts():
        for _ in range(20):
            yield b'"' + b"a" * 8000

    answer = HTTP.post(served.at + COMPLETIONS, content=parts())
    refused(answer, 413)
    assert answer.headers["connection"] == "close"


def test_requests_of_other_sites_are_refused(served) -> None:
    refused(served.get("/v1/models", headers={"Host": "evil.example:80"}), 403, "evil.example")
    refused(served.get("/v1/models", headers={"Origin": "http://evil.example"}), 403, "evil.example")
    assert served.get("/v1/models", headers={"Origin": served.at}).status_code == 200


def test_the_description_names_every_route(served) -> None:
    paths = served.server_description["paths"]
    assert {"/v1/completions", "/v1/score", "/tokenize", "/v1/models/{name}", "/metrics"} <= set(paths)
    fields = served.server_description["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "logit_bias", "best_of", "stream_options"} <= set(fields)


def test_every_field_is_described(served) -> None:
    schemas = served.server_description["components"]["schemas"]
    fields = {
        name: schema["properties"]
        for name, schema in schemas.items()
        if name != "Error" and "properties" in schema
    }
    assert {"CompletionBody", "ScoreBody", "ContinueBody", "RewindBody"} <= set(fields)
    silent = [
        (body, name) for body, own in fields.items() for name in own if not own[name].get("description")
    ]
    assert silent == [], "describe them where they are declared"


@pytest.mark.parametrize(
    ("ended", "status", "code", "words"),
    [
        (Ended(reason="failed", error="a step failed."), 500, "engine_failed", "a step failed."),
        (Ended(reason="cancelled", error="no memory is left."), 503, "no_room", "no memory is left."),
        (Ended(reason="cancelled"), 503, "stopping", "is stopping"),
        (Ended(reason="stopped"), 503, "stopping", "is stopping"),
    ],
)
def test_a_client_is_told_why_the_server_ended_its_task(
    ended: Ended, status: int, code: str, words: str
) -> None:
    with pytest.raises(RefusedError, match=words) as raised:
        refuse_failure(ended)
    assert (raised.value.status, raised.value.code) == (status, code)


@pytest.mark.parametrize("reason", ["end", "stop", "length"])
def test_a_task_that_was_done_is_not_refused(reason: Reason) -> None:
    refuse_failure(Ended(reason=reason))
