"""`xl-export serve` as a process, and what it refuses before it serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import Result

from runtimes.base.errors import UserError
from runtimes.contract.spec import BUILD
from tests.commands import refused, xl
from xl_export.serve.core.settings import EngineSettings, Limits
from xl_export.serve.core.state import StreamState
from xl_export.serve.http import serving
from xl_export.serve.http.base import server as opening
from xl_export.serve.http.base.server import Server, Source


def serve(*arguments: object) -> Result:
    """The result of the command, in a thread, because a browser under test keeps a loop in the main one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(xl, "serve", *arguments).result()


CPUS = 5
WANTED = 2 * 4096 + 256  # open files: two for each of the default connections, and the reserve
# With an address of another machine, a command that does not refuse the options ends too.
ELSEWHERE = ["{ring}", "--host", "192.0.2.1", "--api-keys", "{keys}"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{ring}", "--host", "0.0.0.0"], ["no keys were given; give --api-keys"]),
        (["{ring}", "--api-keys", "nowhere"], ["nowhere"]),
        (["{ring}", "{ring}"], ["two models have one name"]),
        (["{ring}", "b={ring}", "--name", "x"], ["NAME=FOLDER"]),
        (["a b={ring}"], ["'a b' is no name that clients can ask for; give NAME=FOLDER"]),
        (["{ring}", "--name", ".."], ["'..' is no name that clients can ask for; give another --name"]),
        (["a/b=c"], ["a/b=c does not exist"]),
        (["{ring}", "--device", "nothing"], ["nothing"]),
        (["{ring}", "--public-key", "nowhere.pem"], ["nowhere.pem", "check the path"]),
        (ELSEWHERE, ["cannot listen at 192.0.2.1"]),
        ([*ELSEWHERE, "--flush-streams"], ["--flush-streams is given without --state"]),
        ([*ELSEWHERE, "--state", "{keys}"], ["is a file; expected a folder for the streams"]),
        ([*ELSEWHERE, "--state", "{ring}"], ["is inside of", "give a --state outside of it"]),
        (["{ring}", "--state", "{damaged}"], ["streams.sqlite cannot be used", "restore a backup"]),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_one_sentence(
    artefacts: dict[str, Path], tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna 0123456789abcdef\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "streams.sqlite").write_bytes(bytes(range(256)) * 32)
    names = {"keys": keys, "damaged": tmp_path / "damaged", **artefacts}
    refused(serve("--port", "0", *(each.format(**names) for each in arguments)), *words)


def test_the_bounds_of_the_command_reach_the_server(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Server] = []
    monkeypatch.setattr(serving, "run", lambda server, address, ready: served.append(server))
    options = ["--waiting-memory", "3", "--stream-disk", "5", "--stream-memory", "7", "--rows", "2"]
    for more in ([], ["--share-cache"]):
        assert serve(artefacts["ring"], *options, *more).exit_code == 0
    stores = served[0]._stream_limits
    assert (stores.owner_bytes, stores.ram_bytes) == (5 << 20, 7 << 20)
    for server, shared in zip(served, (False, True), strict=True):
        (source,) = server.sources.values()
        assert source.settings.state_bytes == 3 << 20
        session, _ = source.open_session()
        engine = source.make_engine(session, lambda batch: None)
        cache = engine.scheduler.cache
        tokens = np.arange(session.rule.segment)
        state = StreamState(memory=session.start(1), logits=None, tail=tokens, furthest=len(tokens))
        keys = cache.keys(tokens, "anna")
        assert cache.wants(keys)
        cache.put(keys[-1], state)
        assert (cache.longest(cache.keys(tokens, "bert")) is state) is shared
        engine.stop(within=0)


def source(path: Path, **options: Any) -> Source:
    return Source(name="m", path=path, settings=EngineSettings(rows=2), **options)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, str]]:
    """The threads and devices of the sessions that are opened, on a machine of five CPUs."""
    given: list[tuple[int | None, str]] = []
    open_session = opening.open_session

    def noted(path: Path, *, threads: int | None, device: Any, public_key: Path | None) -> Any:
        given.append((threads, str(device)))
        return open_session(path, threads=1, device="cpu")

    monkeypatch.setattr(opening, "open_session", noted)
    monkeypatch.setattr(opening, "available_cpus", lambda: CPUS)
    return given


@pytest.mark.parametrize(
    ("short", "small", "cpus", "given", "expected"),
    [
        (True, 1 << 30, CPUS, None, [4]),
        (False, 1 << 30, CPUS, None, [4, 5]),
        (True, 1000, CPUS, None, [5]),  # a large artefact is opened once
        (True, 1 << 30, 1, None, [1]),
        (True, 1 << 30, CPUS, 3, [3]),
    ],
)
def test_short_steps_leave_one_cpu_to_the_event_loop(
    short: bool,
    small: int,
    cpus: int,
    given: int | None,
    expected: list[int],
    artefacts: dict[str, Path],
    opened: list[tuple[int | None, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "has_short_steps", lambda session: short)
    monkeypatch.setattr(opening, "MAX_SHORT_STEP_BYTES", small)
    monkeypatch.setattr(opening, "available_cpus", lambda: cpus)
    assert source(artefacts["ring"], threads=given).open_session()[1] == expected[-1]
    assert [threads for threads, _ in opened] == expected


def test_the_cpu_computes_unless_a_device_is_given_and_an_engine_has_its_own(
    artefacts: dict[str, Path], run: Path, tmp_path: Path, opened: list[tuple[int | None, str]]
) -> None:
    engine = shutil.copytree(artefacts["ring"], tmp_path / "engine")
    (engine / BUILD).write_text("{}")
    for path in (artefacts["ring"], run):
        source(path, threads=1).open_session()
        source(path, threads=1, device="cuda:1").open_session()
    with pytest.raises(UserError):  # it is no real one
        source(engine).open_session()
    assert opened == [(1, "cpu"), (1, "cuda:1"), (1, "cpu"), (1, "cuda:1"), (None, "auto")]


@pytest.mark.parametrize(
    ("soft", "hard", "files", "connections"),
    [
        (1024, 1 << 20, WANTED, 4096),  # it is raised as far as it is needed
        (1 << 20, 1 << 20, WANTED, 4096),  # and never lowered
        (1024, 4096, 4096, 1920),
        (1, 1, 1, 1),
    ],
)
def test_connections_fit_into_the_files_that_may_be_open(
    soft: int, hard: int, files: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    fake = SimpleNamespace(
        RLIMIT_NOFILE=7,
        RLIM_INFINITY=-1,
        getrlimit=lambda which: (soft, hard),
        setrlimit=lambda which, pair: given.append(pair),
    )
    monkeypatch.setattr(serving, "resource", fake)
    limits, found = serving.fitted(Limits())
    assert (found, limits.connections) == (files, connections)
    assert given == ([(files, hard)] if soft < WANTED else [])


def test_a_limit_that_cannot_be_raised_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    fake = SimpleNamespace(
        RLIMIT_NOFILE=7, RLIM_INFINITY=-1, getrlimit=lambda which: (512, 4096), setrlimit=refuse
    )
    monkeypatch.setattr(serving, "resource", fake)
    assert serving.raised(WANTED) == 512
    monkeypatch.setattr(serving, "resource", None)  # no POSIX
    assert serving.fitted(Limits())[0] == Limits()


def test_a_missing_package_names_the_extra(artefacts: dict[str, Path], monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("xl_export.serve.http")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    refused(serve(artefacts["ring"]), "msgspec is not installed", "pip install 'msgspec")


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_serves_and_ends_with_the_signal(
    artefacts: dict[str, Path], tmp_path: Path, name: signal.Signals
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna anna-0123456789abcdef\n")
    command = [sys.executable, "-m", "xl_export", "serve", f"small={artefacts['ring']}", "--port", "0"]
    command += ["--api-keys", str(keys), "--threads", "1"]
    command = ["bash", "-c", 'ulimit -Sn 200 && exec "$@"', "bash", *command]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd()
    ) as server:
        try:
            line = server.stdout.readline()
            said = r"(http://127.0.0.1:\d+)/ serves small until Ctrl-C \(OpenAI's interface: \1/v1\)\n"
            at = re.fullmatch(said, line)
            assert at is not None, line + server.stderr.read()
            url = f"{at[1]}/v1/models"

            def status(key: str) -> int:
                return httpx.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=60).status_code

            assert (status("anna-0123456789abcdef"), status("bert-0123456789abcdef")) == (200, 401)
            limits = json.loads(server.stderr.readline())
            assert (limits["event"], limits["open_files"] > 200) == ("limits", True)
            serves = json.loads(server.stderr.readline())
            assert (serves["event"], serves["model"], serves["threads"]) == ("serves", "small", 1)
            server.send_signal(name)
            assert server.wait(60) == 0
        finally:
            server.kill()
