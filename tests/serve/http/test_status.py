"""What operators see and do: models, health, metrics, keys, logs, and the end of the server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from runtimes.base.errors import ConfigError
from tests.serve.http.conftest import Running, running, sources
from tests.serve.http.test_clients import LONG, comes_true, connection, head, is_cut, wait_for
from xl_export.serve.http import serving
from xl_export.serve.http.app import ENDPOINTS
from xl_export.serve.http.base.keys import hashed, keys_of, owner_of

ANNA, BERT = "anna-0123456789abcdef", "bert-0123456789abcdef"
KEYS = [f"anna {ANNA}", "# a line for people", f"bert {BERT}"]


@pytest.fixture(scope="module")
def keyed(artefacts: dict[str, Path]) -> Iterator[Running]:
    """A server with keys and two models."""
    named = [("first", artefacts["ring"]), ("second", artefacts["ring"])]
    with running(sources(*named, rows=2), keys=keys_of(KEYS, "keys")) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_model_says_what_it_is(served: Running, session) -> None:
    (model,) = served.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "xl-export")
    facts = model["xl_export"]
    assert facts["identity"] == session.identity
    assert (facts["mem_len"], facts["segment"], facts["mask"]) == (16, 8, "same-length")
    assert facts["vocabulary"]["size"] == session.vocab.size
    assert facts["precision"] == "fp32"
    assert facts["rows_independent"] is True
    assert served.get("/v1/models/tiny").json() == model
    assert served.get("/v1/models/other").status_code == 404


def test_metrics_have_the_usual_names_and_grow(served: Running) -> None:
    def metrics() -> dict[str, float]:
        lines = served.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    before = metrics()
    served.post("/v1/completions", {"prompt": "abc", "max_tokens": 40, "n": 2})
    after = metrics()
    label = '{model_name="tiny"}'
    grown = {
        "xl_export_prompt_tokens_total": 3,
        "xl_export_generation_tokens_total": 80,
        "xl_export_time_to_first_token_seconds_count": 1,
        "xl_export_inter_token_latency_seconds_count": 78,
        "xl_export_e2e_request_latency_seconds_count": 1,
        "xl_export_request_queue_time_seconds_count": 3,  # the prompt and its two choices
        "xl_export_engine_tokens_drawn_total": 80,
    }
    for name, count in grown.items():
        # Tokens that arrive together with the first ones are no intervals.
        least = 1 if "inter" in name else count
        assert least <= after[name + label] - before.get(name + label, 0) <= count + 2, name
    for name in ("num_requests_running", "num_requests_waiting", "rows", "prefix_cache_bytes"):
        assert f"xl_export_{name}{label}" in after
    route = 'xl_export_http_requests_total{path="/v1/completions",status="200"}'
    assert after[route] - before.get(route, 0) == 1
    served.get("/v1/models/tiny")
    assert 'path="/v1/models/{name}"' in served.get("/metrics").text


def test_each_request_has_an_id_and_is_logged(served: Running) -> None:
    body = {"prompt": "abc", "max_tokens": 4}
    given = served.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert given.json()["id"] == "cmpl-mine-1"
    broken = served.get("/v1/models", headers={"X-Request-Id": "two words"})
    assert broken.headers["x-request-id"] != "two words"
    assert comes_true(lambda: '"id":"mine-1"' in served.log.getvalue())
    lines = [json.loads(line) for line in served.log.getvalue().splitlines()]
    (line,) = [line for line in lines if line.get("id") == "mine-1"]
    expected = {
        "status": 200,
        "model": "tiny",
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "reason": "length",
    }
    assert line | expected == line


def test_a_fault_of_a_route_is_answered_as_described(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the route burns")

    with running(sources(("m", artefacts["ring"]))) as server:
        monkeypatch.setattr(server.server, "model", fail)
        for answer in (
            server.get("/v1/models/m", headers={"X-Request-Id": "mine-7"}),
            server.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "mine-7"}),
        ):
            assert answer.status_code == 500
            assert answer.headers["x-request-id"] == "mine-7"
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("fault", "server_error")
            assert "mine-7" in error["message"]
    lines = [json.loads(line) for line in server.log.getvalue().splitlines()]
    faults = [line for line in lines if "traceback" in line]
    assert [line["event"] for line in faults] == ["fault"] * 2, "each is logged once"
    assert "the route burns" in faults[0]["traceback"]


def test_every_endpoint_that_is_not_open_needs_a_key(keyed: Running) -> None:
    for endpoint in ENDPOINTS:
        url = keyed.at + endpoint.path.replace("{name}", "icon.svg")
        for headers in ({}, bearer("wrong-0123456789abcdef"), {"Authorization": f"Basic {ANNA}"}):
            answer = keyed.client.request(endpoint.method, url, headers=headers)
            assert answer.status_code == (200 if endpoint.is_open else 401), endpoint
            assert answer.headers.get("www-authenticate") == (None if endpoint.is_open else "Bearer")


def test_the_guides_name_every_path() -> None:
    guides = Path(__file__).parents[3] / "docs" / "guides"
    text = "".join((guides / f"{name}.md").read_text("utf-8") for name in ("serve-api", "streams"))
    paths = [each.path.replace("{name}", "NAME").replace("{id}", "ID") for each in ENDPOINTS if each.summary]
    shown = [path if path in text else path.replace("/v1/streams/ID", "…") for path in paths]
    assert [path for path in shown if f"{path}`" not in text] == []


def test_keys_are_not_logged(keyed: Running) -> None:
    assert len(keyed.get("/v1/models", headers=bearer(ANNA)).json()["data"]) == 2
    assert comes_true(lambda: '"key":"anna"' in keyed.log.getvalue())
    assert ANNA not in keyed.log.getvalue()


def test_a_stopping_engine_answers_503(artefacts: dict[str, Path]) -> None:
    with running(sources(("m", artefacts["ring"]))) as server:
        stream = server.post("/v1/streams", {"tokens": [1]}).json()["stream"]["id"]
        server.server.models["m"].engine.stop(within=0)
        answers = [
            server.post("/v1/completions", {"prompt": "a"}),
            server.post("/v1/score", {"texts": ["a"]}),
            server.post(f"/v1/streams/{stream}/append", {"tokens": [1]}),
        ]
        assert [answer.status_code for answer in answers] == [503] * 3
        assert {answer.json()["error"]["code"] for answer in answers} == {"stopping"}
        assert answers[0].headers["retry-after"] == "5"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("anna", "line 2 of keys is no key"),
        ("an/na 0123456789abcdef", "is no key"),
        ("anna 0123456789abcdef root", "is no key"),
        ("anna short", "can be guessed"),
        (f"bert {ANNA}", "a key that an earlier line has"),
        ("anna sha256:12", "64 hexadecimal digits"),
    ],
)
def test_a_line_that_is_no_key_is_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        keys_of([KEYS[0], line], "keys")


def test_a_key_may_be_kept_as_its_hash() -> None:
    digest = hashlib.sha256(ANNA.encode()).hexdigest()
    assert keys_of([f"anna sha256:{digest}"], "keys") == {hashed(ANNA.encode()): "anna"}


def test_a_key_may_have_any_letters() -> None:
    key = "schlüssel-0123456789"
    header = f"Bearer {key}".encode().decode("latin-1")  # as ASGI servers show bytes
    assert owner_of({"authorization": header}, keys_of([f"anna {key}"], "keys")) == "anna"


def test_the_end_of_the_server_ends_streams_and_refuses_others(artefacts: dict[str, Path]) -> None:
    with running(sources(("m", artefacts["ring"]), rows=1)) as server:
        stream, waiting = connection(server), connection(server)
        stream.sendall(head(json.dumps({**LONG, "max_tokens": 100_000}).encode()))
        begun = wait_for(stream, b"data: ")
        waiting.sendall(head(json.dumps({**LONG, "max_tokens": 100_000, "stream": False}).encode()))
        engine = server.server.models["m"].engine
        assert comes_true(lambda: engine.waiting + engine.prompts > 0 or engine.scheduler.rows.decoding > 1)
        server.end()
        rest = begun + wait_for(stream, b"[DONE]")
        assert b'"code":"stopping"' in rest
        assert wait_for(waiting, b"}}").startswith(b"HTTP/1.1 503")
        with contextlib.suppress(httpx.TransportError):  # it may have stopped listening
            assert server.get("/ready").status_code == 503
        stream.close()
        waiting.close()


def test_the_end_cuts_slow_bodies_and_the_log_stays_json(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "CONNECTION_GRACE_SECONDS", 0.2)
    with running(sources(("m", artefacts["ring"]))) as server, contextlib.ExitStack() as connections:
        slow = [connections.enter_context(connection(server)) for _ in range(3)]
        for client in slow:
            client.sendall(head(b"{", length=100))
        assert comes_true(lambda: server.server.requests.total == 3)
        server.end()
        assert all(is_cut(client) for client in slow)
    lines = [json.loads(line) for line in server.log.getvalue().splitlines()]
    assert [line["status"] for line in lines if line["event"] == "request"] == [499] * 3
    assert not any("traceback" in line or "without" in line.get("message", "") for line in lines)
    assert capfd.readouterr().err == ""


def test_stopping_does_not_wait_for_stalled_clients(artefacts: dict[str, Path]) -> None:
    with running(sources(("m", artefacts["ring"]), rows=1, unread=1 << 20), send_buffer=8192) as server:
        still = connection(server)
        still.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        still.sendall(head(json.dumps({**LONG, "max_tokens": 100_000}).encode()))
        assert comes_true(lambda: server.server.models["m"].engine.scheduler.rows.decoding == 1)
    still.close()
