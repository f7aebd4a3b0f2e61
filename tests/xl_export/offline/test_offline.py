"""What actors do with a corpus, in this process: blocks, finished files, the numbers of one process."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtimes
from runtimes.base.errors import ConfigError, TextError, UserError
from runtimes.cli.lines import read_texts
from runtimes.cli.score import Totals
from runtimes.tasks.evaluate import checked_lanes
from runtimes.tasks.score_texts import WINDOW_TOKENS
from tests.commands import refused, xl
from xl_export.offline import score
from xl_export.offline.cluster import Unit, facts_of, open_same
from xl_export.offline.corpus import blocks_of, list_files, numbered, texts_of
from xl_export.offline.evaluate import LANES, EvaluateLanes, _packed
from xl_export.offline.finished import Finished
from xl_export.offline.score import ScoreBlock, ScoreOptions

ARTEFACT = Path(__file__).parents[2] / "data" / "small"
LINES = b"a text\n\nno end of line: x\nabc, abc.\n the last one"
JSON = (
    b'\xef\xbb\xbf{"id": "x", "text": "abc", "context": "the "}\n\n \xe3\x80\x80\n"a string"\n[1, 2, 3]\n'
    b'{"id": null, "text": "last"}\n\n'
)


@pytest.mark.parametrize("num_bytes", [1, 7, 30, 1000])
def test_blocks_hold_every_text_once_under_its_number(num_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_bytes(JSON)
    (tmp_path / "c.txt").write_bytes(b"")
    files = list_files(f"{tmp_path}/*")
    blocks = numbered([blocks_of(file, None, num_bytes) for file in files])
    assert (len(blocks) == 2) is (num_bytes == 1000)
    assert num_bytes > 1 or len(blocks) == 5 + 7  # a line each
    found = [text for block in blocks for text in texts_of(block)]
    expected = [*read_texts(LINES.splitlines(True)), *read_texts(JSON.splitlines(True))]
    assert [(text.text, text.context) for text in found] == [(text.text, text.context) for text in expected]
    assert [text.id for text in found] == [1, 2, 3, 4, 5, "x", 7, 8, 9]
    places = [str(text.place).partition(" of ")[0] for text in found]
    assert places == [text.place for text in expected]


def test_lines_and_totals_are_those_of_the_command(tmp_path: Path) -> None:
    texts = [f"abc de{'h' * (number % 7)}" for number in range(40)]
    (tmp_path / "corpus").write_text("\n".join(texts))
    alone = xl("score", ARTEFACT, "--input", tmp_path / "corpus", "--json", "--threads", "1")
    options = ScoreOptions(window=WINDOW_TOKENS, as_json=True, block_bytes=64)
    facts = facts_of(str(ARTEFACT), "cpu", 1)
    work, totals, lines = ScoreBlock(str(ARTEFACT), "cpu", 1, facts, asdict(options)), Totals(None), []
    blocks = numbered([blocks_of(str(tmp_path / "corpus"), None, options.block_bytes)])
    assert len(blocks) > 4
    for block in blocks:
        head, _, rest = work(json.dumps(asdict(block))).decode().partition("\n")
        totals.add(json.loads(head))
        lines += rest.splitlines()
    for mine, own in zip(map(json.loads, lines), map(json.loads, alone.stdout.splitlines()), strict=True):
        assert mine.pop("log_prob") == pytest.approx(own.pop("log_prob"), abs=1e-4)
        assert mine == own
    assert list(totals.lines(1.0))[1] == alone.stderr.splitlines()[-1]


@pytest.mark.parametrize("lanes", [1, 6, 11])
def test_groups_of_lanes_give_the_losses_of_all(lanes: int) -> None:
    session = runtimes.open_session(ARTEFACT, threads=1, device="cpu")
    tokens = np.random.default_rng(lanes).integers(0, session.vocab.size, 137)
    expected = runtimes.evaluate(session, tokens, lanes=lanes).token_nats
    _, segment, starts = checked_lanes(session, tokens, lanes=lanes, segment=None)
    facts = facts_of(str(ARTEFACT), "cpu", 1, session.rule)
    work = EvaluateLanes(str(ARTEFACT), "cpu", 1, facts, session.rule, segment, True)
    parts = [work(_packed(tokens, starts[at : at + LANES + 1])) for at in range(0, lanes, LANES)]
    assert np.abs(np.frombuffer(b"".join(parts)) - expected).max() < 1e-4


def test_a_folder_of_finished_blocks_belongs_to_one_plan(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    finished = Finished(folder, {"model": "a", "options": [1]}, blocks=3)
    finished.write(1, b"one")
    with pytest.raises(UserError, match="being written by another process"):
        Finished(folder, {"model": "a", "options": [1]}, blocks=3)
    finished.close()
    again = Finished(folder, {"model": "a", "options": [1]}, blocks=3)
    assert again.missing == [0, 2]
    for number in (2, 0):
        again.write(number, str(number).encode())
    assert (again.missing, list(again.contents())) == ([], [b"0", b"one", b"2"])
    again.close()
    with pytest.raises(UserError, match=r"with other model and blocks; give another --work"):
        Finished(folder, {"model": "b", "options": [1]}, blocks=4).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="holds other things than finished blocks"):
        Finished(tmp_path / "other", {}, blocks=1)
    (folder / "notes.txt").touch()
    again.remove()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


class KilledError(Exception):
    """The call ends in the middle."""


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., bytes]:
    """`scored(corpus, blocks=N)` → the lines of all texts, by this process in place of actors; None for all.

    blocks: after so many the call is killed.
    """

    def in_tasks(function: Any, arguments: Any) -> list[Any]:
        return [function(*own) for own in arguments]

    def units_of(left: int | None) -> Callable[..., Iterator[Unit]]:
        def finished_units(units: Any, work: Any, options: Any, **more: Any) -> Iterator[Unit]:
            actor = work(**options)
            for at, (number, unit) in enumerate(units):
                if at == left:
                    raise KilledError
                yield Unit(number=number, content=actor(unit), began=0, ended=0)

        return finished_units

    def run(corpus: Path, *, blocks: int | None = None, model: Path = ARTEFACT) -> bytes:
        monkeypatch.setattr(score, "in_tasks", in_tasks)
        monkeypatch.setattr(score, "finished_units", units_of(blocks))
        score.score_corpus(
            model,
            str(corpus),
            tmp_path / "out",
            options=ScoreOptions(window=WINDOW_TOKENS, as_json=True, block_bytes=8),
            work=tmp_path / "work",
            actors=1,
            threads=1,
            device="cpu",
        )
        return (tmp_path / "out").read_bytes()

    return run


def test_a_killed_call_resumes_and_refuses_an_edited_corpus(
    scored: Callable[..., bytes], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    corpus.write_text("abc abc\ndeh deh\n")
    whole = scored(corpus)
    with pytest.raises(KilledError):
        scored(corpus, blocks=1)
    assert scored(corpus) == whole
    with pytest.raises(KilledError):
        scored(corpus, blocks=1)
    corpus.write_text("abc abc\ndeh abc\n")  # as long as before
    with pytest.raises(UserError, match=r"of a call with other files; give another --work"):
        scored(corpus)


@pytest.mark.parametrize("after", ["abcdefg\ncba\n", "abc\n", "abc\nfed\nabc\n"])
def test_a_file_that_changes_while_actors_read_is_refused(after: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("abc\ndef\nabc\n")
    blocks = blocks_of(str(file), None, 8)
    assert [text.text for text in texts_of(blocks[0])] == ["abc", "def"]
    file.write_text(after)
    with pytest.raises(TextError, match="has changed since the call began"):
        list(texts_of(blocks[0]))


def test_changed_parquet_files_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = str(tmp_path / "a.parquet")

    def written(texts: list[str]) -> None:
        parquet.write_table(arrow.table({"text": texts}), file, row_group_size=2, compression="none")

    written(["abc", "def", "abc"])
    blocks = blocks_of(file, None, 1)
    assert [[text.text for text in texts_of(block)] for block in blocks] == [["abc", "def"], ["abc"]]
    written(["abc", "fed", "abc"])
    with pytest.raises(TextError, match="has changed since the call began"):
        list(texts_of(blocks[0]))


def test_a_date_in_parquet_is_an_id_as_text(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = str(tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"text": ["abc"], "id": [datetime.date(2020, 1, 2)]}), file)
    options = ScoreOptions(window=WINDOW_TOKENS, as_json=True)
    work = ScoreBlock(str(ARTEFACT), "cpu", 1, facts_of(str(ARTEFACT), "cpu", 1), asdict(options))
    [block] = numbered([blocks_of(file, None, 1)])
    assert json.loads(work(json.dumps(asdict(block))).splitlines()[1])["id"] == "2020-01-02"


@pytest.mark.parametrize(
    ("fact", "sentence"), [("model", "is another model"), ("computed_by", "computes with")]
)
def test_an_actor_with_another_model_or_device_computes_nothing(fact: str, sentence: str) -> None:
    facts = facts_of(str(ARTEFACT), "cpu", 1)
    assert open_same(str(ARTEFACT), "cpu", 1, facts).identity == facts["model"]
    other = facts | {fact: "another"}
    options = asdict(ScoreOptions(window=WINDOW_TOKENS))
    rule = runtimes.open_session(ARTEFACT, device="cpu").rule
    for actor in (
        lambda: ScoreBlock(str(ARTEFACT), "cpu", 1, other, options),
        lambda: EvaluateLanes(str(ARTEFACT), "cpu", 1, other, rule, 4, True),
    ):
        with pytest.raises(ConfigError, match=sentence):
            actor()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("abc\n")
    score, evaluate = ("score", ARTEFACT, "--input", text), ("eval", ARTEFACT, "--text", text)
    refused(xl(*score, "--out", tmp_path / "out"), "--out is for --ray; leave it out")
    refused(xl(*score, "--ray", "local"), "give --out FILE")
    refused(xl(*score, "--ray", "local", "--out", text), "exists already; give another --out, or --force")
    refused(xl(*score, "--ray", "local", "--out", tmp_path / "out", "--weight", 1), "--weight needs")
    refused(xl(*evaluate, "--ray", "local"), "give --work FOLDER")
    refused(xl(*evaluate, "--ray", "local", "--work", tmp_path, "--segment", "1,2"), "one setting at a time")
