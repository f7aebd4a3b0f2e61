"""Independent texts with vocabularies of words and subwords: how much was predicted, where a line begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtimes import TextToScore, score_texts
from runtimes.contract.vocabulary import WordVocab, decode, save_vocab, vocab_from_file
from tests.commands import xl
from tests.runtimes.contract.test_subword import trained
from tests.runtimes.tasks.independent_texts import Counting


@pytest.mark.parametrize(
    ("text", "options", "size"),
    [
        ("naïve cat", {}, (4, 4)),
        ("naïve cat", {"eos": True}, (4, 4)),  # the token after a text has no characters
        ("cat naïve", {}, (6, 7)),
        (" dög cat", {"eos": True}, (5, 5)),  # a word that is unknown is as long as the word
        ("cat", {}, (0, 0)),
        ("", {"eos": True}, (0, 0)),
        ("naïve cat", {"bos": True}, (9, 10)),
    ],
)
def test_the_size_is_that_of_what_was_predicted(
    text: str, options: dict[str, bool], size: tuple[int, int]
) -> None:
    session = Counting()
    session.vocab = WordVocab(["<unk>", "<eos>", "naïve", "cat"])
    (score,) = score_texts(session, [text], **options)  # type: ignore[arg-type]
    assert (score.characters, score.num_bytes) == size
    (score,) = score_texts(session, [TextToScore(text=text, context="cat")])
    assert (score.characters, score.num_bytes) == (len(text), len(text.encode()))


LINES = {"unknown": "<UNK>", "start_of_line": "<S>"}


@pytest.mark.parametrize(
    ("options", "context", "text", "fed"),
    [
        (LINES | {"end_of_line": "<S>"}, "the", "cat", ["the", "cat"]),
        (LINES | {"end_of_line": "<S>"}, "the\n", "cat", ["<S>", "<S>", "cat"]),  # as in One Billion Word
        (LINES | {"end_of_line": "<S>"}, "the\n\n", "cat", ["<S>", "<S>", "cat"]),
        (LINES | {"end_of_line": "<S>"}, [0], "cat", ["<S>", "cat"]),
        (LINES | {"end_of_line": "<S>"}, "the", "\ncat", ["the", "<S>", "<S>", "cat"]),
        (LINES | {"end_of_line": "<e>"}, "the", "cat", ["the", "cat"]),
        (LINES | {"end_of_line": "<e>"}, "the\n", "cat", ["<e>", "<S>", "cat"]),
        (LINES | {"end_of_line": None}, "the", "cat", ["the", "cat"]),
        (LINES | {"end_of_line": None}, "the\n ", "cat", ["the", "<S>", "cat"]),
        (LINES | {"end_of_line": "<S>"}, "", "cat", ["<S>", "cat"]),
        (LINES | {"end_of_line": "<S>"}, "the", [0, 4], ["the", "<S>", "cat"]),  # ids are as given
    ],
)
def test_a_text_goes_on_in_the_line_of_its_context(
    options: dict[str, Any], context: Any, text: Any, fed: list[str]
) -> None:
    """It is encoded as a text generated after a prompt is: the symbol before a line stands there once."""
    symbols = ["<S>", "<UNK>", "<e>", "the", "cat"]
    session = Counting()
    session.vocab = WordVocab(symbols, **options)
    (score,) = score_texts(session, [TextToScore(text=text, context=context)])
    assert [symbols[token] for token in score.token_ids] == fed[1:]
    before = session.fed[-1][0][1]
    assert symbols[before] == fed[0]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_subwords(kind: str, tmp_path: Path) -> None:
    session = Counting()
    session.vocab = vocab = vocab_from_file(trained(kind, tmp_path))
    text = "the cät sat"
    ids = vocab.encode(text)
    first, after = len(decode(vocab, ids[:1])), vocab.special.after_text
    alone, whole, context = score_texts(
        session, [text, TextToScore(text=ids.tolist()), TextToScore(text=text, context="A dog.")], eos=True
    )
    assert alone.token_ids.tolist() == whole.token_ids.tolist() == [*ids[1:], after]
    assert context.token_ids.tolist() == [*ids, after]
    assert (alone.characters, alone.num_bytes) == (len(text) - first, len(text) + 1 - first)
    assert (context.characters, context.num_bytes) == (len(text), len(text) + 1)
    assert (whole.characters, whole.num_bytes) == (None, None)


def test_the_command_with_subwords(make_run: Callable[..., Path], tmp_path: Path) -> None:
    vocab = vocab_from_file(trained("byte-level", tmp_path))
    run = make_run(vocab_size=vocab.size)
    save_vocab(run, vocab)
    (tmp_path / "texts.txt").write_text("the cat sat\n")
    result = xl("score", run, "--input", tmp_path / "texts.txt", "--bos", "--eos", "--tokens", "--json")
    document = json.loads(result.stdout)
    ids = [token["id"] for token in document["token_log_probs"]]
    assert ids == [*vocab.encode("the cat sat"), vocab.special.end_of_document]
    assert "".join(token["text"] for token in document["token_log_probs"][:-1]) == "the cat sat"
    assert (document["characters"], document["tokens"]) == (11, len(ids))
    assert "unknown" not in result.stderr
