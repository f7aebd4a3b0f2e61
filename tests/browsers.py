"""Browsers that are installed, and a page in one. Tests skip, with the reason, where one is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# What a browser needs in a container, and that it asks nobody for anything by itself.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
    "--js-flags=--liftoff-only",  # a second compiler of WebAssembly pays only in pages that are open for long
)
FIREFOX = "firefox"  # in place of flags of Chromium
SWIFTSHADER = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def executable() -> str:
    given = os.environ.get("CHROMIUM")
    found = next(filter(None, [given, *map(shutil.which, NAMES)]), None)
    if found is None:
        pytest.skip("there is no Chromium; install Debian's package chromium, or name one in CHROMIUM")
    return found


class Page:
    """A page of a site, with everything that must not happen to it: errors, and requests to other hosts."""

    def __init__(self, context: Any, address: str) -> None:
        self.address = address
        self.errors: list[str] = []
        self.foreign: list[str] = []
        context.on("request", self._requested)
        context.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        self.page = context.new_page()

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.address, "blob:", "data:")):
            self.foreign.append(request.url)

    def do(self, expression: str, *given: Any) -> Any:
        """The value of an expression of JavaScript; `given` is its argument where it is a function."""
        return self.page.evaluate(expression, *given)

    def until(self, expression: str, *, seconds: float = 200) -> None:
        """Waits until an expression is true. The policy of the page forbids playwright's own way."""
        waiting = f"""(async () => {{
          const end = performance.now() + {1000 * seconds};
          while (!({expression})) {{
            if (performance.now() > end) return false;
            await new Promise((resolve) => setTimeout(resolve, 5));
          }}
          return true;
        }})()"""
        if not self.do(waiting):
            raise TimeoutError(f"{expression} was not true in time; errors: {self.errors}")

    def ready(self) -> Page:
        """Waits until the page shows its text or music, or an error, and opens its settings."""
        self.until("Boolean(globalThis.page?.ready) || !document.getElementById('error').hidden")
        self.do("(document.getElementById('settings') ?? {}).open = true")  # the example of a policy has none
        return self

    def leave(self) -> None:
        """Goes to an empty page. A request that is under way fails then, which no reader sees."""
        known = len(self.errors)
        self.page.goto("about:blank")
        del self.errors[known:]

    @property
    def error(self) -> str | None:
        return self.do(
            "document.getElementById('error').hidden ? null : document.getElementById('error').textContent"
        )

    def text(self, identifier: str) -> str:
        return str(self.do("(id) => document.getElementById(id).textContent", identifier))

    def calm(self) -> None:
        """Waits until nothing is computed."""
        self.until("!page.work.typing && !page.work.running")
        self.do("page.work.stream?.turn")

    def write(self, text: str) -> None:
        """Makes the text of the text area another one, as by pasting, and waits until it is computed."""
        self.page.fill("#text", text)
        self.calm()


@contextmanager
def opening(browsers: Callable[..., Any]) -> Iterator[Callable[..., Page]]:
    """`open_one(address, …)` → the page there, ready. At the end there must have been no error in it, and no
    request to anywhere else.

    query, link: what follows the address, and what is behind the `#`; by default an empty text. flags: of the
    browser. faulty: whether errors are expected.
    """
    with ExitStack() as stack:
        opened: list[tuple[Page, bool]] = []

        def open_one(
            address: str,
            query: str = "",
            *,
            link: str = "text=",
            flags: tuple[str, ...] = (),
            faulty: bool = False,
            **options: Any,
        ) -> Page:
            context = browsers(*flags).new_context(**options)
            stack.callback(context.close)
            page = Page(context, address)
            opened.append((page, faulty))
            page.page.goto(f"{address}{query}#{link}")
            return page.ready()

        yield open_one
        for page, faulty in opened:
            assert not page.foreign, page.foreign
            assert faulty or not page.errors, page.errors


def start_firefox(playwright: Any) -> Any:
    """Debian's Firefox, which playwright drives by the standard protocol WebDriver BiDi."""
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if program is None:
        pytest.skip("there is no Firefox; install Debian's package firefox-esr")
    browser = playwright.firefox.launch(channel="moz-firefox", executable_path=program)
    try:
        browser.new_context().new_page().close()
    except Exception as error:
        pytest.skip(f"this playwright does not drive {browser.version} of Firefox: {error}")
    return browser


@pytest.fixture(scope="session")
def browsers(playwright: Any, executable: str) -> Iterator[Callable[..., Any]]:
    """`browsers(*flags)` → Chromium, started once for each set of flags; `browsers(FIREFOX)` → Firefox."""
    started: dict[tuple[str, ...], Any] = {}

    def browser(*flags: str) -> Any:
        if flags not in started:
            started[flags] = (
                start_firefox(playwright)
                if flags == (FIREFOX,)
                else playwright.chromium.launch(executable_path=executable, args=[*FLAGS, *flags])
            )
        return started[flags]

    yield browser
    for each in started.values():
        each.close()
