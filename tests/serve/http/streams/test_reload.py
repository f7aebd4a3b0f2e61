"""What goes on while a model is exchanged for another one, and when keys are read again."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import Keeping, created, owned
from tests.serve.http.streams.test_socket import Talk
from tests.serve.http.test_clients import comes_true
from tests.serve.http.test_operation import ANNA, BERT
from xl_export.serve.http.base.body import LARGE
from xl_export.serve.http.base.keys import keys_of
from xl_export.serve.http.base.models import Model
from xl_export.serve.http.openai import completions, score

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
    ("path", "field", "module", "name"),
    [("/v1/completions", "prompt", completions, "plan_of"), ("/v1/score", "texts", score, "rows_of")],
)
def test_a_request_whose_prompt_is_encoded_meanwhile_ends_on_the_old_model(
    own: Running, path: str, field: str, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, begun, goes_on = getattr(module, name), threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(module, name, slowly)
    text = "a" * 3900
    body = json.dumps({field: text if field == "prompt" else [text]}) + " " * LARGE  # encoded on a thread
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(own.post, path, body.encode())
        assert begun.wait(60)
        before = exchanged(own)
        assert comes_true(lambda: before.users == 1 or before.stopped)
        goes_on.set()
        assert answer.result().status_code == 200, answer.result().text
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


def test_an_engine_that_takes_no_more_tasks_is_no_fault_of_the_request(
    own: Running, tokens: np.ndarray
) -> None:
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
