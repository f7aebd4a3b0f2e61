"""The same over a WebSocket: one stream, messages of JSON, clients that vanish."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.http.conftest import HTTP, Running
from tests.serve.http.streams.conftest import Keeping, Stream, created
from tests.serve.http.test_clients import comes_true
from xl_export.serve.http import serving
from xl_export.serve.http.base import limits
from xl_export.serve.http.streams.socket import WAITING

sync = pytest.importorskip("websockets.sync.client", reason="the package websockets is not installed")


class Talk:
    """A connection to a stream."""

    def __init__(self, stream: Stream, *, key: str = "") -> None:
        address = f"ws://127.0.0.1:{stream.server.port}{stream.path}/ws"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connecting = sync.connect(
            address, compression=None, open_timeout=60, additional_headers=headers
        )
        self.connection = self._connecting.__enter__()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._connecting.__exit__(None, None, None)

    def say(self, op: str, tag: object = None, **fields: Any) -> None:
        self.connection.send(json.dumps({"op": op, "tag": tag, **fields}))

    def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.connection.recv(timeout=60))
        return message

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """The last answer to an operation; the chunks before it are in its `chunks`."""
        self.say(op, **fields)
        chunks = []
        while (answer := self.hear())["event"] == "chunk":
            chunks.append(answer)
        return {**answer, "chunks": chunks}


def test_the_socket_says_what_http_says(kept: Running, tokens: np.ndarray) -> None:
    stream, other = created(kept), created(kept)
    fields = {"max_tokens": 40, "seed": 5, "ignore_eos": True}
    with Talk(stream) as talk:
        answer = talk.ask("append", tokens=tokens[:30].tolist(), tag="a")
        expected = other.append(tokens[:30])
        assert (answer["tag"], answer["event"]) == ("a", "end")
        assert answer["bits"] == expected["bits"]
        answer, expected = talk.ask("continue", **fields), other.post("continue", fields)
        drawn = [token for chunk in [*answer["chunks"], answer] for token in chunk["tokens"]]
        assert drawn == expected["tokens"]
        assert "".join(chunk["text"] for chunk in [*answer["chunks"], answer]) == expected["text"]
        assert answer["chunks"], "the tokens come while more are drawn, in pieces that depend on the load"
        assert talk.ask("rewind", tokens=2)["position"] == 68
        assert talk.ask("facts")["position"] == 68
        fork = Stream(kept, talk.ask("fork")["id"])
        assert fork.append(tokens[:3])["bits"] == talk.ask("append", tokens=tokens[:3].tolist())["bits"]


def test_what_is_wrong_is_answered_and_the_connection_stays(kept: Running) -> None:
    stream = created(kept)
    with Talk(stream) as talk:
        for message, word in [
            ("{", "not JSON"),
            ("[1]", "no JSON object"),
            ('{"op": "sing"}', "'sing'"),
            ('{"op": "append", "token": [1]}', "did you mean 'tokens'?"),
            ('{"op": "rewind", "tokens": 3, "tag": 7}', "expected 0 to 0"),
            ('{"op": "facts", "tag": [7]}', "tag is [7]"),
            ("[" * 20_000, "JSON"),
        ]:
            talk.connection.send(message)
            answer = talk.hear()
            assert answer["event"] == "error"
            assert word in answer["error"]["message"]
        assert talk.ask("append", tokens=[1])["stream"]["position"] == 1
        assert not kept.server.models["tiny"].engine.scheduler.rows.runs


def test_cancel_right_behind_its_operation_ends_it(kept: Running, tokens: np.ndarray) -> None:
    stream = created(kept, tokens[:5])
    run = json.dumps({"op": "continue", "tag": 1, "max_tokens": 2000, "ignore_eos": True})
    cancel, facts = json.dumps({"op": "cancel"}), json.dumps({"op": "facts", "tag": 2})
    with Talk(stream) as talk:
        wire = talk.connection.protocol
        for messages in [[run, cancel], [facts, run, cancel]] * 10:
            for message in messages:  # the server finds them in one read
                wire.send_text(message.encode())
            talk.connection.socket.sendall(b"".join(wire.data_to_send()))
            ends = []
            while len(ends) < len(messages) - 1:
                if (answer := talk.hear())["event"] != "chunk":
                    ends.append(answer)
            assert ends[-1]["finish_reason"] == "cancelled"
        assert talk.ask("continue", max_tokens=3, ignore_eos=True)["finish_reason"] == "length", (
            "nothing is left"
        )


def test_a_cancelled_append_says_so_and_changes_nothing(
    kept: Running, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, model, cancelled = created(kept, tokens[:5]), kept.server.models["tiny"], threading.Event()
    cancel = model.engine.cancel

    def noted(task: Any) -> None:
        cancel(task)
        cancelled.set()

    def waiting(verb: Any) -> Any:
        def step(*arguments: Any, **named: Any) -> Any:
            assert cancelled.wait(60)
            return verb(*arguments, **named)

        return step

    monkeypatch.setattr(model.engine, "cancel", noted)
    for verb in ("score", "step"):
        monkeypatch.setattr(model.session, verb, waiting(getattr(model.session, verb)))
    with Talk(stream) as talk:
        talk.say("append", tag=1, tokens=tokens[:300].tolist())
        assert comes_true(lambda: model.engine.prompts == 1)
        talk.say("cancel")
        answer = talk.hear()
        assert (answer["tag"], answer["event"], answer["error"]["code"]) == (1, "error", "cancelled")
        assert "the stream stays as it was" in answer["error"]["message"]
        assert talk.ask("facts")["position"] == 5


def test_cancel_is_read_although_messages_wait(kept: Running, tokens: np.ndarray) -> None:
    stream = created(kept, tokens[:5])
    with Talk(stream) as talk:
        talk.say("continue", tag="run", max_tokens=2000, ignore_eos=True)
        assert talk.hear()["event"] == "chunk"
        for _ in range(WAITING + 4):
            talk.say("facts", tag="facts")
        talk.say("cancel")
        ends: dict[str, list[dict[str, Any]]] = {"run": [], "facts": []}
        while sum(map(len, ends.values())) < WAITING + 5:
            if (answer := talk.hear())["event"] != "chunk":
                ends[answer["tag"]].append(answer)
        assert ends["run"][0]["finish_reason"] == "cancelled"
        errors = [answer["error"]["code"] for answer in ends["facts"] if answer["event"] == "error"]
        assert errors == ["too_many_messages"] * 4


def test_messages_that_wait_count_like_bodies(
    kept: Running, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SMALL_BODY", 1000)
    stream, bodies, large = created(kept, tokens[:5]), kept.server.bodies, "a" * 2000
    with Talk(stream) as talk:
        talk.say("continue", max_tokens=2000, ignore_eos=True)
        assert talk.hear()["event"] == "chunk"
        talk.say("append", tag="large", text=large)
        assert comes_true(lambda: bodies.total > 0)
        talk.say("cancel")
        while (answer := talk.hear())["tag"] != "large":
            pass
        assert answer["event"] in ("end", "error")
        assert comes_true(lambda: bodies.total == 0)


def test_what_streams_and_scores_cost_is_counted(kept: Running, tokens: np.ndarray) -> None:
    figures, stream = kept.server.figures["tiny"], created(kept)
    counted = [
        lambda: stream.append(tokens[:5]),
        lambda: kept.post("/v1/score", {"texts": [tokens[:5].tolist()]}),
        lambda: stream.continue_(3),
    ]
    for do in counted:
        before = figures.to_first.counts.copy(), figures.prompt_tokens, figures.generated_tokens
        do()
        assert sum(figures.to_first.counts) == sum(before[0]) + 1
        grown = figures.prompt_tokens - before[1], figures.generated_tokens - before[2]
        assert grown in ((5, 0), (0, 3))


def test_a_client_that_answers_no_ping_is_gone(
    keeping: Keeping, tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-open connection: the other machine is off, and nothing says so."""
    monkeypatch.setattr(serving, "PING", 0.3)
    with keeping(tmp_path) as server:
        stream = created(server, tokens[:5])
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
            raw.sendall(
                f"GET {stream.path}/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
                "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n".encode()
            )
            assert raw.recv(1 << 12).startswith(b"HTTP/1.1 101 ")
            message = b'{"op": "continue", "max_tokens": 2000, "ignore_eos": true}'
            raw.sendall(bytes([0x81, 0x80 | len(message)]) + bytes(4) + message)  # masked with zeros
            engine = server.server.models["tiny"].engine
            while raw.recv(1 << 20):  # it reads, and answers nothing
                pass
        assert comes_true(lambda: not server.get(stream.path).json()["busy"])
        assert not engine.scheduler.runs


def test_strangers_are_refused_before_the_connection_stands(kept: Running) -> None:
    from websockets.exceptions import InvalidStatus

    stream = created(kept)
    for path in ("/v1/streams/stream-0/ws", f"{stream.path}/ws/more"):
        with (
            pytest.raises(InvalidStatus) as refused,
            sync.connect(f"ws://127.0.0.1:{kept.port}{path}", open_timeout=60),
        ):
            pass
        assert refused.value.response.status_code in (403, 404)
    assert HTTP.get(f"{kept.at}{stream.path}/ws").status_code == 405
    assert "handshake" not in kept.log.getvalue()  # a refusal is no fault of the server


def test_a_stream_is_deleted_after_the_operations_before_it(kept: Running, tokens: np.ndarray) -> None:
    stream = created(kept, tokens[:5])
    with Talk(stream) as talk:
        talk.say("append", 1, tokens=tokens[:3].tolist())
        talk.say("delete", 2)
        talk.say("append", 3, tokens=tokens[:3].tolist())
        assert talk.hear()["stream"]["position"] == 8
        assert talk.hear() == {
            "tag": 2,
            "event": "end",
            "id": stream.name,
            "object": "stream",
            "deleted": True,
        }
        assert talk.hear()["error"]["code"] == "stream_not_found"
    assert kept.get(stream.path).status_code == 404
