"""The page in a browser with both of its back ends, a model in a worker and a server: what a reader does."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest

import runtimes
from tests.browsers import Page, opening
from tests.serve.http.conftest import HTTP, Running, running, sources
from tests.serve.http.streams.conftest import Keeping
from tests.serve.http.test_clients import comes_true
from tests.web.conftest import opening_sites
from xl_export.serve.core.task import Delivery, TokenOut
from xl_export.serve.http.base.keys import keys_of

PROMPT = "The first thing that a man"
LINKED = {"text": PROMPT, "tokens": 40, "temperature": 2, "top_p": 0.72, "top_k": 0, "seed": 5}
ROOT = Path(__file__).parents[2]
LISTED = "[...document.querySelectorAll('#streams button')].map((each) => each.textContent)"
Open = Callable[..., Page]
Place = Callable[[], AbstractContextManager[Open]]

worker_only = pytest.mark.parametrize("place", ["worker"], indirect=True)
server_only = pytest.mark.parametrize("place", ["server"], indirect=True)


@pytest.fixture(scope="module")
def site(make_site: Callable[..., Path], artefacts: dict[str, Path]) -> Path:
    return make_site(artefacts["ring"])


@pytest.fixture(scope="module", params=["worker", "server"])
def place(request: pytest.FixtureRequest, browsers: Callable[..., Any]) -> Place:
    """`with place() as open_page`: then `open_page(link=…)` → a page of a model of characters."""

    @contextmanager
    def worker() -> Iterator[Open]:
        with opening_sites(browsers) as open_one:
            yield partial(open_one, request.getfixturevalue("site"), "?threads=2")

    @contextmanager
    def server() -> Iterator[Open]:
        with opening(browsers) as open_at:
            yield partial(open_at, f"{request.getfixturevalue('kept').at}/")

    return {"worker": worker, "server": server}[request.param]


@pytest.fixture(scope="module")
def opened(place: Place) -> Iterator[Page]:
    """A page that tests share. With a worker it shows first what a visitor finds; a server refuses some of
    what the tests send.
    """
    with place() as open_page:
        yield open_page(link="") if place.__name__ == "worker" else open_page(faulty=True)


@pytest.fixture
def page(opened: Page) -> Page:
    """The shared page with a new stream."""
    opened.page.click("#new")
    opened.until("page.work.stream.position === 0 && !page.work.running")
    return opened


@pytest.fixture
def open_page(place: Place) -> Iterator[Open]:
    """Pages of the test's own."""
    with place() as open_page:
        yield open_page


def surprisals(artefact: Path, ids: list[int]) -> list[float]:
    """Bits of each token but the first, computed by Python."""
    session = runtimes.open_session(artefact, threads=1, device="cpu")
    memory, bits = session.start(1), []
    for at in range(0, len(ids), session.rule.segment):
        logits, memory = session.step(np.array([ids[at : at + session.rule.segment]]), memory)
        for row, token in zip(logits[0].astype(np.float64), ids[at + 1 :], strict=False):
            top = row.max()
            bits.append(float((top + np.log(np.exp(row - top).sum()) - row[token]) / math.log(2)))
    return bits[: len(ids) - 1]


def greedy(artefact: Path, prompt: Any, count: int) -> list[int]:
    session = runtimes.open_session(artefact, threads=1, device="cpu")
    pieces = runtimes.generate(
        session, prompt, max_tokens=count, sampler=runtimes.Sampler(temperature=0), text=False
    )
    return [piece.token for piece in pieces]


def same_bits(page: Any, artefact: Path) -> None:
    """The surprisals of the page are those of Python, within a thousandth of a bit."""
    ids, bits = page.do(
        "[page.work.stream.ids, page.work.stream.bits.map((b) => Number.isNaN(b) ? null : b)]"
    )
    assert bits[0] is None
    assert np.abs(np.array(bits[1:]) - surprisals(artefact, ids)).max() <= 1e-3


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
    """While the block runs, the engine waits for the event after the delivery of so many drawn tokens, or of
    a few more: tokens of short steps are delivered together.
    """
    engine: Any = server.server.models["tiny"].engine
    deliver, goes_on = engine._deliver, threading.Event()
    drawn = 0

    def slowly(delivery: Delivery) -> None:
        nonlocal drawn
        deliver(delivery)
        drawn += sum(type(answer) is TokenOut for _, answers in delivery for answer in answers)
        if drawn >= after:
            goes_on.wait(60)

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


def types_and_takes_back(page: Page, artefact: Path) -> None:
    page.write(PROMPT)
    ids = page.do("page.work.stream.ids")
    assert ids == runtimes.open_session(artefact).vocab.encode(PROMPT).tolist()
    assert page.do("page.work.stream.fed") == len(PROMPT)
    page.page.focus("#text")
    page.page.keyboard.press("Control+End")
    page.page.keyboard.type(" who")
    page.until("page.work.stream.text.endsWith('who')")
    page.calm()
    assert page.do("page.work.stream.fed") == len(PROMPT) + 4, (
        "typing at the end computes what was added alone"
    )
    same_bits(page, artefact)

    before = page.do("page.work.stream.fed")
    for _ in range(3):
        page.page.keyboard.press("Control+End")
        page.page.keyboard.press("Backspace")
    page.page.keyboard.type("xyz")
    page.until("page.work.stream.text.endsWith('xyz')")
    page.calm()
    assert page.do("page.work.stream.fed") - before <= 12, (
        "a few letters are taken back, and nothing else is computed"
    )
    same_bits(page, artefact)
    assert page.do("page.work.stream.handle.position") == page.do("page.work.stream.position")
    page.write(f"{PROMPT} who")
    same_bits(page, artefact)


def a_reader_types_and_the_model_goes_on(page: Page, artefact: Path) -> None:
    assert page.error is None
    assert page.do("crossOriginIsolated")
    assert page.do("page.model.facts.threads") == 2
    assert page.do("page.model.facts.memory") == "in place"
    page.page.click("#check")
    said = "document.getElementById('check-result').textContent"
    page.until(f"{said}.startsWith('This device computes correctly')")
    types_and_takes_back(page, artefact)
    page.do("document.getElementById('temperature').value = 0")
    page.page.fill("#count", "100000")
    page.page.focus("#text")
    page.page.keyboard.press("Control+Enter")
    page.until("page.work.stream.ids.length > 120")
    page.page.keyboard.press("Escape")
    page.calm()
    ids = page.do("page.work.stream.ids")
    assert ids[len(PROMPT) + 4 :][:50] == greedy(artefact, f"{PROMPT} who", 50)
    same_bits(page, artefact)
    assert page.do("document.getElementById('text').value === page.work.stream.text")
    shown = page.do(
        "[...document.querySelectorAll('#colours span')].map((span) => span.textContent).join('')"
    )
    assert shown == page.do("page.work.stream.text")
    assert page.do("page.work.stream.handle.position") == len(ids) == page.do("page.work.stream.position")
    assert page.text("state") == f"{len(ids):,} tokens"
    assert page.text("why").startswith("You stopped it after ")


@server_only  # the next test does it with a worker
def test_a_reader_types_and_takes_back(page: Page, artefacts: dict[str, Path]) -> None:
    types_and_takes_back(page, artefacts["ring"])


@worker_only
def test_a_reader_types_and_the_model_goes_on(page: Page, artefacts: dict[str, Path]) -> None:
    a_reader_types_and_the_model_goes_on(page, artefacts["ring"])


def drawn(artefact: Path) -> str:
    """What Python writes after the prompt with `LINKED`."""
    session = runtimes.open_session(artefact, threads=1, device="cpu")
    sampler = runtimes.Sampler(temperature=LINKED["temperature"], top_p=LINKED["top_p"])
    pieces = runtimes.generate(session, PROMPT, max_tokens=40, sampler=sampler, seed=LINKED["seed"])
    return "".join(piece.text for piece in pieces)


def test_the_settings_are_those_of_python_and_in_the_link(page: Page, artefacts: dict[str, Path]) -> None:
    page.write(PROMPT)
    for name in ("temperature", "top_p", "top_k", "seed"):
        page.page.fill(f"#{name}", str(LINKED[name]))
    continued(page, 40)
    assert page.text("why").startswith("Stopped after 40 tokens")
    text = page.do("page.work.stream.text")
    assert text == PROMPT + drawn(artefacts["ring"])
    assert dict(parse_qsl(page.do("page.work.link()")[1:])) == {
        name: str(value) for name, value in LINKED.items()
    }
    page.write(f"{text} and more")
    assert page.do("page.work.link()") == f"#{urlencode({'text': f'{text} and more'})}"


@server_only
def test_a_link_makes_the_same_text_again(artefacts: dict[str, Path], open_page: Open) -> None:
    page = open_page(link=urlencode(LINKED))
    assert page.do("page.work.stream.text") == PROMPT + drawn(artefacts["ring"])


def test_a_fork_has_a_parent_and_goes_its_own_way(page: Page, artefacts: dict[str, Path]) -> None:
    page.write("The cat")
    name = page.do("page.work.stream.name")
    page.page.click("#fork")
    page.until(f"page.work.stream.parent === {f'{name} at 7'!r}")
    page.write("The cat is")
    assert any(each.endswith(f"from {name} at 710") for each in page.do(LISTED))
    same_bits(page, artefacts["ring"])
    page.do(
        """(name) => [...document.querySelectorAll('#streams button')].find((each) =>
             each.textContent.startsWith(name) && !each.textContent.includes('from')).click()""",
        name,
    )
    page.until(f"page.work.stream.name === {name!r}")
    assert page.page.input_value("#text") == "The cat", "the page remembers the text of a stream"
    page.write("The cats")
    same_bits(page, artefacts["ring"])


def test_the_pointer_names_a_token(page: Page) -> None:
    page.write("The cat")
    box = page.do(
        """(() => {
          const { left, top, width, height } = page.work.view.spans[4].getBoundingClientRect();
          return [left + width / 2, top + height / 2];
        })()"""
    )
    page.page.mouse.move(*box)
    page.until("document.getElementById('token').textContent.startsWith('c')")
    assert "token 4" in page.text("token")
    assert page.do("[...document.querySelectorAll('.at')].map((span) => span.textContent)") == ["c"]


def test_an_unknown_symbol_is_one_sentence(page: Page) -> None:
    page.write("The cat")
    page.page.focus("#text")
    page.page.keyboard.press("Control+End")
    page.page.keyboard.insert_text("日")
    page.until("!document.getElementById('error').hidden")
    assert "日" in str(page.error)
    assert page.page.input_value("#text") == "The cat日", "what was typed is not lost"
    page.page.keyboard.press("Backspace")
    page.until("document.getElementById('error').hidden")
    page.calm()
    assert page.do("page.work.stream.text") == "The cat"


@server_only
def test_a_visitor_finds_a_paragraph_and_is_surprised_by_others(open_page: Open) -> None:
    # A fast server is often too far behind the paragraph to go back, and refuses to.
    page, other = (open_page(link="", faulty=True) for _ in range(2))
    shown = [page.page.input_value(f"#{name}") for name in ("temperature", "top_p", "top_k")]
    assert shown == ["1", "1", "0"]
    found = page.do("page.work.stream.text")
    tokens = page.do("page.work.stream.ids.length")
    assert 200 <= len(found) < tokens <= 1001
    assert found != other.do("page.work.stream.text"), "the seed is another one each time"
    assert page.text("state") == f"{tokens:,} tokens"
    assert page.do("document.getElementById('text').value") == found
    assert page.do("document.querySelectorAll('#colours mark[class]:not(.s0)').length") > 20
    again = page.do("page.work.link()")
    streams = page.do("page.work.streams.all.length")
    page.page.click("#surprise")
    another = f"page.work.stream.text.length >= 200 && page.work.stream.text !== {json.dumps(found)}"
    page.until(f"!page.work.running && {another}")
    assert page.do("page.work.streams.all.length") == streams, "it replaces a text that was never edited"
    assert open_page(link=again[1:]).do("page.work.stream.text") == found


def test_a_text_begins_with_an_opening_of_the_owner(
    browsers: Callable[..., Any], make_site: Callable[..., Path], artefacts: dict[str, Path]
) -> None:
    openings = ["The cat ", "A dog "]
    with opening_sites(browsers) as open_one:
        page = open_one(make_site(artefacts["ring"], openings=openings), link="")
        assert page.do("page.work.stream.text").startswith(tuple(openings))
        assert page.text("why").startswith("The model has written ")


def test_a_long_text_is_shown_from_its_beginning_and_continues_in_view(open_page) -> None:
    page = open_page(link=urlencode({"text": "abc\n" * 80, "tokens": 1}))
    below = "(({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight)(scroll)"
    below = f"(() => {{ const scroll = document.getElementById('scroll'); return {below}; }})()"
    assert page.do("document.getElementById('scroll').scrollTop") == 0
    assert page.do(below) > 48
    page.page.click("#go")
    page.until("!page.work.running")
    assert page.do(below) <= 1


def test_a_text_that_ends_before_its_first_word_begins_again(page: Page) -> None:
    page.do(
        """(() => {
          const { handle } = page.work.stream;
          const { generate } = handle;
          let texts = 0;
          handle.generate = async function* (prompt, options) {
            const ends = texts++ < 2;
            const given = ends ? { ...options, max_tokens: 1 } : options;
            for await (const piece of generate.call(this, prompt, given))
              yield ends ? { ...piece, text: "" } : piece;
            if (ends) this.ended = "end";
          };
        })()"""
    )
    page.page.fill("#count", "50")
    page.page.click("#go")
    page.until("!page.work.running && page.work.stream.ids.length > 0")
    assert page.text("why").startswith("Stopped after 50 tokens")
    assert page.do("page.work.stream.text").strip()


def test_the_time_of_a_token_is_measured_far_into_a_text(page: Page) -> None:
    page.write("The cat")
    page.page.click("#far")
    page.until("document.getElementById('time-text').textContent.startsWith('Reading: ')")
    page.page.click("#far")
    page.until("document.getElementById('far').textContent === 'Read 10,000 tokens now'")
    page.page.click("#far")
    page.until("document.getElementById('time-text').textContent.startsWith('A token took ')")
    measured = page.text("time-text")
    assert "ms after 10,000. An ordinary Transformer would need about " in measured
    shown = page.do("page.work.side.speed.readings")
    assert shown[-1]["from"] >= 10_000
    for reading, after in ((shown[0], "100 tokens"), (shown[1], "1,000"), (shown[-1], "10,000")):
        took = page.do("(ms) => ms.toLocaleString('en', { maximumSignificantDigits: 2 })", reading["ms"])
        assert f"{took} ms after {after}" in measured, "the plot and the sentence show the same"
    page.page.click("#fork")
    page.until("page.work.stream.parent !== ''")
    assert page.text("time-text") == measured
    assert page.do("page.work.stream.text") == "The cat", "it read in a stream of its own"


@worker_only
def test_stop_ends_the_reading_of_a_long_paste(page: Page, artefacts: dict[str, Path]) -> None:
    """After Stop at most a segment is computed; the rest of the text is read when one continues."""
    page.write("The cat")
    page.page.fill("#text", "The cat" + " and the dog" * 4000)
    page.until("page.work.editing !== null")
    page.page.keyboard.press("Escape")
    page.do("page.work.stream.turn")
    assert page.do("page.work.stream.text") == "The cat"
    assert page.do("page.work.stream.handle.position") < 40_000
    assert page.text("state").startswith("stopped")
    page.write("The cats")
    assert page.do("page.work.stream.handle.position") == 8
    same_bits(page, artefacts["ring"])


@server_only
def test_the_position_moves_while_tokens_arrive(kept: Running, page: Page) -> None:
    page.write("The cat")
    page.page.fill("#count", "900")
    listed = "document.querySelector('#streams [aria-current=true] small').textContent"
    with paused(kept, after=10) as goes_on:
        page.page.click("#go")
        state = "document.getElementById('state').textContent"
        shown = f"{state} === `${{n}} tokens` && {listed} === `${{n}}`"
        page.until(f"((n) => n >= 17 && n < 907 && {shown})(page.work.stream.ids.length)")
        goes_on.set()
        page.until("!page.work.running")
    assert page.text("state") == "907 tokens"
    assert page.do(listed) == "907"
    assert position(kept, page) == 907


@server_only
def test_escape_stops_where_the_server_is(kept: Running, page: Page) -> None:
    page.write("The cat")
    page.page.fill("#count", "2000")
    with paused(kept, after=20) as goes_on:  # else a fast engine is done before a busy browser says stop
        page.page.click("#go")
        page.until("page.work.stream.ids.length >= 27")
        stopped(page, kept, goes_on)
    count = page.do("page.work.stream.ids.length")
    assert count < 2007
    assert position(kept, page) == count
    assert page.text("why").startswith("You stopped it after ")
    page.write("The cat")
    assert page.page.is_hidden("#why")


@server_only
def test_a_stream_that_was_never_used_is_deleted(kept: Running, open_page: Open) -> None:
    named, other = (open_page(link="text=The cat&tokens=5&seed=1") for _ in range(2))
    ids = [page.do("page.work.stream.handle.id") for page in (named, other)]
    named.page.once("dialog", lambda dialog: dialog.accept("Mine"))
    named.page.click("#rename")
    named.until("page.work.stream.name === 'Mine'")
    named.leave()
    other.leave()
    assert comes_true(lambda: kept.get(f"/v1/streams/{ids[1]}").status_code == 404)
    assert kept.get(f"/v1/streams/{ids[0]}").status_code == 200


@server_only
def test_a_stream_is_deleted_after_a_question(kept: Running, page: Page) -> None:
    page.write("Another beginning")
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


@server_only
def test_a_reload_shows_the_text_of_this_tab(kept: Running, open_page: Open) -> None:
    for _ in range(12):
        kept.post("/v1/streams", {"text": PROMPT}).raise_for_status()
    page = open_page()
    page.write("The cat is")
    page.leave()
    page.page.goto(page.address)
    page.ready()
    page.page.click("summary")  # closes the settings, which leaves the list its height
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
    assert page.text("state").endswith(" tokens")


@server_only
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


@server_only
def test_screens_of_every_size_hold_everything(kept: Running, opened: Page) -> None:
    for _ in range(12):
        kept.post("/v1/streams", {"text": PROMPT}).raise_for_status()
    page = opened
    page.page.reload()
    page.ready().until("document.getElementById('status').textContent !== ''")
    for width, height, scheme in (
        (360, 740, "dark"),
        (390, 844, "light"),
        (1200, 630, "dark"),
        (1280, 900, "light"),
    ):
        page.page.set_viewport_size({"width": width, "height": height})
        page.page.emulate_media(color_scheme=scheme)
        assert page.do("document.documentElement.scrollWidth") <= width
        boxes = "[...document.querySelectorAll('aside, .sheet')]"
        assert page.do(f"{boxes}.filter((box) => box.scrollHeight > box.clientHeight).length") == 0
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


@pytest.mark.slow
def test_streams_without_a_state_folder_are_said_to_end(
    keeping: Keeping, browsers: Callable[..., Any]
) -> None:
    with keeping(None) as server, opening(browsers) as open_at:
        page = open_at(f"{server.at}/", link="text=The cat&tokens=5")
        page.until("document.getElementById('streams-note').textContent.includes('until this server stops')")
        shown = "/^0 generating, 0 reading, 0 waiting\\s*\\d+ streams?, \\d+ in memory/"
        page.until(f"{shown}.test(document.getElementById('status').textContent)")
        page.leave()


@pytest.mark.slow
def test_a_key_is_asked_for(keeping: Keeping, browsers: Callable[..., Any], tmp_path: Path) -> None:
    key = "0123456789abcdef/123+4=="
    keys = keys_of([f"anna {key}"], "keys")
    with keeping(tmp_path, keys=keys) as server, opening(browsers) as open_at:
        page = open_at(f"{server.at}/", faulty=True)
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
def test_music_has_a_piano_roll(browsers: Callable[..., Any]) -> None:
    model = sources(("chorales", ROOT / "examples" / "music" / "chorales"))
    with running(model) as server, opening(browsers) as open_at:
        page = open_at(f"{server.at}/", link="seed=3")
        assert page.page.is_visible("#roll")
        assert page.page.is_hidden("#text")
        assert page.do("page.work.roll.notes.length") > 12
        found = page.do("document.getElementById('tokens').textContent")
        again = open_at(f"{server.at}/", link=page.do("page.work.link()")[1:])
        assert again.do("document.getElementById('tokens').textContent") == found
        page.page.click("#play")
        page.until("page.work.organ?.now > 0.5")
        page.page.keyboard.press("Escape")
        page.until("page.work.organ.context.state === 'suspended'")
