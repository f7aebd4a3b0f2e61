"""The bytes of bodies: those that come to nothing, and those of many requests together."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest

from tests.serve.http.conftest import Running, running, sources
from tests.serve.http.test_clients import SHORT, comes_true, connection, head, is_idle, wait_for
from xl_export.serve.core.admission import Quota
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.limits import SMALL_BODY, BodyAccount, Limits

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("leaves", [True, False])
def test_a_body_that_comes_to_nothing_leaves_no_memory(artefacts: dict[str, Path], leaves: bool) -> None:
    """Not even until the garbage collector comes by, which may take long in a server that does little."""
    part = b"a" * (1 << 20)
    limits = Limits(body_bytes=1 << 21)

    def crowd(server: Running) -> None:
        clients = [connection(server) for _ in range(4)]
        for client in clients:
            if leaves:
                client.sendall(head(part, length=len(part) + 1))
            else:  # too large by one byte: what is left unread would reset the answer
                client.sendall(CHUNKED + 2 * (b"%x\r\n%s\r\n" % (len(part), part)) + b"1\r\na\r\n")
        if leaves:  # in the middle of its body, which is there
            assert comes_true(lambda: server.server.bodies.total == len(clients) * (len(part) - SMALL_BODY))
        for client in clients:
            if not leaves:
                assert wait_for(client, b"\r\n\r\n").split()[1] == b"413"
            client.close()
        assert comes_true(lambda: is_idle(server) and server.server.bodies.total == 0)

    with running(sources(("m", artefacts["ring"])), limits=limits) as server:
        crowd(server)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(5):
                crowd(server)
            # Less than a chunk of each body; a thread may hold the last one a moment longer.
            assert comes_true(lambda: tracemalloc.get_traced_memory()[0] < 20 * 30_000)
        finally:
            tracemalloc.stop()
            gc.enable()


def test_the_first_bytes_are_free_and_refusals_change_nothing() -> None:
    bodies = Quota(100)
    one, other = BodyAccount(bodies, ""), BodyAccount(bodies, "")
    counted = []
    for count in (SMALL_BODY - 10, 15, 20, -30, -5):
        one.change(count)
        counted.append(bodies.total)
    assert counted == [0, 5, 25, 0, 0]
    one.change(110)  # to 100 beyond the free ones
    other.change(SMALL_BODY)
    for _ in range(2):
        with pytest.raises(RefusedError):
            other.change(1)
    one.close()
    other.change(1)
    other.close()
    assert bodies.total == 0


def test_large_bodies_have_a_common_limit_and_small_ones_none(artefacts: dict[str, Path]) -> None:
    limits = Limits(body_bytes=1 << 20, bodies_bytes=3 << 20, body_seconds=60)
    with running(sources(("m", artefacts["ring"])), limits=limits) as server:
        waiting = [connection(server) for _ in range(3)]
        for client in waiting:
            client.sendall(head(b" " * 1_000_000, length=1_000_100))
        assert comes_true(lambda: server.server.bodies.total == 3 * (1_000_000 - SMALL_BODY))
        with connection(server) as client:
            client.sendall(head(b" " * 500_000, length=500_100))
            answer = wait_for(client, b"them has ended, or send less at once.")
            assert b"429" in answer.partition(b"\r\n")[0]
            assert b"retry-after: 1" in answer.lower()
        assert server.post("/v1/completions", SHORT).status_code == 200
        for client in waiting:
            client.close()
        assert comes_true(lambda: server.server.bodies.total == 0)
        body = {**SHORT, "user": "u" * 500_000}
        assert server.post("/v1/completions", body).status_code == 200
        assert comes_true(lambda: server.server.bodies.total == 0)
