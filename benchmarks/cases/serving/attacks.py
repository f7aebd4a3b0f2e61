"""One client sends as much as it may, of one kind, and another one asks for little: how long that one waits.

Part of the load process.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from benchmarks.cases.serving.wire import LoadError, asked, resident_bytes

Job = dict[str, Any]
TEXT = "Once upon a time there was a girl who lived in a house near the woods, and she had a dog.\n"
PROBED = 0.02  # seconds between two questions of the other client
IDLE = 30  # questions of each kind to an idle server


def of_size(characters: int) -> str:
    """A text of so many characters."""
    return (TEXT * (characters // len(TEXT) + 1))[:characters]


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _text(size: int) -> bytes:
    return _json(prompt=of_size(size))


# What is sent, eight at a time: the path, and what makes the body, of about the 1 MB that a body may have.
ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a text of 1 MB": ("/tokenize", lambda: _text(1_000_000)),
    "500,000 ids": ("/v1/completions", lambda: _json(prompt=[1] * 500_000, max_tokens=1)),
    "empty lists of 1 MB": ("/v1/completions", lambda: _json(prompt=[[]] * 340_000)),
    "200,000 ids to decode": (
        "/detokenize",
        lambda: _json(tokens=[300 + at % 700 for at in range(200_000)]),
    ),
    "2,000 texts to score": (
        "/v1/score",
        lambda: _json(texts=[of_size(300 + at % 300) for at in range(2000)], tokens=True),
    ),
}


def stall(job: Job) -> Job:
    """Milliseconds of the questions of one client, alone and while another one attacks for `seconds`.

    attack: of `ATTACKS`, `at_once` requests of which are under way all the time. resident: the most bytes
    that the server has held, over those before.
    """
    before = resident_bytes(job["pid"])
    attacker, other = job["keys"]
    path, made = ATTACKS[job["attack"]]
    body = made()
    questions = {"health": ("GET", "/health", None), "short": ("POST", "/tokenize", _text(5000))}

    def ask(name: str, is_over: Callable[[int], bool]) -> list[float]:
        """The milliseconds of each answer to a question, until it is over."""
        found: list[float] = []
        while not is_over(len(found)):
            began = time.perf_counter()
            asked(job["port"], *questions[name], key=other).content()
            found.append((time.perf_counter() - began) * 1e3)
            time.sleep(PROBED)
        return found

    def attack() -> None:
        while (left := end - time.perf_counter()) > 0:
            # The server may refuse before it has read everything; at the end the client leaves.
            with contextlib.suppress(OSError, LoadError):
                asked(job["port"], "POST", path, body, key=attacker, silence=left)

    idle = {name: ask(name, lambda count: count >= IDLE) for name in questions}
    end = time.perf_counter() + job["seconds"]
    with ThreadPoolExecutor(len(questions) + job["at_once"]) as pool:
        attacks = [pool.submit(attack) for _ in range(job["at_once"])]
        busy = {name: pool.submit(ask, name, lambda count: time.perf_counter() > end) for name in questions}
        most = before
        waited: list[Future[Any]] = [*attacks, *busy.values()]
        while not all(each.done() for each in waited):
            most = max(most, resident_bytes(job["pid"]))
            time.sleep(PROBED)
        return {
            "idle": idle,
            "busy": {name: each.result() for name, each in busy.items()},
            "resident": most - before,
        }
