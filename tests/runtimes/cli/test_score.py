"""`xl-export score`: lines and JSON lines in, scores out as a stream, and the best of n-best lists."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from runtimes import Session, TextScore, open_session, score_texts
from runtimes.base.errors import TextError
from runtimes.base.files import write_json
from runtimes.base.text import byte_lines
from runtimes.cli.lines import read_texts
from runtimes.contract.vocabulary import CharVocab
from runtimes.tasks.text_rows import TextToScore
from tests.commands import refused, xl
from xl_export.cli.main import main


@pytest.fixture(scope="module")
def words(run: Path, tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """The run again, with a vocabulary of words of the same size."""
    folder = Path(shutil.copytree(run, tmp_path_factory.mktemp("words") / "run"))
    size = CharVocab.build(text).size
    symbols = ["<unk>", "<eos>", "a", "b", "c", *(f"w{number}" for number in range(size - 5))]
    write_json(folder / "vocab.json", {"kind": "word", "symbols": symbols})
    return folder


@pytest.fixture(scope="module")
def session(words: Path) -> Session:
    return open_session(words)


def score(words: Path, text: str | bytes, *options: object, source: object = "-") -> Result:
    arguments = ["score", str(words), "--input", str(source), *map(str, options)]
    return CliRunner().invoke(main, arguments, input=text)


def expected(session: Session, *texts: Any, **options: Any) -> list[TextScore]:
    return list(score_texts(session, texts, **options))


def test_lines_are_scored_in_order(words: Path, session: Session, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes(b"a b c\n\nb what\tb\r\nc")
    result = score(words, "", "--eos", source=tmp_path / "texts.txt")
    assert result.exit_code == 0, result.output
    figures = expected(session, "a b c", "", "b what\tb", "c", eos=True)
    lines = [f"{s.log_prob:.4f}\t{s.tokens}\t{s.unknown}" for s in figures]
    assert result.stdout == f"{lines[0]}\ta b c\n{lines[1]}\t\n{lines[2]}\tb what\\tb\n{lines[3]}\tc\n"
    assert [s.tokens for s in figures] == [3, 0, 3, 1]
    assert [s.unknown for s in figures] == [0, 0, 1, 0]
    note, speed, quality = result.stderr.splitlines()
    assert note.endswith("texts.txt: its Windows line ends (\\r\\n) are read as \\n")
    assert speed.startswith("4 texts, 7 tokens, 1 unknown words in ")
    # The first word of a text is not predicted, and the token after a text has no characters.
    nats, predicted = -sum(s.log_prob for s in figures), len(" b c") + len(" what\tb")
    assert quality == (
        f"log-probability {-nats:.4f}, perplexity {math.exp(nats / 7):,.3f}, "
        f"{nats / math.log(2) / predicted:.4f} bits per character, "
        f"{nats / math.log(2) / predicted:.4f} bits per byte"
    )


def test_json_lines_have_every_form_and_field(words: Path, session: Session) -> None:
    lines = [
        {"id": "x", "text": "a b", "context": "c a"},
        {"ids": [2, 3, 1]},
        [4, 4],
        "b a",
        {"text": "a", "context": [2, 3], "group": 7, "score": -2, "id": 0},
    ]
    result = score(words, "\n" + "\n\n".join(map(json.dumps, lines)), "--json", "--bos")
    assert result.exit_code == 0, result.output
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    texts = [
        TextToScore(text="a b", context="c a"),
        [2, 3, 1],
        [4, 4],
        "b a",
        TextToScore(text="a", context="a b"),
    ]
    figures = expected(session, *texts, bos=True)
    assert [document["log_prob"] for document in documents] == pytest.approx([s.log_prob for s in figures])
    assert [document["id"] for document in documents] == ["x", 2, 3, 4, 0]
    assert documents[0] == {
        "id": "x",
        "log_prob": documents[0]["log_prob"],
        "tokens": 2,
        "unknown": 0,
        "characters": 3,
        "bytes": 3,
        "text": "a b",
    }
    assert documents[1]["ids"] == [2, 3, 1]
    assert documents[1]["characters"] is None
    assert documents[4]["group"] == 7


def test_tokens_have_texts_and_log_probabilities_that_add_up(words: Path) -> None:
    document = json.loads(score(words, "a zzz c", "--json", "--tokens", "--eos").stdout)
    tokens = document["token_log_probs"]
    assert [token["text"] for token in tokens] == ["<unk>", " c", "\n"]
    assert [token["id"] for token in tokens] == [0, 4, 1]
    assert sum(token["log_prob"] for token in tokens) == pytest.approx(document["log_prob"], abs=1e-5)
    plain = score(words, "a zzz c", "--tokens", "--eos").stdout.splitlines()
    assert len(plain) == 4
    assert plain[3] == f"\t{tokens[2]['log_prob']:.4f}\t\\n"


def nbest(*rows: tuple[Any, float, str]) -> str:
    return "\n".join(json.dumps({"group": g, "score": s, "text": t, "id": t}) for g, s, t in rows)


def test_the_best_of_each_group(words: Path, session: Session) -> None:
    rows = [("u1", -3.0, "a b c"), ("u1", -2.0, "a b b"), ("u1", -2.5, "c b a"), (2, 0, "a"), (2, 0, "a")]
    log_probs = [s.log_prob for s in expected(session, *(text for _, _, text in rows), bos=True)]
    for weight in (0.0, 0.4, -3.0):
        totals = [score + weight * log_prob for (_, score, _), log_prob in zip(rows, log_probs, strict=True)]
        best = max(range(3), key=lambda index: totals[index])
        result = score(words, nbest(*rows), "--bos", "--weight", weight, "--json")
        first, second = (json.loads(line) for line in result.stdout.splitlines())
        assert (first["id"], first["group"], first["texts"]) == (rows[best][2], "u1", 3)
        assert first["total"] == pytest.approx(totals[best], abs=1e-4)
        assert first["score"] == rows[best][1]
        assert (second["group"], second["texts"]) == (2, 2)
    plain = score(words, nbest(*rows), "--bos", "--weight", 0).stdout.splitlines()
    assert plain[0] == f"u1\t-2.0000\t{log_probs[1]:.4f}\t3\t0\ta b b"
    assert plain[1].startswith("2\t0.0000\t")


@pytest.mark.parametrize("weight", [0, 0.5])
def test_of_equal_texts_the_first_one_is_best(words: Path, weight: float) -> None:
    lines = [json.dumps({"group": "u", "score": -1, "text": "a b", "id": name}) for name in "xyz"]
    document = json.loads(score(words, "\n".join(lines), "--bos", "--weight", weight, "--json").stdout)
    assert (document["id"], document["texts"]) == ("x", 3)


def test_n_best_lists_require_a_score_for_the_first_token(words: Path) -> None:
    """Without it an empty hypothesis and one of a single token would cost nothing."""
    rows = nbest(("u", 0, "a b c"), ("u", 0, "a"))
    refused(score(words, rows, "--weight", 1), "line 1 is of a group, and its first token was not predicted")
    assert score(words, rows, "--weight", 1, "--bos").exit_code == 0
    with_context = json.dumps({"group": "u", "score": 0, "text": "a", "context": "b"})
    assert score(words, with_context, "--weight", 1).exit_code == 0


@pytest.mark.parametrize(
    ("rows", "words_of_error"),
    [
        ([("a", 1.0, "a"), ("b", 1.0, "a"), ("a", 1.0, "a")], "line 3 is of group 'a', which ended before"),
        ([("a", 1.0, "a"), (None, 1.0, "a")], "line 2 has no group"),
        ([("a", 1.0, "a"), ("a", None, "a")], "line 2 has no score"),
    ],
)
def test_n_best_lists_that_are_refused(rows: list, words_of_error: str, words: Path) -> None:
    result = score(words, nbest(*rows), "--weight", 1, "--bos")
    assert result.exit_code == 2
    assert words_of_error in result.stderr
    # A group is whole only when another one has begun.
    assert len(result.stdout.splitlines()) == (2 if len(rows) == 3 else 0)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{", "line 2 is not JSON"),
        (b"3", "line 2 is neither a text nor a list of token ids"),
        (b'{"text": "a", "ids": [1]}', "line 2 has both text and ids"),
        (b'{"text": "a", "txt": 1}', "line 2 has the field 'txt'"),
        (b'{"text": "a", "score": NaN}', "the score of line 2 is nan"),
        (b'{"text": "a", "id": NaN}', "line 2 has the id nan"),
        (b'{"text": "a", "group": [1e999]}', "line 2 has the group [inf]"),
        (b'{"text": "a", "context": 0}', "the context of line 2 is neither"),
        (b'{"text": "\xff"}', "line 2 is not UTF-8 (byte 0xff) but probably Latin-1"),
        (b'{"ids": [99999]}', "line 2 has the token id 99999"),
        (b'{"text": "\\ud800"}', "line 2 has half of a surrogate pair"),
        (b"[" * 100_000, "line 2 is not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_line_ends_after_the_results_before_it(line: bytes, error: str, words: Path) -> None:
    result = score(words, b'{"text": "a b"}\n' + line + b'\n{"text": "a b"}')
    assert result.exit_code == 2
    (message,) = result.stderr.splitlines()
    assert message.startswith(f"Error: {error}")
    assert message.endswith(".")
    assert len(result.stdout.splitlines()) == 1


def test_the_first_line_decides_and_format_overrides(words: Path) -> None:
    def texts(data: bytes, form: Any = None) -> list[Any]:
        return [item.text for item in read_texts(data.splitlines(keepends=True), form=form)]

    assert texts(b"") == texts(b"", "jsonl") == []
    assert texts(b"\n\n") == ["", ""]
    assert texts(b"\n[1]\n\n[2, 3]\n") == [[1], [2, 3]]
    assert texts(b'"quoted"\n[1]') == ["quoted", [1]]
    assert texts(b'"quoted" x\n[1]') == ['"quoted" x', "[1]"]
    assert texts(b'"quoted"\n', "lines") == ['"quoted"']
    assert texts(b"[1]\n", "lines") == ["[1]"]
    assert texts(b'\xef\xbb\xbf{"text": "a"}\n') == ["a"]
    assert texts(b"\xef\xbb\xbfa\r\nb\r\n") == ["a", "b"]
    assert texts(b"3\n") == ["3"]
    with pytest.raises(TextError, match=r"line 2 is not JSON .* give --format lines"):
        texts(b"[1]\nx\n")
    assert "line 1" not in score(words, "[a]\n", "--format", "lines").stderr


def test_a_line_has_a_limit_and_empty_lines_are_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtimes.base.text.MAX_LINE_BYTES", 8)
    assert list(byte_lines(io.BytesIO(b"1234567\n12345678"), "")) == [b"1234567\n", b"12345678"]
    with pytest.raises(TextError, match="line 2 of f has more than 8 bytes; give each text a line"):
        list(byte_lines(io.BytesIO(b"\n" + b"1" * 9), "f"))

    assert [text.text for text in read_texts([b"\n", b"\n", b" \r\n", b"a"])] == ["", "", " ", "a"]


def test_input_that_never_ends_is_answered_while_it_is_read(session: Session) -> None:
    lines = (b"a b c\n" for _ in itertools.count())
    scores = score_texts(session, read_texts(lines), window=100)
    assert [score.number for score in itertools.islice(scores, 60)] == list(range(1, 61))


def test_lines_are_answered_at_once_until_the_pipe_closes(artefacts: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "xl_export", "score", str(artefacts["ring"]), "--input", "-"]
    with subprocess.Popen(
        [*command, "--window", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(b"the first\n")
        process.stdin.flush()
        assert process.stdout.readline().endswith(b"\tthe first\n")  # before the input has ended
        process.stdout.close()
        try:
            for _ in range(3):
                process.stdin.write(b"another\n")
                process.stdin.flush()
            process.stdin.close()
        except BrokenPipeError:
            pass
        assert process.wait(timeout=280) == 1
        assert process.stderr.read() == b""


def test_generate_also_puts_the_token_before_a_text(words: Path) -> None:
    options = ("--tokens", 3, "--temperature", 0, "--ids")
    begun = xl("generate", words, "--prompt", "a b", "--bos", *options).stdout
    assert begun == xl("generate", words, "--prompt-ids", "1,2,3", *options).stdout
    assert begun == xl("generate", words, "--prompt-ids", "1,2,3", "--bos", *options).stdout
