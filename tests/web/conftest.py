"""Pages in headless Chromium. Tests skip, with the reason, where the browser or a package is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.browsers import Page, opening
from tests.serve.http.streams.conftest import keeping, kept  # noqa: F401 (fixtures)
from tests.web.npm import packages
from xl_export.web import serve
from xl_export.web.site import write_site


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The packages of the npm registry that a site needs."""
    return packages()


class Unisolated(serve._Handler):
    """Leaves out the headers for threads, as most static hosts do."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword not in serve.ISOLATION:
            super().send_header(keyword, value)


@contextmanager
def opening_sites(browsers: Callable[..., Any]) -> Iterator[Callable[..., Page]]:
    """`open_one(site, "?model=…")` → the page of a folder, which is served meanwhile.

    isolated: whether the server sends the headers for threads.
    """
    with ExitStack() as stack:
        open_at = stack.enter_context(opening(browsers))

        def open_one(site: Path, query: str = "", *, isolated: bool = True, **options: Any) -> Page:
            server = stack.enter_context(serve.serving(site, port=0))
            if not isolated:
                server.RequestHandlerClass = partial(Unisolated, directory=str(site))  # type: ignore[assignment]
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return open_at(f"http://127.0.0.1:{server.server_port}/", query, **options)

        yield open_one


@pytest.fixture
def open_page(browsers: Callable[..., Any]) -> Iterator[Callable[..., Page]]:
    with opening_sites(browsers) as open_one:
        yield open_one


@pytest.fixture(scope="session")
def make_site(node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_site(artefact, …)` → the folder of a site. Options are those of `write_site`."""

    def make(*artefacts: Path, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("sites") / "site"
        write_site(artefacts, folder, node_modules=node_modules, **options)
        return folder

    return make
