"""Clients of streams that leave at random moments: a stream is where its facts say it is, its numbers
are those of the session alone, and no row is lost.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Session
from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import Keeping, Stream, continued, created, straight
from tests.serve.http.test_clients import comes_true, connection

CLIENTS, STREAMS = 4, 3
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class Rude:
    """One client and what it knows of its streams: all tokens of each."""

    def __init__(self, server: Running, session: Session, tokens: np.ndarray, seed: int) -> None:
        self.server, self.session, self.tokens = server, session, tokens
        self.chance = random.Random(seed)
        self.known: dict[str, np.ndarray] = {}
        self.done: Counter[str] = Counter()

    def act(self, times: int) -> None:
        kinds = (
            self.append,
            self.append_and_leave,
            self.continue_and_leave,
            self.cancel,
            self.rewind,
            self.fork,
            self.score_and_leave,
        )
        first = self.chance.sample(kinds, len(kinds))
        for number in range(times):
            while len(self.known) < STREAMS:
                tokens = self.some(1, 60)
                self.known[created(self.server, tokens).name] = tokens
            kind = first[number] if number < len(first) else self.chance.choice(kinds)
            kind(Stream(self.server, self.chance.choice(list(self.known))))
            self.done[kind.__name__] += 1
            while len(self.known) > 2 * STREAMS:
                name, _ = self.known.popitem()
                self.server.client.delete(f"{self.server.at}/v1/streams/{name}").raise_for_status()

    def some(self, least: int, most: int) -> np.ndarray:
        count, at = self.chance.randint(least, most), self.chance.randrange(400)
        return self.tokens[at : at + count]

    def append(self, stream: Stream) -> None:
        tokens = self.some(1, 40)
        bits = stream.append(tokens)["bits"]
        whole = np.concatenate([self.known[stream.name], tokens])
        assert np.abs(np.array(bits) - straight(self.session, whole)[-len(bits) :]).max() <= 1e-3
        self.known[stream.name] = whole

    def append_and_leave(self, stream: Stream) -> None:
        """All of the tokens were appended, or none."""
        tokens = self.some(1, 300)
        self.send(f"{stream.path}/append", {"tokens": tokens.tolist()})
        before, after = self.known[stream.name], np.concatenate([self.known[stream.name], tokens])
        position = self.position(stream)
        assert position in (len(before), len(after))
        self.known[stream.name] = before if position == len(before) else after

    def continue_and_leave(self, stream: Stream) -> None:
        """What was told belongs to the stream, and what was sent and not read may: then it is given up."""
        body = {"max_tokens": self.chance.choice([1, 5, 300]), "stream": True, "ignore_eos": True}
        heard = self.send(f"{stream.path}/continue", body, read=self.chance.randrange(6000))
        lines = heard.decode(errors="replace").split("\n\n")[:-1]  # the last one may be cut
        events = [json.loads(line.partition("data: ")[2]) for line in lines if '"tokens"' in line]
        self.told(stream, [token for event in events for token in event.get("tokens", [])])

    def cancel(self, stream: Stream) -> None:
        heard: list[int] = []
        at = self.chance.randint(1, 4)
        for number, event in enumerate(continued(stream, max_tokens=300, ignore_eos=True)):
            if number == at:
                stream.post("cancel")
            heard += event["tokens"]
        assert event["finish_reason"] in ("cancelled", "length")
        whole = np.concatenate([self.known[stream.name], np.array(heard, np.int64)])
        assert event["stream"]["position"] == len(whole)
        self.known[stream.name] = whole

    def rewind(self, stream: Stream) -> None:
        most = self.server.get(stream.path).json().get("rewindable") or 0
        count = self.chance.randint(0, min(most, len(self.known[stream.name]) - 1))
        stream.post("rewind", {"tokens": count})
        self.known[stream.name] = self.known[stream.name][: len(self.known[stream.name]) - count]

    def fork(self, stream: Stream) -> None:
        self.known[stream.fork().name] = self.known[stream.name]

    def score_and_leave(self, stream: Stream) -> None:
        self.send("/v1/score", {"texts": [self.some(2, 300).tolist() for _ in range(20)]})

    def told(self, stream: Stream, tokens: list[int]) -> None:
        whole = np.concatenate([self.known.pop(stream.name), np.array(tokens, np.int64)])
        position = self.position(stream)
        assert position >= len(whole), "what was told is lost"
        if position == len(whole):
            self.known[stream.name] = whole
        else:
            self.server.client.delete(f"{self.server.at}{stream.path}").raise_for_status()

    def send(self, path: str, body: Any, *, read: int = 0) -> bytes:
        """Sends all or some of a request, reads so many bytes of the answer or fewer, and leaves. Returns
        when the server has noticed; it may still work on what was asked.
        """
        content, heard, name = json.dumps(body).encode(), b"", f"{self.chance.getrandbits(96):024x}"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: {name}\r\n"
        whole = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        with connection(self.server) as client:
            sent = self.chance.randint(1, len(whole)) if self.chance.random() < 0.2 else len(whole)
            client.sendall(whole[:sent])
            client.settimeout(self.chance.uniform(0.001, 0.1))
            with contextlib.suppress(OSError):
                while len(heard) < read and (part := client.recv(read - len(heard))):
                    heard += part
            if self.chance.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        if b"\r\n\r\n" in whole[:sent]:
            assert comes_true(lambda: name in self.server.log.getvalue())
        return heard

    def position(self, stream: Stream) -> int:
        """Where the stream is, once no operation of this client runs on it any more."""
        facts: dict[str, Any] = {}

        def is_still() -> bool:
            facts.update(self.server.get(stream.path).json())
            return not facts["busy"]

        assert comes_true(is_still)
        return int(facts["position"])


@pytest.mark.parametrize("times", [9, pytest.param(1000, marks=pytest.mark.slow)])
def test_streams_of_clients_that_leave_are_where_their_facts_say(
    keeping: Keeping, session: Session, tokens: np.ndarray, tmp_path: Path, times: int
) -> None:
    with keeping(tmp_path) as server:
        clients = [Rude(server, session, tokens, seed) for seed in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            for future in [pool.submit(client.act, times) for client in clients]:
                future.result()
        assert len(sum((client.done for client in clients), Counter())) == 7, "each kind came"
        compared = 0
        for client in clients:
            for name, whole in client.known.items():
                more = tokens[7:10]
                answer = Stream(server, name).append(more)
                assert answer["stream"]["position"] == len(whole) + 3
                theirs = straight(session, np.concatenate([whole, more]))[-3:]
                assert np.abs(np.array(answer["bits"]) - theirs).max() <= 1e-3, name
                compared += 1
        assert compared >= CLIENTS * STREAMS // 2
        rows = server.server.models["tiny"].engine.scheduler.rows
        assert comes_true(lambda: rows.free == 4 and server.server.requests.total == 0)
