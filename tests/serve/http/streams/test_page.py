"""The page of a server in a real browser."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtimes import Session
from tests.browsers import Page
from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import Keeping, straight
from xl_export.serve.http.app import _key
from xl_export.serve.http.base.keys import keys_of

TEXT = "The first thing that a man"
Open = Callable[..., Page]


@pytest.fixture
def open_page(browsers: Callable[..., Any]) -> Iterator[Open]:
    """`open_page(server, …)` → its page, ready. At the end there must have been no error in it, and no
    request to anywhere else.
    """
    with ExitStack() as stack:
        opened: list[tuple[Page, bool]] = []

        def open_one(server: Running, *, faulty: bool = False, **options: Any) -> Page:
            context = browsers().new_context(**options)
            stack.callback(context.close)
            page = Page(context, f"{server.at}/")
            opened.append((page, faulty))
            page.page.goto(page.address)
            page.until("Boolean(globalThis.page?.stream) || !document.getElementById('error').hidden")
            return page

        yield open_one
        for page, faulty in opened:
            assert page.foreign == []
            assert faulty or page.errors == []


def calm(page: Page) -> None:
    """Waits until what was asked is done."""
    page.do("page.busy")


def shown(page: Page) -> str:
    return str(page.do("document.getElementById('text').textContent"))


def appended(page: Page, text: str) -> None:
    page.page.fill("#typed", text)
    page.page.press("#typed", "Enter")
    page.until("document.getElementById('typed').value === ''")
    calm(page)


@pytest.mark.slow
def test_a_reader_types_watches_forks_and_takes_back(
    kept: Running, session: Session, open_page: Open
) -> None:
    page = open_page(kept)
    appended(page, TEXT)
    assert page.error is None
    ids, bits = page.do("[page.view.tokens.map((t) => t.id), page.view.tokens.map((t) => t.bits)]")
    assert ids == session.vocab.encode(TEXT).tolist()
    assert bits[0] is None
    assert np.abs(np.array(bits[1:]) - straight(session, np.array(ids))).max() <= 1e-3
    page.page.fill("#count", "30")
    page.page.fill("#seed", "3")
    page.page.keyboard.press("Control+Enter")
    page.until(f"page.view.tokens.length === {len(TEXT) + 30} && !page.running")
    calm(page)
    told = shown(page)
    assert told.startswith(TEXT)
    assert len(told) == len(TEXT) + 30
    assert page.do("document.querySelectorAll('#text .typed').length") == len(TEXT)
    assert f"position {len(TEXT) + 30}" in page.text("state")
    assert page.do("[...document.querySelectorAll('#text span')].some((s) => /^s[1-8]/.test(s.className))")

    page.page.click("#fork")
    page.until("document.querySelectorAll('#streams [aria-current=true]').length === 1")
    calm(page)
    fork = page.do("page.stream.id")
    assert shown(page) == told, "the page remembers the text of a stream for its fork"
    page.page.focus("#text")
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        page.page.keyboard.press(key)
    assert "position 53" in page.text("token")
    assert "likeliest" in page.text("token")
    assert page.text("back") == "Take back 3"
    page.page.keyboard.press("Alt+Backspace")
    page.until("page.view.tokens.length === 53")
    calm(page)
    assert kept.get(f"/v1/streams/{fork}").json()["position"] == 53
    appended(page, "xyz")
    assert shown(page) == told[:-3] + "xyz"
    listed = page.do("[...document.querySelectorAll('#streams button')].map((b) => b.textContent)")
    assert len(listed) == len(kept.get("/v1/streams").json()["data"])
    page.until("document.getElementById('rows').children.length === 4")
    assert "of 4 rows" in page.text("rows-text")
    assert "Streams kept" in page.text("memory")

    asked: list[str] = []
    page.page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    page.page.click("#delete")
    calm(page)
    assert "56 tokens" in asked[0]
    assert page.do("page.stream.id") == fork, "the reader said no"
    page.page.once("dialog", lambda dialog: dialog.accept())
    page.page.click("#delete")
    page.until(f"page.stream && page.stream.id !== {fork!r}")
    calm(page)
    assert kept.get(f"/v1/streams/{fork}").status_code == 404
    assert page.error is None


@pytest.mark.slow
def test_the_chosen_stream_is_in_view(kept: Running, open_page: Open) -> None:
    for _ in range(12):
        kept.post("/v1/streams", {"text": TEXT}).raise_for_status()
    page = open_page(kept)
    calm(page)
    hidden = """(() => { const list = document.getElementById('streams').getBoundingClientRect();
        const item = document.querySelector('#streams [aria-current=true]').getBoundingClientRect();
        return Math.max(list.top - item.top, item.bottom - list.bottom); })()"""
    assert page.do("document.querySelector('#streams [aria-current=true] span').textContent") != "Stream 1"
    assert page.do("document.getElementById('streams').scrollTop") > 0
    assert page.do(hidden) < 1
    assert page.do("scrollY") == 0
    hint = "getComputedStyle(document.getElementById('text'), '::before').content"
    assert page.text("earlier").startswith(f"… {len(TEXT)} earlier tokens")
    assert page.do(hint) == "none", "there are tokens, although they are not shown"
    page.page.click("#new")
    page.until("page.stream.position === 0")
    calm(page)
    assert "Nothing yet" in page.do(hint)
    assert page.do(hidden) < 1


@pytest.mark.slow
def test_stop_and_sentences(kept: Running, open_page: Open) -> None:
    page = open_page(kept)
    page.page.click("#new")
    page.until("page.stream.position === 0")
    calm(page)
    appended(page, "The cat")
    page.page.fill("#count", "2000")
    page.page.click("#go")
    page.until("page.view.tokens.length > 20")
    page.page.keyboard.press("Escape")
    page.until("!page.running")
    calm(page)
    count = page.do("page.view.tokens.length")
    assert count < 2007
    assert page.do("page.stream.position") == count
    page.page.fill("#typed", "日")
    page.page.press("#typed", "Enter")
    page.until("!document.getElementById('error').hidden")
    assert "日" in str(page.error)
    assert page.do("document.getElementById('typed').value") == "日", "what was typed is not lost"


@pytest.mark.slow
def test_what_somebody_else_appends_hides_the_tokens_before_and_typing_is_kept(
    kept: Running, open_page: Open
) -> None:
    page = open_page(kept)
    page.page.click("#new")
    page.until("page.stream.position === 0")
    calm(page)
    appended(page, "The cat")
    path = f"/v1/streams/{page.do('page.stream.id')}"
    assert httpx.post(f"{kept.at}{path}/append", json={"text": " is"}).status_code == 200
    appended(page, " a man")
    assert shown(page) == ""
    assert "… 16 earlier tokens" in page.text("earlier")
    appended(page, "The cat")
    assert shown(page) == "The cat"
    assert httpx.post(f"{kept.at}{path}/append", json={"text": " is"}).status_code == 200
    page.page.reload()
    page.until("Boolean(globalThis.page?.stream)")
    calm(page)
    page.do(f"page.inTurn(() => page.open(page.streams.find((each) => '{path}'.endsWith(each.id))))")
    assert shown(page) == "", "these tokens are not the last ones"
    assert "… 26 earlier tokens" in page.text("earlier")
    page.page.fill("#typed", "The man")
    page.page.fill("#count", "500")
    page.page.click("#go")
    page.do("document.getElementById('typed').value += ' is typing'")
    page.until("!page.running && page.view.tokens.length > 500")
    calm(page)
    assert page.do("document.getElementById('typed').value") == " is typing"
    composed = "new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, isComposing: true})"
    page.do(f"document.getElementById('typed').dispatchEvent({composed})")
    calm(page)
    assert page.do("document.getElementById('typed').value") == " is typing"


@pytest.mark.parametrize("key", ["0123456789abcdef/+==", "schlüssel-schlüssel"])
def test_a_subprotocol_may_carry_any_key(key: str) -> None:
    encoded = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    scope = {"type": "websocket", "subprotocols": ["xl-export", f"key64.{encoded}"]}
    assert _key(scope, {}) == key
    assert _key(scope | {"subprotocols": ["xl-export", "key64._w"]}, {}) == ""


@pytest.mark.slow
def test_a_key_is_asked_for(keeping: Keeping, open_page: Open, tmp_path: Path) -> None:
    key = "0123456789abcdef/123+4=="  # a subprotocol may have no "/" and no "="
    with keeping(tmp_path, read_keys=lambda: keys_of([f"anna {key}"], "keys")) as server:
        page = open_page(server, faulty=True)
        assert "no valid API key" in str(page.error)
        page.page.fill("#key", key)
        page.page.keyboard.press("Enter")
        page.until("Boolean(page.stream)")
        calm(page)
        appended(page, "The cat")
        assert page.do("page.stream.position") == 7
        assert page.error is None
        headers = {"authorization": f"Bearer {key}"}
        assert len(httpx.get(f"{server.at}/v1/streams", headers=headers).json()["data"]) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_hold_everything(kept: Running, open_page: Open, scheme: str) -> None:
    page = open_page(kept, color_scheme=scheme, viewport={"width": 360, "height": 740})
    assert page.do("document.documentElement.scrollWidth <= 360")
    unnamed = page.do(
        """[...document.querySelectorAll('button, input, select, textarea')].filter((each) =>
             !each.labels?.length && !each.textContent.trim() && !each.ariaLabel
             && !each.getAttribute('aria-label')).map((each) => each.id)"""
    )
    assert unnamed == []


def test_the_page_needs_no_key_and_has_a_policy(kept: Running) -> None:
    index = kept.get("/")
    assert index.status_code == 200
    assert "default-src 'none'" in index.headers["content-security-policy"]
    for name in ("style.css", "serve.css", "main.js", "tokens.js", "icon.svg"):
        assert kept.get(f"/page/{name}").status_code == 200, name
    for name in ("..%2fpage.py", "index.py", "%2e%2e"):
        assert kept.get(f"/page/{name}").status_code == 404
