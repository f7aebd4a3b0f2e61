"""Many streams at once: on a server process that is killed again and again, and all in one moment."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtimes import Session
from runtimes.contract.sampling import Sampler
from runtimes.tasks.generate import generate
from tests.serve.http.conftest import HTTP, Running
from tests.serve.http.streams.conftest import Keeping, created
from xl_export.serve.core.settings import StoreSettings

CLIENTS = 4
PATIENCE = 60  # seconds that a client waits for a server to come back


class Process:
    """`xl-export serve` with a state folder, as a process that can be killed."""

    def __init__(self, artefact: Path, state: Path) -> None:
        self._command = [sys.executable, "-m", "xl_export", "serve", f"tiny={artefact}", "--quiet"]
        self._command += ["--threads", "1", "--state", str(state)]
        self.kills = 0
        self._start(0)

    def _start(self, port: int) -> None:
        # With no RAM for idle streams every operation reads and writes snapshots, and otherwise journals.
        megabytes = 1024 * (self.kills % 2)
        command = [*self._command, "--port", str(port), "--stream-memory", str(megabytes)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.match(r"(http://127.0.0.1:(\d+))/ serves", line)
        assert found is not None, line
        self.at = found[1]
        self.port = int(found[2])

    def kill(self) -> None:
        """SIGKILL, and then a new process on the same port and folder."""
        self.end(signal.SIGKILL)
        self.kills += 1
        self._start(self.port)

    def end(self, how: int = signal.SIGTERM) -> None:
        self._process.send_signal(how)
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Client:
    """Does its own operations on its own streams, drawn from a seed; asks again if there is no answer."""

    def __init__(self, at: str, seed: int, tokens: np.ndarray, done: Callable[[], None]) -> None:
        self._at = at
        self._chance = random.Random(seed)
        self._tokens = tokens
        self._done = done
        self.streams: list[tuple[str, int]] = []
        """Names and positions of the streams."""
        self.answers: list[Any] = []
        """What was answered; of an answer that never came only the position is known."""

    def work(self, count: int) -> None:
        for _ in range(count):
            self._operate()
            self._done()

    def _operate(self) -> None:
        chance, streams = self._chance, self.streams
        what = chance.choice(
            ["append"] * 6 + ["continue"] * 4 + ["create", "fork", "rewind", "move", "delete"]
        )
        first = chance.randrange(1000)
        some = self._tokens[first : first + chance.randrange(1, 30)].tolist()
        at = chance.randrange(1 << 20)
        if what == "create" or not streams:
            answer = self._ask("POST", "/v1/streams", {"tokens": some})
            streams.append((answer["stream"]["id"], answer["stream"]["position"]))
            return self._note(answer)
        at %= len(streams)
        name, position = streams[at]
        path = f"/v1/streams/{name}"
        if what in ("append", "continue"):
            body = {"tokens": some, "position": position}
            if what == "continue":
                body |= {"max_tokens": 5, "seed": first, "temperature": 1.0, "ignore_eos": True}
            answer = self._ask("POST", f"{path}/{what}", body)
            if "error" in answer:  # the answer to the first attempt was lost
                assert answer["error"]["code"] == "other_position"
                answer = {"stream": {"position": answer["error"]["position"]}}
            streams[at] = name, answer["stream"]["position"]
            self._note(answer)
        elif what == "rewind":
            before = position
            while True:
                answer = self._ask("POST", f"{path}/rewind", {"tokens": 1}, once=True)
                if answer is not None:
                    break
                answer = self._ask("GET", path)
                if answer["position"] != before:
                    break
            streams[at] = name, answer["position"]
            self._note({"stream": answer})
        elif what == "fork":
            answer = self._ask("POST", f"{path}/fork", {})
            streams.append((answer["id"], answer["position"]))
            self._note({"stream": answer})
        elif what == "move":
            content = self._send("GET", f"{path}/snapshot").content
            answer = self._send("POST", "/v1/streams/restore", content=content).json()
            streams.append((answer["id"], answer["position"]))
            self._note({"stream": answer})
        else:
            answer = self._ask("DELETE", path)
            assert answer.get("deleted") or answer["error"]["code"] == "stream_not_found"
            del streams[at]
            self._note({})
        return None

    def _note(self, answer: dict[str, Any]) -> None:
        kept = {name: answer[name] for name in ("tokens", "bits", "text") if name in answer}
        self.answers.append({**kept, "position": answer["stream"]["position"]} if "stream" in answer else {})

    def _ask(self, method: str, path: str, body: Any = None, *, once: bool = False) -> Any:
        answer = self._send(method, path, once=once, **({} if body is None else {"json": body}))
        return None if answer is None else answer.json()

    def _send(self, method: str, path: str, *, once: bool = False, **content: Any) -> Any:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return HTTP.request(method, self._at + path, **content)
            except httpx.TransportError:
                assert time.monotonic() < end, "the server does not come back"
                time.sleep(0.02)
                if once:
                    self._wait(end)
                    return None

    def _wait(self, end: float) -> None:
        """Until a server answers."""
        while True:
            try:
                HTTP.get(f"{self._at}/health")
                return
            except httpx.TransportError:
                assert time.monotonic() < end, "the server does not come back"
                time.sleep(0.02)


def clients_of(at: str, count: int, tokens: np.ndarray, done: Callable[[], None]) -> list[Client]:
    """Clients that have done so many operations together."""
    clients = [Client(at, seed, tokens, done) for seed in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        for each in [pool.submit(client.work, count // CLIENTS) for client in clients]:
            each.result()
    return clients


@pytest.mark.parametrize(("count", "kills"), [(100, 3), pytest.param(1000, 16, marks=pytest.mark.slow)])
def test_no_answered_operation_is_lost_however_often_the_server_is_killed(
    artefacts: dict[str, Path],
    keeping: Keeping,
    tokens: np.ndarray,
    tmp_path: Path,
    count: int,
    kills: int,
) -> None:
    """The answers, and the streams afterwards, are those of a server that nobody has killed."""
    process = Process(artefacts["ring"], tmp_path / "state")
    chance = random.Random(0)
    moments = sorted(chance.sample(range(count), kills), reverse=True)
    lock = threading.Lock()
    number = 0

    def done() -> None:
        nonlocal number
        with lock:  # other clients go on, and lose their answers
            number += 1
            if moments and number > moments[-1]:
                moments.pop()
                time.sleep(chance.random() / 50)
                process.kill()

    try:
        found = clients_of(process.at, count, tokens, done)
        process.kill()
        assert process.kills == kills + 1
        with keeping(None) as server:
            expected = clients_of(server.at, count, tokens, lambda: None)
            for client, reference in zip(found, expected, strict=True):
                assert len(client.answers) == len(reference.answers)
                for answer, wanted in zip(client.answers, reference.answers, strict=True):
                    assert answer == {name: wanted[name] for name in answer}, "bit for bit"
            listed = {
                each["id"]: each["position"] for each in httpx.get(f"{process.at}/v1/streams").json()["data"]
            }
            for client, reference in zip(found, expected, strict=True):
                for (name, position), (other, _) in zip(client.streams, reference.streams, strict=True):
                    assert listed[name] == position
                    body = {"tokens": tokens[:9].tolist(), "position": position}
                    last = [
                        HTTP.post(f"{at}/v1/streams/{each}/append", json=body).json()["bits"]
                        for at, each in ((process.at, name), (server.at, other))
                    ]
                    assert last[0] == last[1]
    finally:
        process.end()


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_streams_at_once_generate_what_a_session_generates(
    keeping: Keeping, session: Session, tokens: np.ndarray, tmp_path: Path, count: int
) -> None:
    """With RAM for few of them, each from its own prompt and seed, through two `continue`s."""
    bounds = StoreSettings(ram_bytes=1 << 16)

    def follow(server: Running, number: int) -> list[int]:
        stream = created(server, tokens[number : number + 20])
        fields = {"temperature": 1.0, "ignore_eos": True, "seed": number}
        return [token for _ in range(2) for token in stream.continue_(12, **fields)["tokens"]]

    with keeping(tmp_path, store=bounds, rows=16) as server, ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda number: follow(server, number), range(count)))
        assert len(server.get("/v1/streams").json()["data"]) == count
    for number, drawn in enumerate(found):
        prompt = tokens[number : number + 20]
        sampler = Sampler(temperature=1.0)
        pieces = generate(session, [prompt], max_tokens=12, sampler=sampler, seed=number, text=False)
        assert drawn[:12] == [piece.token for piece in pieces]
