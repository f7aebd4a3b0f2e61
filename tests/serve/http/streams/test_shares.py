"""What one tenant may have at once, so that others have their share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import LIMITS, Keeping, owned
from tests.serve.http.test_clients import comes_true, connection, head, wait_for
from tests.serve.http.test_status import ANNA, BERT, bearer
from xl_export.serve.core.admission import Quota
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.keys import keys_of
from xl_export.serve.http.base.limits import too_many_requests
from xl_export.serve.streams.index import FullStoreError


@pytest.fixture(scope="module")
def shared(keeping: Keeping, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server for four requests, of which a tenant may have half."""
    keys = keys_of([f"anna {ANNA}", f"bert {BERT}"], "keys")
    folder = tmp_path_factory.mktemp("shared")
    limits = replace(LIMITS, requests=4)
    with keeping(folder, keys=keys, limits=limits) as server:
        yield server


def test_slow_bodies_of_one_tenant_leave_half_to_others(shared: Running) -> None:
    slow = head(b"{", length=999).replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {ANNA}\r\n\r\n".encode())
    stream = owned(shared, ANNA)
    with contextlib.ExitStack() as connections:
        for _ in range(2):
            connections.enter_context(connection(shared)).sendall(slow)
        assert comes_true(lambda: shared.server.requests.total == 2)
        late = connections.enter_context(connection(shared))
        late.sendall(slow)
        assert b"the tenant has 2 requests" in wait_for(late, b"}}")
        answer = shared.post(f"{stream.path}/append", {"tokens": [1]}, headers=bearer(ANNA))
        assert answer.json()["error"]["code"] == "too_many"
        for path in ("/v1/models", "/v1/server"):
            assert shared.get(path, headers=bearer(BERT)).status_code == 200
        assert shared.get("/health").status_code == 200
    assert comes_true(lambda: shared.server.requests.total == 0)


def test_a_tenant_has_half_and_all_together_no_more_than_all() -> None:
    load = Quota(4, refusal=too_many_requests)
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
