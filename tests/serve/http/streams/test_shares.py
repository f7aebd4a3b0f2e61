"""What one tenant may have at once, so that others have their share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import LIMITS, Keeping, owned
from tests.serve.http.streams.test_socket import Talk
from tests.serve.http.test_clients import comes_true, connection, head, wait_for
from tests.serve.http.test_status import ANNA, BERT, bearer
from xl_export.serve.core.admission import Quota
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.keys import keys_of
from xl_export.serve.http.base.limits import too_many
from xl_export.serve.streams.index import FullStoreError


@pytest.fixture(scope="module")
def shared(keeping: Keeping, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server for four requests and six WebSockets, of which two tenants may have half."""
    keys = keys_of([f"anna {ANNA}", f"bert {BERT}"], "keys")
    folder = tmp_path_factory.mktemp("shared")
    limits = replace(LIMITS, requests=4, sockets=6)
    with keeping(folder, keys=keys, limits=limits) as server:
        yield server


def test_idle_connections_are_no_requests_and_are_shared(shared: Running) -> None:
    from websockets.exceptions import InvalidStatus

    anna, bert = owned(shared, ANNA), owned(shared, BERT)
    with contextlib.ExitStack() as connections:
        talks = [connections.enter_context(Talk(anna, key=ANNA)) for _ in range(3)]
        with pytest.raises(InvalidStatus) as refused:
            Talk(anna, key=ANNA)
        assert refused.value.response.status_code == 429
        other = connections.enter_context(Talk(bert, key=BERT))
        assert shared.server.sockets.total == 4
        for key in (ANNA, BERT):
            assert shared.post("/v1/completions", {"prompt": "a"}, headers=bearer(key)).status_code == 200
        assert [talk.ask("append", tokens=[1])["event"] for talk in (*talks, other)] == ["end"] * 4
        assert "xl_export_http_websockets_open 4.0" in shared.get("/metrics", headers=bearer(BERT)).text
    assert comes_true(lambda: shared.server.sockets.total == 0)


def test_slow_bodies_of_one_tenant_leave_half_to_others(shared: Running) -> None:
    slow = head(b"{", length=999).replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {ANNA}\r\n\r\n".encode())
    stream = owned(shared, ANNA)
    with contextlib.ExitStack() as connections:
        talk = connections.enter_context(Talk(stream, key=ANNA))
        for _ in range(2):
            connections.enter_context(connection(shared)).sendall(slow)
        assert comes_true(lambda: shared.server.requests.total == 2)
        late = connections.enter_context(connection(shared))
        late.sendall(slow)
        assert b"the tenant has 2 requests" in wait_for(late, b"}}")
        assert talk.ask("append", tokens=[1])["error"]["code"] == "too_many"
        for path in ("/v1/models", "/v1/server"):
            assert shared.get(path, headers=bearer(BERT)).status_code == 200
        assert shared.get("/health").status_code == 200
    assert comes_true(lambda: shared.server.requests.total == 0)


def test_a_tenant_has_half_and_all_together_no_more_than_all() -> None:
    load = Quota(4, refusal=too_many("requests"))
    with contextlib.ExitStack() as held:
        for tenant in ("anna", "anna", "bert", ""):
            if tenant == "bert":
                with pytest.raises(RefusedError, match="the tenant has 2 requests"), load.one("anna"):
                    pass
            held.enter_context(load.one(tenant))
        for tenant in ("bert", ""):
            with pytest.raises(RefusedError, match="the server has 4 requests"), load.one(tenant):
                pass
    load = Quota(2, refusal=FullStoreError)
    with load.one(""), load.one(""):  # a server without keys has one client, who may have all
        assert load.total == 2
    load = Quota(1, refusal=FullStoreError)  # a single place is anybody's
    with load.one("anna"), pytest.raises(FullStoreError, match="1 operations on streams"), load.one("bert"):
        pass
