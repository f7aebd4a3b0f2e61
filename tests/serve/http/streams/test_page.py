"""The page of a server in a real browser."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtimes import Session
from tests.browsers import Page
from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import Keeping, straight
from tests.serve.http.test_clients import comes_true
from xl_export.serve.core.task import Delivery, Drawn
from xl_export.serve.http.base.keys import given_key, keys_of

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


def begun(page: Page, text: str) -> None:
    """Makes a new stream of this text."""
    page.page.click("#new")
    page.until("page.stream.position === 0")
    calm(page)
    appended(page, text)


@contextmanager
def paused(server: Running, *, after: int) -> Iterator[threading.Event]:
    """While the block runs, the engine waits for the event once so many drawn tokens are delivered."""
    engine: Any = server.server.models["tiny"].engine
    deliver, goes_on = engine._deliver, threading.Event()
    drawn = 0

    def slowly(delivery: Delivery) -> None:
        nonlocal drawn
        drawn += sum(type(answer) is Drawn for _, answers in delivery for answer in answers)
        if drawn > after:
            goes_on.wait(60)
        deliver(delivery)

    engine._deliver = slowly
    try:
        yield goes_on
    finally:
        goes_on.set()
        engine._deliver = deliver


def stopped(page: Page, server: Running, goes_on: threading.Event) -> None:
    """Presses Escape while the engine waits, and lets it go on once it has been told."""
    page.page.keyboard.press("Escape")
    engine: Any = server.server.models["tiny"].engine
    assert comes_true(lambda: bool(engine._commands))
    goes_on.set()
    page.until("!page.running")
    calm(page)


def test_the_position_moves_while_tokens_arrive(kept: Running, open_page: Open) -> None:
    page = open_page(kept)
    begun(page, "The cat")
    page.page.fill("#count", "30")
    with paused(kept, after=10) as goes_on:
        page.page.click("#go")
        page.until("page.view.tokens.length === 17")
        assert page.text("state") == "position 17 · 10 of 30 tokens"
        listed = "document.querySelector('#streams [aria-current=true] small').textContent"
        assert page.do(listed) == "17 · memory"
        goes_on.set()
        page.until("!page.running")
    calm(page)
    assert page.text("state").startswith("position 37 ·")
    assert page.do(listed) == "37 · memory"


def test_the_page_says_why_generation_stopped(kept: Running, open_page: Open) -> None:
    page = open_page(kept)
    begun(page, "The cat")
    page.page.fill("#count", "30")
    for position in (37, 67):
        page.page.click("#go")
        page.until(f"page.view.tokens.length === {position} && !page.running")
        calm(page)
        assert page.text("why").startswith("Stopped after 30 tokens")
        assert "Press Continue" in page.text("why")
        assert page.page.is_visible("#why")
    with paused(kept, after=10) as goes_on:
        page.page.click("#go")
        page.until("page.view.tokens.length === 77")
        assert page.page.is_hidden("#why")
        stopped(page, kept, goes_on)
    assert page.text("why").startswith("You stopped it after ")
    appended(page, "The cat")
    assert page.page.is_hidden("#why")


def test_tokens_that_arrive_together_are_shown_together(kept: Running, open_page: Open) -> None:
    """Otherwise a busy browser shows tokens long after the server is done, and Escape stops nothing."""
    page = open_page(kept)
    begun(page, "The cat")
    added = page.do(
        """async () => {
            const token = { tokens: [1], texts: ["a"], bits: [1], appended: 0 };
            const ask = page.client.ask.bind(page.client);
            page.client.ask = async (op, fields, each) => {
              if (op !== "continue") return ask(op, fields, each);
              for (let i = 0; i < 99; i++) each(token);
              return { ...token, finish_reason: "length", stream: { ...page.stream, position: 107 } };
            };
            const added = [];
            const add = page.view.add.bind(page.view);
            page.view.add = (tokens) => { added.push(tokens.length); add(tokens); };
            await page.go();
            return added;
        }"""
    )
    assert added == [99, 1]
    assert len(shown(page)) == 107


def test_the_page_works_without_a_state_folder(keeping: Keeping, open_page: Open) -> None:
    with keeping(None) as server:
        page = open_page(server)
        assert page.error is None
        appended(page, "The cat")
        page.page.fill("#count", "30")
        page.page.click("#go")
        page.until("page.view.tokens.length === 37 && !page.running")
        calm(page)
        page.until("document.getElementById('lasting').textContent.includes('until this server stops')")


@pytest.mark.slow
def test_a_reader_types_watches_forks_and_takes_back(
    kept: Running, session: Session, open_page: Open
) -> None:
    page = open_page(kept)
    begun(page, TEXT)
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
    assert "of 4 rows" in page.do("document.getElementById('rows').ariaLabel")
    assert page.text("rows-text").endswith("queued")
    assert "Streams" in page.text("memory")

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
    begun(page, "The cat")
    page.page.fill("#count", "2000")
    with paused(kept, after=20) as goes_on:  # else a fast engine is done before a busy browser says stop
        page.page.click("#go")
        page.until("page.view.tokens.length === 27")
        stopped(page, kept, goes_on)
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
    begun(page, "The cat")
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
    assert given_key(scope, {}) == key
    assert given_key(scope | {"subprotocols": ["xl-export", "key64._w"]}, {}) == ""


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
@pytest.mark.parametrize(("width", "height"), [(360, 740), (390, 844), (1280, 900)])
def test_screens_hold_everything(
    kept: Running, open_page: Open, scheme: str, width: int, height: int
) -> None:
    for _ in range(12):
        kept.post("/v1/streams", {}).raise_for_status()
    page = open_page(kept, color_scheme=scheme, viewport={"width": width, "height": height})
    page.until("document.getElementById('memory').children.length > 0")
    assert page.do("document.documentElement.scrollWidth") <= width
    column = page.do("[document.querySelector('aside')].map((a) => [a.scrollHeight, a.clientHeight])[0]")
    assert column[0] <= column[1]
    if width > 1000:
        assert page.do("document.documentElement.scrollHeight") <= height
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
