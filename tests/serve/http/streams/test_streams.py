"""`/v1/streams`: what is told of tokens is what evaluation gives; a stream goes on wherever it has been."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtimes import Session
from tests.serve.http.conftest import HTTP, Running
from tests.serve.http.streams.conftest import LIMITS, Keeping, Stream, created, restored, straight
from tests.serve.http.test_clients import comes_true
from xl_export.serve.core.settings import StoreSettings


def test_likeliest_tokens_are_given_with_surprisals(kept: Running, tokens: np.ndarray) -> None:
    """tests/parity compares the surprisals."""
    whole = kept.post("/v1/streams", {"tokens": tokens[:40].tolist(), "alternatives": 2}).json()
    assert whole["likeliest"][0] is None
    assert whole["total_bits"] == pytest.approx(sum(whole["bits"][1:]))
    assert whole["counted"] == 39
    (likeliest,) = created(kept, tokens[:40]).append(tokens[40:41], alternatives=20)["likeliest"]
    assert len(likeliest) == 20
    assert [each["bits"] for each in likeliest] == sorted(each["bits"] for each in likeliest)


def test_a_continued_stream_has_its_bits_and_events(
    kept: Running, session: Session, tokens: np.ndarray
) -> None:
    prompt = tokens[:45]
    fields = {"max_tokens": 60, "seed": 3, "ignore_eos": True, "top_k": 20}
    answer = created(kept, prompt).post("continue", fields)
    whole = np.concatenate([prompt, answer["tokens"]])
    assert np.abs(np.array(answer["bits"]) - straight(session, whole)[44:]).max() <= 1e-3
    with_text = created(kept).post("continue", {**fields, "tokens": prompt.tolist()})
    assert with_text["appended"] == 45
    assert with_text["tokens"] == whole.tolist()
    (events, stream) = streamed(created(kept, prompt), fields)
    assert [token for event in events for token in event["tokens"]] == answer["tokens"]
    assert "".join(event["text"] for event in events) == answer["text"] == "".join(answer["texts"])
    assert events[-1]["finish_reason"] == "length"
    assert stream.append(tokens[:1])["stream"]["position"] == 106


def test_a_request_that_is_sent_again_feeds_nothing_twice(kept: Running, tokens: np.ndarray) -> None:
    stream = created(kept, tokens[:10])
    for what, body, position in (
        ("append", {"tokens": tokens[10:15].tolist(), "position": 10}, 15),
        ("continue", {"max_tokens": 3, "ignore_eos": True, "position": 15}, 18),
    ):
        done = stream.post(what, body)["stream"]
        assert (done["position"], done["busy"]) == (position, False)
        again = kept.post(f"{stream.path}/{what}", body)
        assert again.status_code == 409
        error = again.json()["error"]
        assert (error["code"], error["param"], error["position"]) == ("other_position", "position", position)
        assert kept.get(stream.path).json()["position"] == position


def test_a_restart_keeps_when_a_stream_was_used(keeping: Keeping, tokens: np.ndarray, tmp_path: Path) -> None:
    """Whoever deletes the streams that were not used for long would otherwise delete the wrong ones."""
    with keeping(tmp_path) as server:
        stream, other = created(server, tokens[:5]), created(server, tokens[:5])
        stream.append(tokens[5:7])
    with sqlite3.connect(tmp_path / "streams.sqlite") as rows:
        rows.execute("UPDATE stream SET used = 2e9 WHERE id = ?", (stream.name,))
    with keeping(tmp_path) as server:
        facts = {each["id"]: each for each in server.get("/v1/streams").json()["data"]}
    assert facts[stream.name]["used"] == 2_000_000_000
    assert facts[stream.name]["created"] <= facts[other.name]["used"] < 2_000_000_000


MANY = LIMITS.max_tokens  # far more than are generated until a test goes on


def streamed(stream: Stream, fields: dict[str, Any]) -> tuple[list[dict[str, Any]], Stream]:
    address = f"{stream.server.at}{stream.path}/continue"
    with HTTP.stream("POST", address, json={**fields, "stream": True}, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]], stream


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_next_tokens_do_not_depend_on_moves(
    keeping: Keeping, tokens: np.ndarray, tmp_path: Path, count: int
) -> None:
    """Bit for bit: through a fork, the disk, a restart, and a snapshot on another server."""
    fields = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
    other = tmp_path / "other"
    with keeping(tmp_path / "one") as server:
        stream = created(server, tokens[:45])
        stream.append(tokens[45:52])
        forks = [stream.fork() for _ in range(3)]
        expected = stream.continue_(count, **fields)
        forks[2].append(tokens[:1])
        forks[2].post("rewind", {"tokens": 1})
        snapshot = forks[0].snapshot()
    settings = StoreSettings(ram_bytes=0)  # every operation reads the disk
    with keeping(tmp_path / "one") as server, keeping(other, store=settings, rows=2) as moved:
        there = Stream(moved, restored(moved, snapshot).json()["id"])
        for again in (forks[0].on(server), forks[1].on(server), there):
            assert not again.server.get(again.path).json()["in_memory"]
            answer = again.continue_(count, **fields)
            assert answer["tokens"] == expected["tokens"]
            assert answer["bits"] == expected["bits"], "bit for bit"
        assert there.append(tokens[:9])["bits"] == stream.on(server).append(tokens[:9])["bits"]
        rewound = forks[2].on(server).continue_(50, **fields)
        assert np.abs(np.array(rewound["bits"]) - expected["bits"][:50]).max() <= 1e-3


def test_snapshots_that_are_damaged_or_too_large_are_refused(kept: Running, tokens: np.ndarray) -> None:
    snapshot = created(kept, tokens[:20]).snapshot()
    before = len(kept.get("/v1/streams").json()["data"])
    altered = bytearray(snapshot)
    altered[-1] ^= 1
    for content in (bytes(altered), snapshot[:-9], b"", b"{}" * 40):
        answer = restored(kept, content)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "/" not in message, "no path of the server is told"

    sent = [0]

    def endless() -> Any:
        while sent[0] < 10 << 30:
            sent[0] += 1 << 16
            yield bytes(1 << 16)

    with contextlib.suppress(httpx.TransportError):  # the server closes while more is sent
        assert HTTP.post(f"{kept.at}/v1/streams/restore", content=endless(), timeout=60).status_code == 413
    assert sent[0] < 100 << 20, "it is refused while it arrives"
    with socket.create_connection(("127.0.0.1", kept.port), timeout=60) as raw:
        raw.sendall(
            b"POST /v1/streams/restore HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10737418240\r\n\r\n"
        )
        head = raw.recv(1 << 16)
    assert head.startswith(b"HTTP/1.1 413 "), "nothing of it has to be sent"
    assert len(kept.get("/v1/streams").json()["data"]) == before


def test_a_second_operation_is_refused_and_leaving_keeps_generated_tokens(
    kept: Running, tokens: np.ndarray
) -> None:
    stream = created(kept, tokens[:10])
    body = {"max_tokens": MANY, "ignore_eos": True, "stream": True, "seed": 1}
    with HTTP.stream("POST", f"{kept.at}{stream.path}/continue", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        fork = stream.fork()  # of the stream before what runs
        assert kept.get(fork.path).json()["position"] == 10
        for what, fields in (("append", {"tokens": [1]}), ("rewind", {"tokens": 1})):
            busy = kept.post(f"{stream.path}/{what}", fields)
            assert busy.status_code == 409, busy.text
            assert busy.json()["error"]["code"] == "stream_busy"
    assert comes_true(lambda: not kept.get(stream.path).json()["busy"])
    count = kept.get(stream.path).json()["position"] - 10
    assert 0 < count < MANY, "it was cancelled, and keeps what was generated"


def test_a_server_that_stops_says_where_its_streams_are(
    keeping: Keeping, tokens: np.ndarray, tmp_path: Path
) -> None:
    body = {"max_tokens": MANY, "ignore_eos": True, "stream": True, "seed": 1}
    with keeping(tmp_path) as server:
        stream = created(server, tokens[:10])
        stream.append(tokens[10:13])
        heard: list[dict[str, Any]] = []
        with HTTP.stream("POST", f"{server.at}{stream.path}/continue", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line and line != "data: [DONE]":
                    heard.append(json.loads(line.removeprefix("data: ")))
                if len(heard) == 5:
                    server.end()
        assert heard[-1]["finish_reason"] == "stopped"
        drawn = [token for event in heard for token in event["tokens"]]
        position = heard[-1]["stream"]["position"]
        assert position - 13 == len(drawn), "every token that was told"
    with keeping(tmp_path) as server:
        assert server.get(stream.path).json()["position"] == position
        fed = np.concatenate([tokens[:13], drawn])
        ours = stream.on(server).append(tokens[50:60])["bits"]
        theirs = created(server, fed).append(tokens[50:60])["bits"]
        assert np.abs(np.array(ours) - theirs).max() <= 1e-3


def test_streams_are_listed_and_deleted(kept: Running) -> None:
    stream = created(kept)
    listed = kept.get("/v1/streams").json()["data"]
    assert stream.name in [each["id"] for each in listed]
    assert kept.get(stream.path).json()["position"] == 0
    assert HTTP.delete(kept.at + stream.path).json()["deleted"]
    for answer in (
        kept.get(stream.path),
        HTTP.delete(kept.at + stream.path),
        kept.post(f"{stream.path}/append", {"text": "a"}),
        kept.get(f"{stream.path}/snapshot"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "stream_not_found"


def test_what_cannot_be_done_is_one_sentence(kept: Running, tokens: np.ndarray) -> None:
    stream = created(kept)
    for what, body, param in (
        ("append", {}, "text"),
        ("append", {"text": ""}, "text"),
        ("append", {"tokens": [-1]}, "tokens"),
        ("append", {"tokens": [1], "text": "a"}, "tokens"),
        ("append", {"tokens": [1], "alternatives": 21}, "alternatives"),
        ("append", {"tokens": [1], "alternatives": 2, "surprisal": False}, "alternatives"),
        ("append", {"tokens": [1] * 4001}, "tokens"),
        ("continue", {}, "text"),
        ("continue", {"max_tokens": 0}, "max_tokens"),
        ("continue", {"temperature": -1}, "temperature"),
        ("rewind", {"tokens": -1}, "tokens"),
        ("rewind", {"tokens": 1}, "tokens"),
    ):
        answer = kept.post(f"{stream.path}/{what}", body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].endswith(".")
        assert (error["code"] == "too_far_back") == (body == {"tokens": 1})
    assert kept.get(stream.path).json()["position"] == 0


def test_streams_without_a_state_folder_end_with_the_server(
    keeping: Keeping, tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with keeping(None, store=StoreSettings(streams=2, ram_bytes=0)) as server:
        stream = created(server, tokens[:30])
        fork = stream.fork()
        assert stream.continue_(5, seed=1)["text"] == fork.continue_(5, seed=1)["text"]
        assert [each["position"] for each in server.get("/v1/streams").json()["data"]] == [35, 35]
        assert server.post("/v1/streams", {}).json()["error"]["code"] == "too_many_streams"
        assert server.get("/v1/server").json()["streams_survive"] is False
        assert any(tmp_path.rglob("streams.sqlite"))
    assert list(tmp_path.iterdir()) == []
    with keeping(None) as server:
        assert server.get("/v1/streams").json()["data"] == []
        assert server.get(stream.path).status_code == 404


def test_a_step_that_fails_is_an_error_of_the_server(
    kept: Running, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the arithmetic unit burns")

    stream, session = created(kept, tokens[:5]), kept.server.models["tiny"].session
    before = len(kept.log.getvalue().splitlines())  # other tests share the server
    for verb in ("predict", "score", "step"):
        monkeypatch.setattr(session, verb, fail)
    for path, body in (
        ("/v1/streams", {"tokens": [1]}),
        (f"{stream.path}/append", {"tokens": [1]}),
        (f"{stream.path}/continue", {"tokens": [1]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/score", {"texts": ["ab"]}),
    ):
        answer = kept.post(path, body)
        assert answer.status_code == 500, answer.text
        assert answer.json()["error"]["code"] == "engine_failed"
    monkeypatch.undo()
    lines = [json.loads(line) for line in kept.log.getvalue().splitlines()[before:]]
    faults = {(line["level"], line["error"]) for line in lines if line["event"] == "engine"}
    assert faults == {("error", "the arithmetic unit burns")}
    assert "Traceback" not in capfd.readouterr().err
    assert stream.append(tokens[5:6])["stream"]["position"] == 6


def test_metrics_of_streams(keeping: Keeping, tokens: np.ndarray, tmp_path: Path) -> None:
    def metrics(server: Running) -> dict[str, int]:
        lines = server.get("/metrics").text.splitlines()
        found = (line.removeprefix("xl_export_").split("{")[0].split()[0] for line in lines)
        values = dict(zip(found, (line.split()[-1] for line in lines), strict=True))
        return {name: int(float(value)) for name, value in values.items() if name.startswith("stream")}

    def check(server: Running, streams: int) -> None:
        """The sums are those of the rows, a snapshot once for each fork."""
        told = metrics(server)
        assert told["streams"] == streams
        with sqlite3.connect(tmp_path / "streams.sqlite") as rows:
            for name, sizes in (
                ("snapshot", "SELECT SUM(bytes) FROM stream JOIN snapshot ON snapshot = snapshot.id"),
                ("journal", "SELECT COALESCE(SUM(LENGTH(fed)), 0) FROM journal"),
            ):
                assert (told[f"stream_{name}_bytes"],) == rows.execute(sizes).fetchone()

    with keeping(tmp_path) as server:
        stream, other = created(server, tokens[:5]), created(server)
        stream.append(tokens[:3])
        stream.fork()
        assert metrics(server)["stream_journal_bytes"] > 0
        check(server, 3)
        stream.continue_(2)  # a new snapshot, and no journal any more
        assert HTTP.delete(server.at + other.path).is_success
        check(server, 2)
    with keeping(tmp_path) as server:
        check(server, 2)


def test_an_upload_beyond_the_limit_is_refused_before_it_arrives(
    keeping: Keeping, tokens: np.ndarray, tmp_path: Path
) -> None:
    with keeping(tmp_path, store=StoreSettings(streams=2)) as server:
        snapshot = created(server, tokens[:20]).snapshot()
        head = (
            f"POST /v1/streams/restore HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(snapshot)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as first:
            first.sendall(head.encode() + snapshot[:-1])
            assert comes_true(lambda: server.server.store._making[""] == 1)
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as second:
                second.sendall(head.encode())  # and nothing of the body
                answer = second.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 403 "), answer
            assert b"too_many_streams" in answer
            assert b"connection: close" in answer
            assert server.post("/v1/streams", {}).status_code == 403
            first.sendall(snapshot[-1:])
            assert first.recv(1 << 16).startswith(b"HTTP/1.1 201 ")
        assert len(server.get("/v1/streams").json()["data"]) == 2
