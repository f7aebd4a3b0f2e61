"""The limit of open files, and the connections that fit into it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from xl_export.serve.http import serving
from xl_export.serve.http.base.limits import Limits

WANTED = 2 * 4096 + 256  # two for each of the default connections, and the reserve


@pytest.mark.parametrize(
    ("soft", "hard", "files", "connections", "sockets"),
    [
        (1024, 1 << 20, WANTED, 4096, 2048),  # it is raised as far as it is needed
        (1 << 20, 1 << 20, WANTED, 4096, 2048),  # and never lowered
        (1024, 4096, 4096, 1920, 960),
        (1, 1, 1, 1, 1),
    ],
)
def test_connections_fit_into_the_files_that_may_be_open(
    soft: int, hard: int, files: int, connections: int, sockets: int, monkeypatch: pytest.MonkeyPatch
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
    assert (found, limits.connections, limits.sockets) == (files, connections, sockets)
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
