"""The page of a server in a real browser: the page of `xl-export web`, with the server as its back end."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Session
from tests.browsers import Page, opening
from tests.serve.http.conftest import HTTP, Running, running, sources
from tests.serve.http.streams.conftest import Keeping, straight
from tests.serve.http.test_clients import comes_true
from xl_export.serve.core.task import Delivery, Drawn
from xl_export.serve.http.base.keys import given_key, keys_of

TEXT = "The first thing that a man"
ROOT = Path(__file__).parents[4]
LISTED = "[...document.querySelectorAll('#streams button')].map((each) => each.textContent)"
Open = Callable[..., Page]


@pytest.fixture
def open_page(browsers: Callable[..., Any]) -> Iterator[Open]:
    """`open_page(server, …)` → its page."""
    with opening(browsers) as open_at:
        yield lambda server, **options: open_at(f"{server.at}/", **options)


@pytest.fixture(scope="module")
def opened(kept: Running, browsers: Callable[..., Any]) -> Iterator[Page]:
    """A page of the server that some tests share. Its server refuses some of what it sends."""
    with opening(browsers) as open_at:
        yield open_at(f"{kept.at}/", faulty=True)


@pytest.fixture
def page(opened: Page) -> Page:
    """The shared page with a new stream."""
    opened.page.click("#new")
    opened.until("page.work.stream.position === 0 && !page.work.running")
    return opened


def position(server: Running, page: Page) -> int:
    """Where the server says that the shown stream is."""
    return int(server.get(f"/v1/streams/{page.do('page.work.stream.handle.id')}").json()["position"])


def continued(page: Page, count: int) -> None:
    """Presses Continue, and waits for so many tokens."""
    page.page.fill("#count", str(count))
    end = page.do("page.work.stream.ids.length") + count
    page.page.click("#go")
    page.until(f"page.work.stream.ids.length === {end} && !page.work.running")
    page.calm()


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
    page.until("!page.work.running")
    page.calm()


def test_the_position_moves_while_tokens_arrive(kept: Running, page: Page) -> None:
    page.write("The cat")
    page.page.fill("#count", "30")
    listed = "document.querySelector('#streams [aria-current=true] small').textContent"
    with paused(kept, after=10) as goes_on:
        page.page.click("#go")
        page.until("page.work.stream.ids.length === 17")
        page.until("document.getElementById('state').textContent === 'position 17'")
        assert page.do(listed) == "17"
        goes_on.set()
        page.until("!page.work.running")
    assert page.text("state").startswith("position 37 · seed ")
    assert page.do(listed) == "37"
    assert position(kept, page) == 37


def test_the_page_says_why_generation_stopped(kept: Running, page: Page) -> None:
    page.write("The cat")
    continued(page, 30)
    assert page.text("why").startswith("Stopped after 30 tokens")
    assert page.page.is_visible("#why")
    with paused(kept, after=10) as goes_on:
        page.page.click("#go")
        page.until("page.work.stream.ids.length === 47")
        assert page.page.is_hidden("#why")
        stopped(page, kept, goes_on)
    assert page.text("why").startswith("You stopped it after ")
    assert position(kept, page) == page.do("page.work.stream.ids.length") < 67
    page.write("The cat")
    assert page.page.is_hidden("#why")


def test_a_link_gives_the_same_text_without_a_state_folder(
    page: Page, keeping: Keeping, open_page: Open
) -> None:
    page.write("The cat")
    page.page.fill("#seed", "5")
    continued(page, 40)
    link = page.do("page.work.link()")
    with keeping(None) as server:
        again = open_page(server, link=link[1:])
        assert again.do("page.work.stream.text") == page.do("page.work.stream.text")
        again.until("document.getElementById('streams-note').textContent.includes('until this server stops')")
        again.until("document.getElementById('status').textContent.startsWith('0 generating, 0 reading, 0 ')")
        again.page.goto("about:blank")


def test_a_stream_that_nobody_typed_in_or_renamed_is_deleted(kept: Running, open_page: Open) -> None:
    named, other = (open_page(kept, link=link) for link in ("text=The cat&tokens=5&seed=1", ""))
    assert other.do("page.work.stream.ids.length") > 100
    ids = [page.do("page.work.stream.handle.id") for page in (named, other)]
    named.page.once("dialog", lambda dialog: dialog.accept("Mine"))
    named.page.click("#rename")
    named.until("page.work.stream.name === 'Mine'")
    named.page.goto("about:blank")
    other.page.goto("about:blank")
    assert comes_true(lambda: kept.get(f"/v1/streams/{ids[1]}").status_code == 404)
    assert kept.get(f"/v1/streams/{ids[0]}").status_code == 200


@pytest.mark.slow
def test_a_reader_types_watches_forks_and_takes_back(
    kept: Running, session: Session, open_page: Open
) -> None:
    page = open_page(kept)
    page.write(TEXT)
    ids, bits = page.do("[page.work.stream.ids, page.work.stream.bits.map((b) => isNaN(b) ? null : b)]")
    assert ids == session.vocab.encode(TEXT).tolist()
    assert bits[0] is None
    assert np.abs(np.array(bits[1:]) - straight(session, np.array(ids))).max() <= 1e-3
    page.page.fill("#seed", "3")
    continued(page, 30)
    told = page.page.input_value("#text")
    assert told.startswith(TEXT)
    assert len(told) == len(TEXT) + 30

    page.page.click("#fork")
    page.until("page.work.stream.parent.endsWith(' at 56')")
    fork = page.do("page.work.stream.handle.id")
    assert page.page.input_value("#text") == told, "the page remembers the text of a stream for its fork"
    page.page.focus("#text")
    page.page.keyboard.press("Control+End")
    page.until("document.getElementById('token').textContent.includes('position 55')")
    assert "likeliest" in page.text("token")
    for _ in range(3):
        page.page.keyboard.press("Backspace")
    page.until("page.work.stream.position === 53")
    page.calm()
    assert kept.get(f"/v1/streams/{fork}").json()["position"] == 53
    page.page.keyboard.type("xyz")
    page.until("page.work.stream.text.endsWith('xyz')")
    page.calm()
    assert page.page.input_value("#text") == told[:-3] + "xyz"
    assert page.do("page.work.stream.handle.id") == fork, "the last tokens were taken back"
    page.write("Another beginning")
    assert position(kept, page) == len("Another beginning")
    assert len(page.do(LISTED)) == 2
    last = page.do("page.work.stream.handle.id")
    asked: list[str] = []
    page.page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    page.page.click("#delete")
    page.until("!document.getElementById('delete').disabled")
    assert "17 tokens" in asked[0]
    assert page.do("page.work.stream.handle.id") == last, "the reader said no"
    page.page.once("dialog", lambda dialog: dialog.accept())
    page.page.click("#delete")
    page.until(f"page.work.stream.handle.id !== {last!r}")
    assert kept.get(f"/v1/streams/{last}").status_code == 404
    assert page.error is None


def test_a_reload_shows_the_text_of_this_tab(kept: Running, open_page: Open) -> None:
    for _ in range(12):
        kept.post("/v1/streams", {"text": TEXT}).raise_for_status()
    page = open_page(kept)
    page.write("The cat is")
    page.page.goto("about:blank")
    page.page.goto(page.address)
    page.ready()
    assert page.page.input_value("#text") == "The cat is"
    hidden = """(() => { const list = document.getElementById('streams').getBoundingClientRect();
        const item = document.querySelector('#streams [aria-current=true]').getBoundingClientRect();
        return Math.max(list.top - item.top, item.bottom - list.bottom); })()"""
    assert page.do("document.getElementById('streams').scrollTop") > 0
    assert page.do(hidden) < 1
    page.page.click("#streams li:first-child button")
    page.until("page.work.stream.ids.length === 0")
    assert "earlier tokens are no longer shown" in page.text("earlier")
    page.write("The man")
    assert page.text("state").startswith("position ")


def test_stop_and_sentences(kept: Running, page: Page) -> None:
    page.write("The cat")
    page.page.fill("#count", "2000")
    with paused(kept, after=20) as goes_on:  # else a fast engine is done before a busy browser says stop
        page.page.click("#go")
        page.until("page.work.stream.ids.length >= 27")
        stopped(page, kept, goes_on)
    count = page.do("page.work.stream.ids.length")
    assert count < 2007
    assert position(kept, page) == count
    page.page.fill("#text", "日")
    page.until("!document.getElementById('error').hidden")
    assert "日" in str(page.error)
    assert page.page.input_value("#text") == "日", "what was typed is not lost"


def test_what_another_client_appends_is_not_taken_back(kept: Running, page: Page) -> None:
    page.write("The cat")
    path = f"/v1/streams/{page.do('page.work.stream.handle.id')}"
    assert HTTP.post(f"{kept.at}{path}/append", json={"text": " is"}).status_code == 200
    page.page.fill("#text", "The cat sat")
    page.until("!document.getElementById('error').hidden")
    assert "another client has changed this stream" in str(page.error).lower()
    assert "… 10 earlier tokens" in page.text("earlier")
    page.write(" here")
    assert kept.get(path).json()["position"] == 15


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
        page.page.fill("#api-key", key)
        with page.page.expect_navigation():
            page.page.keyboard.press("Enter")
        page.ready()
        page.write("The cat")
        assert page.do("page.work.stream.handle.position") == 7
        assert page.error is None
        headers = {"authorization": f"Bearer {key}"}
        assert len(HTTP.get(f"{server.at}/v1/streams", headers=headers).json()["data"]) == 1


@pytest.mark.slow
def test_music_has_a_piano_roll(open_page: Open) -> None:
    opened = sources(("chorales", ROOT / "examples" / "music" / "chorales"))
    with running(opened) as server:
        page = open_page(server, link="seed=3")
        assert page.page.is_visible("#roll")
        assert page.page.is_hidden("#text")
        assert page.do("page.work.roll.notes.length") > 12
        found = page.do("document.getElementById('tokens').textContent")
        again = open_page(server, link=page.do("page.work.link()")[1:])
        assert again.do("document.getElementById('tokens').textContent") == found
        page.page.click("#play")
        page.until("page.work.organ?.now > 0.5")
        page.page.keyboard.press("Escape")
        page.until("page.work.organ.context.state === 'suspended'")


def test_screens_of_every_size_hold_everything(kept: Running, opened: Page) -> None:
    for _ in range(12):
        kept.post("/v1/streams", {"text": TEXT}).raise_for_status()
    page = opened
    page.page.reload()
    page.ready().until("document.getElementById('status').textContent !== ''")
    for width, height, scheme in ((360, 740, "dark"), (390, 844, "light"), (1280, 900, "light")):
        page.page.set_viewport_size({"width": width, "height": height})
        page.page.emulate_media(color_scheme=scheme)
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
    assert 'data-back-end="server"' in index.text
    assert "default-src 'none'" in index.headers["content-security-policy"]
    for name in ("style.css", "main.js", "backend-server.js", "icon.svg"):
        assert kept.get(f"/page/{name}").status_code == 200, name
    for name in ("..%2fpage.py", "index.py", "%2e%2e"):
        assert kept.get(f"/page/{name}").status_code == 404
