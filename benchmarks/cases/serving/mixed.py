"""Mixed load for minutes: completions, some of which are left, scores, and stored streams.

A client is a generator: it yields a request, and goes on when its answer is whole or the connection was cut.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.cases.serving.wire import LoadError, Loop, Request, resident_bytes

Job = dict[str, Any]
Client = Iterator[tuple[Request, int | None]]  # a request, and after how many events its client leaves
COMPLETIONS = "/v1/completions"
SCORE = "/v1/score"
STREAMS = "/v1/streams"
CLOSE = 1e-4  # nats a token
LONGEST = 2000  # tokens of a stored stream, after which it is deleted and another one made
TOGETHER = 32  # tokens that a stored stream is continued by, at most
SAMPLES = 600  # of the resident memory


@dataclass(eq=False)
class Stored:
    """A stored stream. What it computes is tested elsewhere; here it has to be where it should be."""

    name: str
    position: int = 0
    rewindable: int = 0  # how many of the last tokens can be taken back, as the server has said


class Mixed:
    """What all clients of one job share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.chance = random.Random(job["seed"])
        self.until: float = time.perf_counter() + job["seconds"]
        self.done: Counter[str] = Counter()
        self.idle: list[Stored] = []  # stored streams on which no client works

    def post(self, path: str, body: Any, *, method: str = "POST") -> Request:
        return Request(self.job["port"], method, path, body)

    def complete(self) -> Client:
        """A stream whose tokens are known."""
        known = self.chance.choice(self.job["known"])
        yield (request := self.post(COMPLETIONS, known["body"])), None
        if request.answer.completion()[0] != known["texts"]:
            raise LoadError("a stream under mixed load has other tokens than `generate`.")
        self.done["completions"] += 1

    def leave(self) -> Client:
        """A stream whose client leaves somewhere in the middle."""
        known = self.chance.choice(self.job["known"])
        yield self.post(COMPLETIONS, known["body"]), self.chance.randrange(len(known["texts"]))
        self.done["clients that left"] += 1

    def score(self) -> Client:
        """Scores that are known."""
        scores = self.job["scores"]
        yield (request := self.post(SCORE, {"texts": [score["tokens"] for score in scores]})), None
        for score, found in zip(scores, request.answer.document()["data"], strict=True):
            if abs(score["log_prob"] - found["log_prob"]) > CLOSE * len(score["tokens"]):
                raise LoadError("a score under mixed load differs from `evaluate`.")
        self.done["scores"] += 1

    def client(self, first: int) -> Client:
        """Makes `first` streams, does each operation once, and then any until the time is over."""
        for _ in range(first):
            yield from self.create()
        weights = {
            self.append: 40,
            self.go_on: 20,
            self.go_on_and_leave: 10,
            self.fork: 10,
            self.rewind: 5,
            self.complete: 3,
            self.leave: 3,
            self.score: 3,
        }
        for kind in self.chance.sample(list(weights), len(weights)):
            yield from kind()
        while time.perf_counter() < self.until:
            (kind,) = self.chance.choices(list(weights), list(weights.values()))
            yield from kind()

    def create(self) -> Client:
        body = {"tokens": self._tokens(1)}
        yield (request := self.post(STREAMS, body)), None
        stored = Stored(request.answer.document()["stream"]["id"])
        self._note(stored, request, body["tokens"])
        self.idle.append(stored)
        self.done["streams created"] += 1

    def append(self) -> Client:
        stored = self._taken()
        yield from self._appended(stored, self._tokens(2))
        self.idle.append(stored)
        self.done["appends"] += 1
        if stored.position > LONGEST:
            yield from self._replaced(stored)

    def _appended(self, stored: Stored, tokens: list[int]) -> Client:
        yield (request := self.post(f"{STREAMS}/{stored.name}/append", {"tokens": tokens})), None
        self._note(stored, request, tokens)

    def go_on(self) -> Client:
        stored = self._taken()
        body = {"max_tokens": self.chance.randint(1, TOGETHER), "temperature": 0.0, "ignore_eos": True}
        yield (request := self.post(f"{STREAMS}/{stored.name}/continue", body)), None
        self._note(stored, request, [])
        self.idle.append(stored)
        self.done["continuations"] += 1

    def go_on_and_leave(self) -> Client:
        """What was generated is not known to the client, so the stream is replaced."""
        stored = self._taken()
        body = {"max_tokens": TOGETHER, "stream": True, "ignore_eos": True}
        yield self.post(f"{STREAMS}/{stored.name}/continue", body), self.chance.randrange(TOGETHER // 2)
        self.done["clients that left"] += 1
        yield from self._replaced(stored)

    def fork(self) -> Client:
        """A fork takes the place of another stream, which is deleted."""
        stored = self._taken()
        other = self._taken()
        yield (request := self.post(f"{STREAMS}/{stored.name}/fork", None)), None
        facts = request.answer.document()
        if facts["position"] != stored.position or facts["id"] == stored.name:
            raise LoadError("a fork is not where its origin was.")
        self.idle += [stored, Stored(facts["id"], stored.position)]
        self.done["forks"] += 1
        yield from self._deleted(other)

    def rewind(self) -> Client:
        """Takes tokens back, and appends as many others."""
        stored = self._taken()
        while not stored.rewindable:  # it is at the end of a segment, or a copy of which nothing is known
            yield from self._appended(stored, self._tokens(1))
        count = self.chance.randint(1, min(TOGETHER, stored.rewindable))
        yield (request := self.post(f"{STREAMS}/{stored.name}/rewind", {"tokens": count})), None
        stored.position -= count
        if request.answer.document()["position"] != stored.position:
            raise LoadError("a stored stream is not where it was rewound to.")
        yield from self._appended(stored, self._some(count))
        self.idle.append(stored)
        self.done["rewinds"] += 1

    def _replaced(self, stored: Stored) -> Client:
        if stored in self.idle:
            self.idle.remove(stored)
        yield from self._deleted(stored)
        yield from self.create()

    def _deleted(self, stored: Stored) -> Client:
        """Deletes a stream; while the server ends an operation whose client has left, it is busy."""
        while True:
            yield (request := self.post(f"{STREAMS}/{stored.name}", None, method="DELETE")), None
            if request.answer.status != 409:
                request.answer.document()
                return

    def _taken(self) -> Stored:
        """Any stream on which no other client works."""
        at = self.chance.randrange(len(self.idle))
        self.idle[at], self.idle[-1] = self.idle[-1], self.idle[at]
        return self.idle.pop()

    def _note(self, stored: Stored, request: Request, appended: list[int]) -> None:
        """Notes what the server says has happened to a stream."""
        document = request.answer.document()
        stored.position += len(document["tokens"])
        stored.rewindable = document["stream"]["rewindable"]
        position = document["stream"]["position"]
        if document["tokens"][: len(appended)] != appended or position != stored.position:
            raise LoadError("a stored stream has other tokens than were appended to it.")

    def _tokens(self, segments: int) -> list[int]:
        return self._some(self.chance.randint(1, segments * self.job["segment"]))

    def _some(self, count: int) -> list[int]:
        return [self.chance.randrange(self.job["vocabulary"]) for _ in range(count)]


def mixed(job: Job) -> Job:
    """Runs `clients` clients for `seconds`, with `streams` stored streams.

    resident: bytes of the server's process over the time, from when all streams are stored. done: how often
    each operation was done.
    """
    shared = Mixed(job)
    loop = Loop()
    clients: dict[Request, tuple[Client, int | None]] = {}
    resident: list[int] = []
    due = 0.0

    def advance(client: Client) -> None:
        """Lets a client send its next request; one that leaves at once has sent it all the same."""
        for request, leaves in client:
            if leaves == 0:
                request.leave()
                continue
            clients[request] = client, leaves
            loop.add([request])
            return

    def each(ready: list[Request]) -> None:
        nonlocal due
        for request in ready:
            client, leaves = clients[request]
            if request.ended is None and leaves is not None and request.count >= leaves:
                loop.leave(request)
            if request.ended is not None:
                del clients[request]
                advance(client)
        now = time.perf_counter()
        if shared.done["streams created"] >= job["streams"] and now >= due:
            due = now + job["seconds"] / SAMPLES
            resident.append(resident_bytes(job["pid"]))

    for _ in range(job["clients"]):
        advance(shared.client(-(-job["streams"] // job["clients"])))
    loop.run(each)
    if not resident:
        raise LoadError("the time was over before all streams were stored; give more minutes.")
    return {"resident": resident, "done": dict(shared.done)}
