"""Operations that a client ends early, and what they cost."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.serve.http.conftest import HTTP, Running
from tests.serve.http.streams.conftest import continued, created
from tests.serve.http.test_clients import comes_true


def test_a_cancelled_continue_keeps_what_it_has_sent(
    kept: Running, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, session = created(kept, tokens[:5]), kept.server.models["tiny"].session
    predict, cancelled, steps = session.predict, threading.Event(), itertools.count()

    def held(*arguments: Any, **named: Any) -> Any:
        assert next(steps) < 100 or cancelled.wait(60)  # it does not end before it is cancelled
        return predict(*arguments, **named)

    monkeypatch.setattr(session, "predict", held)
    assert stream.post("cancel") == {"id": stream.name, "object": "stream.cancel", "cancelled": False}
    heard: list[int] = []
    for event in continued(stream, max_tokens=2000, ignore_eos=True):
        if not heard:
            assert stream.post("cancel")["cancelled"]
            cancelled.set()
        heard += event["tokens"]
    assert event["finish_reason"] == "cancelled"
    assert event["stream"]["position"] == 5 + len(heard) < 2005
    assert stream.continue_(3, ignore_eos=True)["finish_reason"] == "length", "nothing is left"


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
    with ThreadPoolExecutor(1) as pool:
        append = pool.submit(HTTP.post, f"{kept.at}{stream.path}/append", json={"tokens": [1] * 300})
        assert comes_true(lambda: model.engine.prompts == 1)
        assert stream.post("cancel")["cancelled"]
        answer = append.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cancelled")
    assert kept.get(stream.path).json()["position"] == 5


def test_what_streams_and_scores_cost_is_counted(kept: Running, tokens: np.ndarray) -> None:
    metrics, stream = kept.server.models["tiny"].requests, created(kept)
    counted = [
        lambda: stream.append(tokens[:5]),
        lambda: kept.post("/v1/score", {"texts": [tokens[:5].tolist()]}),
        lambda: stream.continue_(3),
    ]
    for do in counted:
        before = metrics.to_first.counts.copy(), metrics.prompt_tokens, metrics.generated_tokens
        do()
        assert sum(metrics.to_first.counts) == sum(before[0]) + 1
        grown = metrics.prompt_tokens - before[1], metrics.generated_tokens - before[2]
        assert grown in ((5, 0), (0, 3))
