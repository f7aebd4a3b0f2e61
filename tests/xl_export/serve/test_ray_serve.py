"""Streams on Ray Serve: one of two replicas is killed in the middle of 100 streams."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import runtimes
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.replica import Replica
from xl_export.serve.shared import SharedStreams

ray = pytest.importorskip("ray", reason="ray is not installed; pip install 'xl-export[ray]'")
ARTEFACT = Path(__file__).parents[2] / "data" / "version-0.1" / "ring"
STREAMS, REQUESTS = 100, 6
PATIENCE = 120  # seconds that a client asks again
# Ray leaves sockets to the end of the process, and is warned of its own habits by its libraries.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def requests_of(name: str) -> list[dict[str, Any]]:
    chance = random.Random(name)
    made = []
    for _ in range(REQUESTS):
        tokens = [chance.randint(0, 20) for _ in range(chance.randint(1, 9))]
        made.append({"tokens": tokens, "max_tokens": chance.randint(1, 4), "score": True, "seed": 7})
    return made


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All answers to each stream, of one engine that nobody stops."""
    session = runtimes.open_session(ARTEFACT, threads=1, device="cpu")
    folder = str(tmp_path_factory.mktemp("alone"))
    SharedStreams.prepare(folder)
    streams = SharedStreams(folder, session)
    replica = Replica(session, streams, settings=EngineSettings(rows=8), ram_bytes=1 << 28)

    async def talk(name: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for body in requests_of(name):
            position = answers[-1]["position"] if answers else 0
            answers.append(await replica.answer(name, body | {"position": position}))
        return answers

    async def all_of_them() -> dict[str, list[dict[str, Any]]]:
        names = [f"stream-{number}" for number in range(STREAMS)]
        return dict(zip(names, await asyncio.gather(*map(talk, names)), strict=True))

    answers = asyncio.run(all_of_them())
    replica.stop()
    return answers


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Where two replicas of the artefact are served."""
    from ray import serve

    from xl_export.serve.ray import application

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": number})
        arguments = {"model": str(ARTEFACT), "streams": str(tmp_path / "shared"), "replicas": "2"}
        serve.run(application(arguments), name="test", route_prefix="/")
        yield number
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(port: int, name: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer, and which replica gave it; asks again while a replica is away."""
    until = time.monotonic() + PATIENCE
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            headers = {"x-session-id": name, "content-type": "application/json"}
            connection.request("POST", f"/streams/{name}", json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
        except OSError:
            response = None
        finally:
            connection.close()
        if response is not None and response.status < 500:
            assert response.status == 200, content
            return json.loads(content), response.headers["x-replica"]
        assert time.monotonic() < until, content
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


def test_every_stream_goes_on_after_a_replica_was_killed(
    port: int, expected: dict[str, list[dict[str, Any]]]
) -> None:
    served: dict[str, list[str]] = {name: [] for name in expected}
    half_done = threading.Barrier(9)

    def talk(names: list[str]) -> None:
        for turn in range(REQUESTS):
            if turn == REQUESTS // 2:
                half_done.wait(PATIENCE)  # and go on while the replica dies
            for name in names:
                position = expected[name][turn - 1]["position"] if turn else 0
                answer, replica = ask(port, name, requests_of(name)[turn] | {"position": position})
                assert answer == expected[name][turn]  # JSON holds every bit of a float
                served[name].append(replica)

    with ThreadPoolExecutor(8) as pool:
        names = list(expected)
        talks = [pool.submit(talk, names[first::8]) for first in range(8)]
        half_done.wait(PATIENCE * 2)
        before = {name: set(seen) for name, seen in served.items()}
        victim = replicas()[0]
        time.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        for one in talks:
            one.result()
    assert all(len(seen) == 1 for seen in before.values())  # each stream stayed with its replica
    assert len(set.union(*before.values())) == 2
    moved = [name for name, seen in served.items() if len(set(seen)) > 1]
    assert len(moved) > 10
