"""Streams on Ray Serve: one of two replicas is killed in the middle of many streams; one comes and goes with
the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import runtimes
from runtimes.base.errors import ConfigError
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.replica import Replica, SharedStreams

ray = pytest.importorskip("ray", reason="ray is not installed; pip install '.[ray]'")
ARTEFACT = Path(__file__).parents[2] / "data" / "small"
STREAMS = 60
PATIENCE = 120  # seconds that a client asks again
Talks = dict[str, list[dict[str, Any]]]  # requests or answers of each stream, one after the other
# Ray leaves sockets to the end of the process, and is warned of its own habits by its libraries.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def alone(bodies: Talks, folder: Path) -> Talks:
    """All answers to each stream, of one engine that nobody stops."""
    session = runtimes.open_session(ARTEFACT, threads=1, device="cpu")
    folder.mkdir()
    streams = SharedStreams(folder, session, ram_bytes=1 << 28)
    replica = Replica(session, streams, EngineSettings(rows=8))

    async def talk(name: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for body in bodies[name]:
            position = answers[-1]["position"] if answers else 0
            answers.append(await replica.answer(name, body | {"position": position}))
        return answers

    async def all_of_them() -> Talks:
        return dict(zip(bodies, await asyncio.gather(*map(talk, bodies)), strict=True))

    answers = asyncio.run(all_of_them())
    replica.stop()
    return answers


@contextlib.contextmanager
def served(folder: Path, **options: int) -> Iterator[int]:
    """The port where the artefact is served."""
    from ray import serve

    from xl_export.serve.ray import application

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": number})
        words = {name: str(value) for name, value in options.items()}
        arguments = {"model": str(ARTEFACT), "streams": str(folder), **words}
        serve.run(application(arguments), name="test", route_prefix="/")
        yield number
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(
    port: int, name: str, body: dict[str, Any], failures: list[object] | None = None
) -> tuple[dict[str, Any], str]:
    """The answer, and which replica gave it; asks again while a replica is away, and notes why it had to."""
    until = time.monotonic() + PATIENCE
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            headers = {"x-session-id": name, "content-type": "application/json"}
            connection.request("POST", f"/streams/{name}", json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
        except OSError as error:
            response, content = None, repr(error).encode()
        finally:
            connection.close()
        if response is not None and response.status < 500:
            assert response.status == 200, content
            return json.loads(content), response.headers["x-replica"]
        assert time.monotonic() < until, content
        if failures is not None:
            failures.append((name, content))
        time.sleep(0.2)


def replicas() -> list[int]:
    """The process ids of the replicas that this process has started."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue

    def is_own(process: int) -> bool:
        while process in parents and process != os.getpid():
            process = parents[process]
        return process == os.getpid()

    return [process for process, name in names.items() if "ray::ServeReplica" in name and is_own(process)]


class Clients:
    """Threads that go on with streams until they are told to stop; what they asked, and who answered."""

    def __init__(self, port: int, names: list[str]) -> None:
        self.port, self.failures = port, []  # type: int, list[object]
        self.bodies: Talks = {name: [] for name in names}
        self.answers: Talks = {name: [] for name in names}
        self.replicas: dict[str, list[str]] = {name: [] for name in names}

    def ask(self, name: str, max_tokens: int) -> None:
        turn = len(self.answers[name])
        body = {"tokens": [turn % 20, 3, 5], "max_tokens": max_tokens, "score": True, "seed": turn}
        position = self.answers[name][-1]["position"] if turn else 0
        answer, replica = ask(self.port, name, body | {"position": position}, self.failures)
        self.bodies[name].append(body)
        self.answers[name].append(answer)
        self.replicas[name].append(replica)

    @contextlib.contextmanager
    def asking(self, threads: int, max_tokens: int) -> Iterator[None]:
        """While the block runs, each of so many threads goes on with its own part of the streams."""
        enough, names = threading.Event(), list(self.bodies)

        def talk(own: list[str]) -> None:
            while True:
                for name in own:
                    if enough.is_set():
                        return
                    self.ask(name, max_tokens)

        with ThreadPoolExecutor(threads) as pool:
            talks = [pool.submit(talk, names[first::threads]) for first in range(threads)]
            try:
                yield
            finally:
                enough.set()
            for one in talks:
                one.result()

    def homes(self) -> dict[str, str]:
        """The replica that has given the last answer to each stream."""
        return {name: seen[-1] for name, seen in self.replicas.items() if seen}


def wait_until(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, f"{what}: not within {PATIENCE} seconds"
        time.sleep(0.2)


def in_states() -> dict[str, int]:
    """How many replicas Ray has in each state."""
    from ray import serve

    return dict(serve.status().applications["test"].deployments["streams"].replica_states)


def test_every_stream_goes_on_after_a_replica_was_killed(tmp_path: Path) -> None:
    names = [f"stream-{number}" for number in range(STREAMS)]
    with served(tmp_path / "shared", replicas=2) as port:
        clients = Clients(port, names)
        with clients.asking(threads=8, max_tokens=4):
            wait_until(lambda: all(len(answers) > 1 for answers in clients.answers.values()), "two answers")
            before = {name: set(seen) for name, seen in clients.replicas.items()}
            os.kill(replicas()[0], signal.SIGKILL)
            wait_until(
                lambda: sum(len(set(seen)) > 1 for seen in clients.replicas.values()) > 10,
                "streams that move",
            )
        for name in names:
            clients.ask(name, 4)
    assert all(len(seen) == 1 for seen in before.values())  # each stream stayed with its replica
    assert len(set.union(*before.values())) == 2
    assert clients.answers == alone(clients.bodies, tmp_path / "alone")  # JSON holds every bit of a float


def test_streams_survive_scaling_up_and_down(tmp_path: Path) -> None:
    names = [f"stream-{number}" for number in range(24)]
    options = {"replicas": 1, "most_replicas": 2, "rows": 2, "add_seconds": 1, "remove_seconds": 1}
    with served(tmp_path / "shared", **options) as port:
        clients = Clients(port, names)
        assert in_states() == {"RUNNING": 1}
        with clients.asking(threads=8, max_tokens=200):
            wait_until(lambda: in_states() == {"RUNNING": 2}, "a second replica for 8 requests at once")
            wait_until(lambda: len(set(clients.homes().values())) == 2, "streams on both replicas")
        homes = clients.homes()
        with clients.asking(threads=2, max_tokens=3000):  # one replica is enough, and each is busy
            wait_until(lambda: in_states() == {"RUNNING": 1}, "one replica for 2 requests at once")
        for name in names:
            clients.ask(name, 20)
        (left,) = set(clients.homes().values())
    assert left in homes.values()
    assert set(homes.values()) != {left}  # some streams were on the other one, and came back
    assert clients.failures == []  # a replica that goes answers what it has
    assert clients.answers == alone(clients.bodies, tmp_path / "alone")  # JSON holds every bit of a float


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"replicas": "3", "most_replicas": "2"}, "most_replicas is 2 and replicas, the fewest, is 3; give"),
        ({"replicas": "0"}, "'replicas': expected a whole number of at least 1, found the number 0"),
        ({"most_replicas": "some"}, "'most_replicas': expected a whole number, found the text 'some'"),
        (
            {"remove_seconds": -1},
            "'remove_seconds': expected a whole number of at least 0, found the number -1",
        ),
        ({"max_replicas": "2"}, "unknown key 'max_replicas'; .* known keys are .* most_replicas"),
    ],
)
def test_impossible_numbers_of_replicas_are_refused(
    tmp_path: Path, wrong: dict[str, Any], sentence: str
) -> None:
    from xl_export.serve.ray import application

    with pytest.raises(ConfigError, match=sentence):
        application({"model": str(ARTEFACT), "streams": str(tmp_path / "shared")} | wrong)
    assert not (tmp_path / "shared").exists()
