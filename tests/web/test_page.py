"""The page in a browser: one model of characters goes through everything that a reader does."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import runtimes
from tests.web.conftest import opening_sites

PROMPT = "The first thing that a man"


@pytest.fixture(scope="module")
def site(make_site: Callable[..., Path], artefacts: dict[str, Path]) -> Path:
    return make_site(artefacts["ring"])


@pytest.fixture(scope="module")
def opened(site: Path, browsers: Callable[..., Any]) -> Iterator[Any]:
    """A page of the site that some tests share."""
    with opening_sites(browsers) as open_one:
        yield open_one(site)


@pytest.fixture
def page(opened: Any) -> Any:
    """The shared page with a new stream."""
    opened.page.click("#new")
    opened.until("page.work.stream.position === 0 && !page.work.running")
    return opened


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


def test_a_reader_types_and_the_model_goes_on(
    site: Path, artefacts: dict[str, Path], open_page: Callable[..., Any]
) -> None:
    a_reader_types_and_the_model_goes_on(open_page(site, "?threads=2"), artefacts["ring"])


def a_reader_types_and_the_model_goes_on(page: Any, artefact: Path) -> None:
    assert page.error is None
    assert page.do("crossOriginIsolated")
    assert page.do("page.model.facts.threads") == 2
    assert page.do("page.model.facts.memory") == "in place"
    page.page.click("#check")
    page.until("document.getElementById('check-result').textContent.startsWith('Passed')")

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
    assert page.text("memory-rows").startswith(f"{len(ids):,} now")
    assert page.text("why").startswith("You stopped it after ")


def test_a_link_makes_the_same_text_again(
    page: Any, site: Path, artefacts: dict[str, Path], open_page: Callable[..., Any]
) -> None:
    page.write(PROMPT)
    assert [page.page.input_value(f"#{name}") for name in ("temperature", "top_p", "top_k")] == [
        "1",
        "1",
        "0",
    ]
    page.page.fill("#temperature", "2")
    page.page.fill("#top_p", "0.72")
    page.page.fill("#seed", "5")
    page.page.fill("#count", "40")
    page.page.click("#go")
    page.until(f"page.work.stream.ids.length === {len(PROMPT) + 40} && !page.work.running")
    assert page.text("why").startswith("Stopped after 40 tokens")
    text = page.do("page.work.stream.text")
    session = runtimes.open_session(artefacts["ring"], threads=1, device="cpu")
    sampler = runtimes.Sampler(temperature=2, top_p=0.72)
    drawn = runtimes.generate(session, PROMPT, max_tokens=40, sampler=sampler, seed=5)
    assert text == PROMPT + "".join(piece.text for piece in drawn)
    link = page.do("page.work.link()")
    again = open_page(site, link=link[1:])
    assert again.do("page.work.stream.text") == text
    page.write(f"{text} and more")
    assert page.do("page.work.link()") == f"#{urlencode({'text': f'{text} and more'})}"


def test_a_visitor_finds_a_text_and_is_surprised_by_others(site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site, link="")
    found = page.do("page.work.stream.text")
    assert len(found) == page.do("page.work.stream.ids.length") - 1 == 200
    assert page.do("document.querySelectorAll('#colours mark[class]:not(.s0)').length") > 20
    page.page.click("#surprise")
    page.until("!page.work.running && page.work.stream.ids.length === 201")
    assert page.do("page.work.stream.text") != found
    assert page.do("page.work.streams.all.length") == 1, "it replaces a text that nobody typed in"


def test_a_fork_has_a_parent_and_goes_its_own_way(page: Any, artefacts: dict[str, Path]) -> None:
    page.write("The cat")
    count = page.do("page.work.streams.all.length")
    name = page.do("page.work.stream.name")
    page.page.click("#fork")
    page.until(f"page.work.streams.all.length === {count + 1}")
    page.write("The cat is")
    listed = "[...document.querySelectorAll('#streams button')].map((each) => each.textContent)"
    assert page.do(listed)[-1].endswith(f"from {name} at 710")
    same_bits(page, artefacts["ring"])
    page.page.click(f"#streams li:nth-child({count}) button")
    page.until(f"page.work.stream.name === {name!r}")
    assert page.page.input_value("#text") == "The cat"
    page.write("The cats")
    same_bits(page, artefacts["ring"])


def test_the_pointer_names_a_token(page: Any) -> None:
    page.write("The cat")
    box = page.do(
        """(() => {
          const { left, top, width, height } = page.work.view.spans[4].getBoundingClientRect();
          return [left + width / 2, top + height / 2];
        })()"""
    )
    page.page.mouse.move(*box)
    page.until("document.getElementById('token').textContent.startsWith('c')")
    assert "position 4" in page.text("token")
    assert page.do("[...document.querySelectorAll('.at')].map((span) => span.textContent)") == ["c"]


def test_stop_ends_the_reading_of_a_long_paste(page: Any, artefacts: dict[str, Path]) -> None:
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


def test_an_unknown_symbol_is_one_sentence(page: Any) -> None:
    page.write("The cat")
    page.page.focus("#text")
    page.page.keyboard.press("Control+End")
    page.page.keyboard.insert_text("日")
    page.until("!document.getElementById('error').hidden")
    assert '"日", character 1' in page.error
    page.page.keyboard.press("Backspace")
    page.until("document.getElementById('error').hidden")
    page.calm()
    assert page.do("page.work.stream.text") == "The cat"


def test_a_damaged_file_is_one_sentence(site: Path, open_page: Callable[..., Any], tmp_path: Path) -> None:
    damaged = shutil.copytree(site, tmp_path / "site")
    file = damaged / "models" / "ring" / "weights.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    page = open_page(damaged, faulty=True)
    assert page.error is not None
    assert "weights.bin" in page.error
    assert page.error.endswith(".")
    assert "\n" not in page.error
    assert not page.page.is_visible("#work")
    assert not page.page.is_visible("#loading")
