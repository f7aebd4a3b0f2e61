"""Pages in headless Chromium. Tests skip, with the reason, where the browser or a package is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browsers import Page
from tests.web.npm import packages
from xl_export.web.serve import serving
from xl_export.web.site import write_site


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The packages of the npm registry that a site needs."""
    return packages()


@contextmanager
def opening(browsers: Callable[..., Any]) -> Iterator[Callable[..., Page]]:
    """`open_one(site, "?model=…")` → the page, ready. At the end there must have been no error in it.

    link: what is behind the `#`; by default an empty text. isolated: whether the server sends the headers for
    threads. flags: of the browser. faulty: whether errors are expected.
    """
    with ExitStack() as stack:
        opened: list[tuple[Page, bool]] = []

        def open_one(
            site: Path,
            query: str = "",
            *,
            link: str = "text=",
            isolated: bool = True,
            flags: tuple[str, ...] = (),
            faulty: bool = False,
            **options: Any,
        ) -> Page:
            server = stack.enter_context(serving(site, port=0, isolated=isolated))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            context = browsers(*flags).new_context(**options)
            stack.callback(context.close)
            page = Page(context, f"http://127.0.0.1:{server.server_port}/")
            opened.append((page, faulty))
            page.page.goto(f"{page.address}{query}#{link}")
            return page.ready()

        yield open_one
        for page, faulty in opened:
            assert page.foreign == []
            assert faulty or page.errors == []


@pytest.fixture
def open_page(browsers: Callable[..., Any]) -> Iterator[Callable[..., Page]]:
    with opening(browsers) as open_one:
        yield open_one


@pytest.fixture(scope="session")
def make_site(node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_site(artefact, …)` → the folder of a site."""

    def make(*artefacts: Path) -> Path:
        folder = tmp_path_factory.mktemp("sites") / "site"
        write_site(artefacts, folder, node_modules=node_modules)
        return folder

    return make
