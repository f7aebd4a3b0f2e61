"""What takes a browser longer: vocabularies, forms, threads, saved streams, endurance, music, assistance."""

from __future__ import annotations

import json
import random
import string
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtimes
from tests.browsers import FIREFOX
from tests.sealing import sealed
from tests.web.test_page import a_reader_types_and_the_model_goes_on, same_bits
from xl_export.artefact.export import export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def stop_at(page: Any, tokens: int) -> None:
    page.page.fill("#count", "100000")
    page.page.click("#go")
    page.until(f"page.work.stream.ids.length >= {tokens} || !page.work.running")
    page.page.keyboard.press("Escape")
    page.calm()


@pytest.mark.parametrize("form", ["ring", "shift", "hidden"])
def test_an_edited_text_has_the_surprisals_of_the_whole(
    form: str, artefacts: dict[str, Path], make_site: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page, draw = open_page(make_site(artefacts[form])), random.Random(0)
    text = ""
    for _ in range(25):
        at = draw.choice([len(text), draw.randint(0, len(text)), max(0, len(text) - draw.randint(0, 6))])
        until = min(len(text), at + draw.randint(0, 4))
        text = (
            text[:at]
            + "".join(draw.choices(string.ascii_lowercase + " ", k=draw.randint(0, 9)))
            + text[until:]
        )
        page.write(text)
        assert page.do("page.work.stream.text") == text
        assert page.do("page.work.stream.ids.length") == len(text)
    same_bits(page, artefacts[form])


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_need_isolation(
    threads: int,
    isolated: bool,
    artefacts: dict[str, Path],
    make_site: Callable[..., Path],
    open_page: Callable[..., Any],
) -> None:
    page = open_page(make_site(artefacts["ring"]), f"?threads={threads}", isolated=isolated)
    assert page.do("crossOriginIsolated") is isolated
    assert page.do("page.model.facts.threads") == (threads if isolated else 1)
    report = page.do("page.model.check()")
    assert report["passed"]
    assert report["maxDifference"] <= 1e-4


@pytest.mark.parametrize("precision", ["fp16", "int8-stored", "int8", "int4"])
def test_every_precision_passes_its_check(
    precision: Any, run: Path, make_site: Callable[..., Path], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page(make_site(export(run, tmp_path / "artefact", precision=precision)))
    page.page.click("#check")
    page.until("!document.getElementById('check').disabled")
    assert page.text("check-result").startswith("This device computes correctly")


def test_a_stream_goes_from_page_to_python_and_back(
    artefacts: dict[str, Path], make_site: Callable[..., Path], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    artefact, site = artefacts["ring"], make_site(artefacts["ring"])
    page = open_page(site)
    page.write("A stream that goes on elsewhere")
    page.do("document.getElementById('temperature').value = 0")
    stop_at(page, 90)
    ids = page.do("page.work.stream.ids")
    with page.page.expect_download() as download:
        page.page.click("#save")
    file = tmp_path / "saved.stream"
    download.value.save_as(file)

    session = runtimes.open_session(artefact)
    memory = runtimes.load_memory(file, session)
    assert memory.positions.tolist() == [len(ids)]
    alone = session.start(1)
    for at in range(0, len(ids), 8):
        _, alone = session.step(np.array([ids[at : at + 8]]), alone)
    word = session.vocab.encode(" and")[None]
    (ours, _), (theirs, _) = session.step(word, memory), session.step(word, alone)
    assert np.abs(ours - theirs).max() < 1e-3

    other = open_page(site)
    other.page.set_input_files("#file", file)
    other.until("page.work.stream?.position > 0")
    other.calm()
    assert other.do("page.work.stream.ids") == ids
    assert other.do("page.work.stream.text") == page.do("page.work.stream.text")
    for each in (page, other):
        each.do("document.getElementById('temperature').value = 0")
        stop_at(each, len(ids) + 40)
    assert (
        other.do("page.work.stream.ids")[: len(ids) + 40] == page.do("page.work.stream.ids")[: len(ids) + 40]
    )

    session = runtimes.open_session(artefact)
    memory = session.start(1)
    session.step(session.vocab.encode("From Py")[None], memory)
    runtimes.save_memory(memory, tmp_path / "python.stream")
    other.page.set_input_files("#file", tmp_path / "python.stream")
    other.until("page.work.stream.position === 7")
    other.page.click("#go")
    other.until("!document.getElementById('error').hidden")
    assert "type something first" in other.error
    other.write("thon")
    assert other.do("page.work.stream.position") == 11
    (tmp_path / "damaged.stream").write_bytes(file.read_bytes()[:-3000])
    other.page.set_input_files("#file", tmp_path / "damaged.stream")
    other.until("!document.getElementById('error').hidden")
    assert other.do("page.work.stream.position") == 11


def test_ten_thousand_tokens_and_a_hundred_restarts_in_flat_memory(
    artefacts: dict[str, Path], make_site: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(make_site(artefacts["ring"]), "?threads=1")
    protocol = page.page.context.new_cdp_session(page.page)

    def heap() -> float:
        protocol.send("HeapProfiler.collectGarbage")
        return float(page.do("performance.memory.usedJSHeapSize"))

    page.write("Once")
    stop_at(page, 1000)
    before = heap()
    page.page.click("#go")
    page.until("page.work.stream.position >= 11000", seconds=600)
    page.page.keyboard.press("Escape")
    page.calm()
    assert page.do("page.work.stream.ids.length") <= 5000
    assert "earlier tokens are no longer shown" in page.text("earlier")
    assert page.do("document.querySelectorAll('#colours span').length") <= 5000
    assert page.do("document.getElementById('text').value === page.work.stream.text")
    for _ in range(100):
        page.page.click("#new")
        page.until("page.work.stream.position === 0")
        page.write("Once more")
        page.page.once("dialog", lambda dialog: dialog.accept())
        page.page.click("#delete")
        page.until("page.work.streams.all.length === 1")
    page.page.click("#new")
    page.write("Once more")
    assert heap() < before + 6e6
    same_bits(page, artefacts["ring"])


def test_music_is_read_as_in_python_and_played(
    make_site: Callable[..., Path], open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact = ROOT / "examples" / "music" / "chorales"
    monkeypatch.syspath_prepend(artefact.parent)
    from tests.examples.test_music_files import parsed

    page = open_page(make_site(artefact), "?threads=1")
    assert page.page.is_visible("#roll")
    names = json.loads((artefact / "vocab.json").read_text())["names"]
    draw = random.Random(0)
    tokens = draw.choices(names, k=3000)
    read = """async (tokens) => {
      const { Reader, Performer } = await import("./page/scheme.js");
      const [reader, performer] = [new Reader(), new Performer()];
      const events = tokens.map((name) => reader.read(name)).filter(Boolean);
      const slices = events.flatMap((event) => performer.play(event));
      return slices;
    }"""
    found = page.do(read, tokens)
    program = (
        "import json, sys; from scheme import IDS, Reader; from perform import slices\n"
        "reader = Reader(); names = json.load(sys.stdin)\n"
        "events = [e for e in (reader.read(IDS[n]) for n in names) if e]\n"
        "played = [[s.pitches, sorted(s.begins), s.seconds] for s in slices(events, tempo=72)]\n"
        "print(json.dumps(played[:-1]))"
    )
    told = subprocess.run(
        ["python", "-c", program],
        input=json.dumps(tokens),
        cwd=artefact.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    slices = json.loads(told.stdout)
    assert [[s["pitches"], sorted(s["begins"])] for s in found] == [each[:2] for each in slices]
    assert [s["seconds"] for s in found] == pytest.approx([each[2] for each in slices])

    assert page.do("page.work.roll.notes.length") > 12, "a piece is there before it sounds"
    page.page.click("#play")
    page.until("page.work.roll.notes.length > 12 && page.work.organ.now > 0.5")
    assert page.do("page.work.organ.sounding.size") > 0
    pixels = """() => {
      const { width, height } = document.getElementById("roll");
      const data = document.getElementById("roll").getContext("2d").getImageData(0, 0, width, height).data;
      return new Set(new Uint32Array(data.buffer)).size;
    }"""
    page.until(f"({pixels})() > 6")
    page.page.keyboard.press("Escape")
    page.until("page.work.organ.context.state === 'suspended'")
    assert page.text("play") == "Play"

    page.page.dblclick("#piece")  # the second piece takes the place of the first one
    page.until("page.work.roll.notes.length > 0")
    page.page.keyboard.press("Escape")
    page.do("page.work.stop()")
    position = page.do("page.work.handle.position")
    assert position == 1 + page.do("document.querySelectorAll('#tokens span').length") < 240
    assert page.error is None
    notes = page.do("page.work.notes")
    for name, head in (("midi", b"MThd"), ("wav", b"RIFF")):
        with page.page.expect_download() as download:
            page.page.click(f"#{name}")
        content = Path(download.value.path()).read_bytes()
        assert content.startswith(head)
        if name == "midi":
            begun = [message for _, message in parsed(content) if message[0] >> 4 == 9]
            assert sorted((message[0] & 15, message[1]) for message in begun) == sorted(
                (note["voice"], note["pitch"]) for note in notes
            )
    drawn = """new Promise((resolve) => {
      let count = 0;
      page.work.roll.draw = () => count++;
      setTimeout(() => resolve(count), 500);
    })"""
    assert page.do(drawn) == 0, "what stands still is not drawn"
    assert page.do("page.work.handle.position") == position


@pytest.mark.parametrize(
    "options", [{}, {"color_scheme": "dark"}, {"viewport": {"width": 360, "height": 740}}], ids=str
)
def test_nothing_hides_from_assistive_technology(
    options: dict[str, Any],
    node_modules: Path,
    artefacts: dict[str, Path],
    make_site: Callable[..., Path],
    open_page: Callable[..., Any],
) -> None:
    axe = node_modules / "axe-core" / "axe.min.js"
    music = ROOT / "examples" / "music" / "chorales"
    site = make_site(artefacts["ring"], music)
    for query in ("?model=ring", "?model=chorales"):
        page = open_page(site, query, bypass_csp=True, **options)
        page.page.add_script_tag(path=str(axe))
        result = page.do("axe.run()")
        assert [(each["id"], each["nodes"][0]["html"]) for each in result["violations"]] == []
        assert page.do("document.documentElement.scrollWidth <= innerWidth"), (
            "nothing is wider than the screen"
        )


def test_the_keyboard_reaches_everything(
    artefacts: dict[str, Path], make_site: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(make_site(artefacts["ring"]))
    reached = set()
    for _ in range(30):
        page.page.keyboard.press("Tab")
        reached.add(page.do("document.activeElement.id"))
    assert reached >= {"check", "go", "new", "text", "temperature", "top_p", "top_k", "seed", "save", "load"}


def test_an_old_browser_is_told(
    artefacts: dict[str, Path], make_site: Callable[..., Path], browsers: Callable[..., Any]
) -> None:
    """The script for old browsers stands alone: it says its sentence where something is missing."""
    site = make_site(artefacts["ring"])
    page = browsers().new_page()
    page.set_content("<p id='error' hidden></p><p id='loading'></p>")
    page.evaluate("delete Array.prototype.toSorted")
    page.add_script_tag(content=(site / "page" / "old.js").read_text())
    assert "This browser has no" in page.inner_text("#error")
    assert page.evaluate("tooOld")
    page.close()


def test_a_page_opened_as_a_file_says_what_to_do(
    artefacts: dict[str, Path], make_site: Callable[..., Path], browsers: Callable[..., Any]
) -> None:
    page = browsers().new_page()
    page.goto((make_site(artefacts["ring"]) / "index.html").as_uri())
    assert "run python3 -m http.server (" in page.inner_text("#error")
    assert page.is_hidden("#loading")
    page.close()


def test_a_model_that_may_be_of_no_use_is_named(
    artefacts: dict[str, Path], make_site: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    site = make_site(artefacts["ring"])
    file = site / "models" / "ring" / "spec.json"
    spec = json.loads(file.read_text()) | {"concern": "this run was never validated."}
    file.write_bytes(sealed(spec))
    page = open_page(site, viewport={"width": 1280, "height": 900})
    assert page.page.inner_text("#concern") == "Warning: this run was never validated."
    assert page.error is None
    page.page.click("#check")
    page.until("!document.getElementById('check').disabled")
    assert page.page.is_visible("#concern")
    assert page.page.is_visible("#check-result")


def test_a_reader_types_and_the_model_goes_on_in_firefox(
    artefacts: dict[str, Path], make_site: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(make_site(artefacts["ring"]), "?threads=2", flags=(FIREFOX,))
    assert "Firefox/" in page.do("navigator.userAgent")
    a_reader_types_and_the_model_goes_on(page, artefacts["ring"])
