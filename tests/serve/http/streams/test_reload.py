"""What goes on while a model is exchanged for another one, and when keys are read again."""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import Keeping, created, owned
from tests.serve.http.streams.test_socket import Talk
from tests.serve.http.test_clients import comes_true, connection, head, wait_for
from tests.serve.http.test_status import ANNA, BERT
from xl_export.serve.http.base.keys import keys_of
from xl_export.serve.http.base.server import Model, Source
from xl_export.serve.http.base.workers import INLINE
from xl_export.serve.http.openai import completions
from xl_export.serve.http.streams import work

RELOAD = "/admin/models/tiny/reload"


@pytest.fixture
def own(keeping: Keeping, tmp_path: Path):
    """A server whose model may be exchanged."""
    with keeping(tmp_path) as server:
        yield server


def exchanged(server: Running) -> Model:
    """The model that was served before."""
    before = server.server.models["tiny"]
    assert server.post(RELOAD).status_code == 200
    return before


@pytest.mark.parametrize(
    ("module", "encodes", "path", "body"),
    [
        (completions, "plan_of", "/v1/completions", {"prompt": "a" * 300, "max_tokens": 1}),
        (work, "tokens_of", "/v1/streams", {"text": "a" * INLINE}),
    ],
    ids=["completion", "stream"],
)
def test_a_request_ends_on_the_model_that_began_it(
    own: Running, monkeypatch: pytest.MonkeyPatch, module: Any, encodes: str, path: str, body: dict[str, Any]
) -> None:
    encode, begun, goes_on = getattr(module, encodes), threading.Event(), threading.Event()

    def slowly(*arguments: Any, **named: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return encode(*arguments, **named)

    monkeypatch.setattr(module, encodes, slowly)
    content = json.dumps(body) + " " * INLINE  # encoded on a thread
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(own.post, path, content.encode())
        assert begun.wait(60)
        before = exchanged(own)
        assert comes_true(lambda: before.users == 1 or before.stopped)
        goes_on.set()
        assert answer.result().is_success, answer.result().text
    assert comes_true(lambda: before.stopped)


def test_no_reload_cuts_an_answer_and_old_versions_are_bounded(own: Running) -> None:
    """Each of these clients waits in the middle of its answer, while the model is exchanged."""
    body = {"prompt": "abc", "max_tokens": 600, "logprobs": 5, "seed": 3, "ignore_eos": True}
    whole = own.post("/v1/completions", body).json()["choices"][0]["text"]
    listener = own.web.servers[0].sockets[0]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # of connections
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # else a small window waits for timers
    clients, versions = [], []
    for _ in range(2):
        client = connection(own)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # far less than the answer
        client.sendall(head(json.dumps({**body, "stream": True}).encode()))
        clients.append((client, wait_for(client, b"data: ")))
        versions.append(exchanged(own))
    refused = own.post(RELOAD)
    assert refused.status_code == 409
    assert refused.json()["error"]["message"].startswith(
        "2 versions of tiny replaced before still serve 2 request(s), each with its memory;"
    )
    assert own.post("/v1/completions", body).json()["choices"][0]["text"] == whole
    for (client, begun), version in zip(clients, versions, strict=True):
        assert (version.users, version.stopped) == (1, False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # now it reads fast
        events = begun + wait_for(client, b"[DONE]")
        client.close()
        found = [json.loads(line) for line in re.findall(rb"data: ({.*})", events)]
        assert "".join(part["choices"][0]["text"] for part in found) == whole
        assert comes_true(lambda: version.stopped)  # noqa: B023 (it is called here)
    assert own.post(RELOAD).status_code == 200


def test_a_reload_goes_on_without_its_client(own: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    before, begun, goes_on = own.server.models["tiny"], threading.Event(), threading.Event()

    def slowly(source: Source) -> None:
        begun.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(Source, "check", slowly)
    with connection(own) as client:
        client.sendall(f"POST {RELOAD} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert begun.wait(60)
    assert comes_true(lambda: not own.web.server_state.connections)
    goes_on.set()
    assert comes_true(lambda: before.stopped)


def test_a_connection_goes_on_with_the_new_model(own: Running, tokens: np.ndarray) -> None:
    stream = created(own, tokens[:5])
    with Talk(stream) as talk:
        assert talk.ask("append", tokens=tokens[5:8].tolist())["event"] == "end"
        before = exchanged(own)
        assert comes_true(lambda: before.stopped)
        assert talk.ask("append", tokens=tokens[8:9].tolist())["stream"]["position"] == 9
        assert talk.ask("facts")["position"] == 9
        assert stream.append(tokens[9:10])["stream"]["position"] == 10


def test_a_key_that_was_taken_away_closes_its_connection(keeping: Keeping, tmp_path: Path) -> None:
    from websockets.exceptions import ConnectionClosedError

    valid = [f"anna {ANNA}", f"bert {BERT}"]
    with keeping(tmp_path, read_keys=lambda: keys_of(valid, "keys")) as server:
        anna, bert = owned(server, ANNA), owned(server, BERT)
        with Talk(anna, key=ANNA) as talk, Talk(bert, key=BERT) as other:
            del valid[0]
            assert talk.ask("append", tokens=[1])["event"] == "end"
            server.server.reload_keys()
            assert talk.ask("append", tokens=[1])["error"]["code"] == "invalid_api_key"
            with pytest.raises(ConnectionClosedError) as closed:
                talk.hear()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
            assert other.ask("append", tokens=[1])["event"] == "end"


def test_a_stopping_engine_answers_503(own: Running, tokens: np.ndarray) -> None:
    stream = created(own, tokens[:5])
    with Talk(stream) as talk:
        own.server.models["tiny"].engine.stop(within=0)
        answers = [
            own.post("/v1/completions", {"prompt": "a"}),
            own.post("/v1/score", {"texts": ["a"]}),
            own.post(f"{stream.path}/append", {"tokens": [1]}),
        ]
        assert [answer.status_code for answer in answers] == [503] * 3
        assert {answer.json()["error"]["code"] for answer in answers} == {"stopping"}
        assert answers[0].headers["retry-after"] == "5"
        assert talk.ask("append", tokens=[1])["error"]["code"] == "stopping"
