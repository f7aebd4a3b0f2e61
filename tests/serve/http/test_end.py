"""The end of the server: every wait is bounded, and together they fit into the five seconds of the guide."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.coroutines import in_thread
from tests.serve.http.conftest import running, sources
from xl_export.serve.core.engine import Engine
from xl_export.serve.http import serving
from xl_export.serve.http.base.server import Server
from xl_export.serve.streams.store import StreamStore

PROMISED = 5.0


def test_the_waits_of_an_end_fit_into_the_seconds_of_the_guide(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, float] = {}

    def recorded(name: str, call: Any) -> Any:
        def called(self: Any, *, within: float) -> None:
            given[name] = within
            call(self, within=within)

        return called

    with running(sources(("m", artefacts["ring"]))) as server:
        monkeypatch.setattr(Engine, "stop", recorded("engine", Engine.stop))
        monkeypatch.setattr(StreamStore, "close", recorded("store", StreamStore.close))
        server.end()
    assert given["engine"] + given["store"] <= PROMISED  # one after the other, in a thread for each model
    assert serving.END_CHECK_SECONDS + serving.CONNECTION_GRACE_SECONDS <= PROMISED  # meanwhile


def test_an_end_while_models_are_opened_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    began, goes_on = threading.Event(), threading.Event()

    def opened(store: StreamStore) -> None:
        began.set()
        goes_on.wait(60)

    async def ended() -> None:
        source: Any = SimpleNamespace(name="m", open=opened)
        start = asyncio.create_task(Server([source]).start())
        assert await asyncio.to_thread(began.wait, 60)
        assert list(tmp_path.iterdir())
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        goes_on.set()

    in_thread(ended())  # a browser test before it leaves a running event loop
    assert list(tmp_path.iterdir()) == []
