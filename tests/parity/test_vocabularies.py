"""Texts and ids in C++ and JavaScript are those of Python, on random Unicode."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import TextError
from runtimes.contract.vocabulary import Vocab, load_vocab, save_vocab
from tests.cpp.program import ROOT, with_vocabulary
from tests.decoding import pieces_and_rest, random_ids
from tests.parity.operations import Program
from tests.web.cases import random_texts, vocabularies

TALES = ROOT / "examples" / "stories" / "tales"
NOT_IN_CPP = ("byte-level-prefix", "byte-level-added", "pattern", "byte-fallback", "unigram")
KINDS = (
    *("byte", "byte-values", "char", "word", "word-lines", "word-no-lines", "ids", "ids-names"),
    *("tales", "byte-level", "characters", *NOT_IN_CPP),
)
WHITE = (0x09, 0x0A, 0x0B, 0x1C, 0x1F, 0x20, 0x20, 0x85, 0xA0, 0x200B, 0x2028, 0x3000, 0x2581)
WORDS = (" the", " The", "'ll", " 's", "'re", "   ", "<s>", "</s>", "<s", " 12", "１２", " don't", "ſ", "▁▁a")


@pytest.fixture(params=["cpp", "javascript"])
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = request.getfixturevalue(request.param)
    return found


@functools.cache
def wild_texts(count: int) -> list[str]:
    """Texts of ASCII, white space of every kind, letters of all scripts, and any other characters."""
    draw, texts = np.random.default_rng(0), []
    for _ in range(count):
        text = ""
        for _ in range(draw.integers(1, 120)):
            low, high = ((32, 127), (0x80, 0x3000), (0x3000, 0x20000), (1, 0x110000))[draw.integers(4)]
            code = int(draw.choice(WHITE)) if draw.random() < 0.25 else int(draw.integers(low, high))
            text += "a" if 0xD800 <= code < 0xE000 else chr(code)
            if draw.random() < 0.3:
                text += WORDS[draw.integers(len(WORDS))]
        texts.append(text)
    return texts


@pytest.mark.parametrize("name", KINDS)
def test_ids_and_texts_are_python_s(
    name: str, program: Program, text: str, tmp_path: Path, cpp: Program
) -> None:
    vocab: Vocab = load_vocab(TALES / "vocab.json") if name == "tales" else vocabularies(text)[name]
    save_vocab(tmp_path, vocab)
    assert program.ask("vocabulary", folder=str(tmp_path), size=vocab.size) == {"size": vocab.size}
    if program is cpp and name in NOT_IN_CPP:
        assert "does not compute" in program.refusal("encode", text="a")
        return
    texts = [
        *random_texts(60),
        *wild_texts(25),
        "the cat naïve 🙂",
        "THE CAT\n\nthe\n",
        "a\0b",
        "1 0\n007 2",
        "12345678901",
        "",
    ]
    encodable = []
    for each in texts:
        try:
            ids = vocab.encode(each.encode()).tolist()
        except TextError:
            program.refusal("encode", text=each)
            continue
        if program is cpp and name == "word" and not each.isascii():
            assert "lower-cases ASCII only" in program.refusal("encode", text=each)
        else:
            assert program.ask("encode", text=each)["tokens"] == ids, each
            encodable.append(each)
    for ids in random_ids(vocab, encodable, 80):
        assert program.ask("decode", tokens=ids) == {"pieces": pieces_and_rest(vocab, ids)}, ids


UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"kind": "byte", "values": [97, 98]}, "ab c", "byte"),
    ({"kind": "char", "symbols": ["a", "b"]}, "ab☃", "character 3 of the text"),
    ({"kind": "ids", "size": 2, "names": ["x", "y"]}, "x z", "word 2 of the text"),
    ({"kind": "ids", "size": 4}, "3 4", "word 2 of the text"),
    ({"kind": "word", "symbols": ["<unk>", "<eos>"]}, "a\0b", "NUL"),
    ({"kind": "word", "symbols": ["a", "<eos>"]}, "a z", "token 2 of the text"),
]


@pytest.mark.parametrize(("document", "text", "words"), UNKNOWN, ids=lambda each: str(each)[:20])
def test_what_a_vocabulary_lacks_is_named(
    document: dict[str, Any], text: str, words: str, program: Program, tmp_path: Path
) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(document))
    program.ask("vocabulary", folder=str(tmp_path), size=4)
    assert re.search(words, program.refusal("encode", text=text))


def test_cpp_takes_ids_of_subwords_that_it_cannot_compute(
    cpp: Program, model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model("subwords, zeros")
    file = json.loads((folder / "tokenizer.json").read_text())
    document = json.loads((folder / "vocab.json").read_text())
    changes: dict[str, Any] = {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordPiece"},
        "decoder": {"add_prefix_space": False},
        "added_tokens": [{"content": "<s>"}],
    }
    for name, change in changes.items():
        content = json.dumps({**file, name: change}).encode()
        own = {**document, "sha256": hashlib.sha256(content).hexdigest()}
        cpp.ask("open", model=str(with_vocabulary(folder, tmp_path / name, own, tokenizer_json=content)))
        cpp.ask("start", stream="a")
        question: dict[str, Any] = {"stream": "a", "tokens": [5], "max_tokens": 2}
        assert "does not compute" in cpp.refusal("encode", text="a")
        assert "does not compute" in cpp.refusal("generate", **question)
        assert len(cpp.ask("generate", ids_only=True, **question)["tokens"]) == 2
