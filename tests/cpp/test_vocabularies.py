"""The C++ vocabularies give the ids and the text of the Python package, on random Unicode too."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.contract.vocabulary import Vocab, load_vocab
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.generate import generate
from tests.cpp.program import ROOT, Driver
from tests.decoding import pieces_and_rest, random_ids
from tests.sealing import sealed

TALES = ROOT / "examples" / "stories" / "tales"
WHITE = (0x09, 0x0A, 0x0B, 0x1C, 0x1F, 0x20, 0x20, 0x85, 0xA0, 0x200B, 0x2028, 0x3000, 0x2581)


def with_vocabulary(artefact: Path, folder: Path, vocabulary: dict[str, Any], **files: bytes) -> Path:
    """A copy of an artefact with another vocabulary, its hashes and its digest right."""
    shutil.copytree(artefact, folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_bytes(sealed(spec, folder, *spec["files"]))
    return folder


def random_texts(count: int, words: Sequence[str] = ()) -> list[str]:
    """Texts of ASCII, white space of every kind, letters of all scripts, and any other characters."""
    draw, texts = np.random.default_rng(0), []
    for _ in range(count):
        text = ""
        for _ in range(draw.integers(1, 120)):
            low, high = ((32, 127), (0x80, 0x3000), (0x3000, 0x20000), (1, 0x110000))[draw.integers(4)]
            code = int(draw.choice(WHITE)) if draw.random() < 0.25 else int(draw.integers(low, high))
            text += "a" if 0xD800 <= code < 0xE000 else chr(code)
            if words and draw.random() < 0.3:
                text += words[draw.integers(len(words))]
        texts.append(text)
    return texts


def compare(driver: Driver, folder: Path, vocab: Vocab, texts: Sequence[str]) -> None:
    for text in texts:
        assert driver.ask("encode", folder, text=text) == {"ids": vocab.encode(text).tolist()}, text
    for ids in random_ids(vocab, texts, 4 * len(texts)):
        assert driver.ask("decode", folder, ids=ids) == {"pieces": pieces_and_rest(vocab, ids)}, ids


def test_bytes_characters_words_and_ids(driver: Driver, artefacts: dict[str, Path], tmp_path: Path) -> None:
    symbols = json.loads((artefacts["ring"] / "vocab.json").read_text())["symbols"]
    size = len(symbols)
    names = [f"w{number}é" for number in range(size - 3)]
    documents: dict[str, dict[str, Any]] = {
        "byte": {"kind": "byte", "values": [*range(255, 255 - size + 1, -1), 10], "skipped": [13, 0]},
        "char": {"kind": "char", "symbols": symbols},
        "word": {"kind": "word", "symbols": ["<unk>", "<eos>", "▁", *names]},
        "lines": {
            "kind": "word",
            "symbols": ["<unk>", "<s>", "</s>", *names],
            "end_of_line": "</s>",
            "start_of_line": "<s>",
        },
        "no lines": {"kind": "word", "symbols": ["<unk>", "b", "c", *names], "end_of_line": None},
        "names": {"kind": "ids", "size": size, "names": ["x", "y", "z", *names]},
    }
    for name, document in documents.items():
        folder = with_vocabulary(artefacts["ring"], tmp_path / name, document)
        vocab = load_vocab(folder / "vocab.json")
        if document["kind"] == "word":
            texts = random_texts(25, words=[f" {word}\n" for word in names[:9]])
        elif name == "names":
            texts = [" ".join(names[::7]), "x\u3000y\n z"]
        else:
            texts = ["", "".join(symbols) if name == "char" else "\n\r\n\r"]
        compare(driver, folder, vocab, texts)
    unknown = [
        ("byte", "a b", "byte"),
        ("char", f"{symbols[0]}☃", "character 2 of the text"),
        ("names", "x nothing", "word 2 of the text"),
        ("word", "a\0b", "NUL"),
    ]
    for name, text, words in unknown:
        assert words in driver.refusal("encode", tmp_path / name, text=text)
    plain = with_vocabulary(artefacts["ring"], tmp_path / "plain", {"kind": "ids", "size": size})
    compare(driver, plain, load_vocab(plain / "vocab.json"), [])
    assert driver.ask("decode", plain, ids=[3, 0]) == {"pieces": ["3", " 0", ""]}
    assert "takes token ids" in driver.refusal("encode", plain, text="a")


def test_texts_that_end_inside_of_a_character(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    size = len(json.loads((artefacts["ring"] / "vocab.json").read_text())["symbols"])
    document = {"kind": "byte", "values": list(range(0xE2, 0xE2 - size, -1))}
    folder = with_vocabulary(artefacts["ring"], tmp_path / "byte", document)
    session = OrtSession.open(folder, threads=1, kernel="standard")
    texts = []
    for seed in range(30):
        for stop in ([], ["\ufffd\ufffd"]):
            pieces = list(generate(session, [[3]], max_tokens=2 + seed % 5, seed=seed, stop=stop))
            found = driver.ask(
                "generate", folder, ids=[3], tokens=2 + seed % 5, temperature=1, seed=seed, stop=stop
            )
            assert found["ids"] == [piece.token for piece in pieces]
            assert found["pieces"] == [piece.text for piece in pieces]
            texts.append(("".join(found["pieces"]), found["ids"]))
    assert any(session.vocab.values[ids[-1]] >= 0xC2 and text for text, ids in texts)


def test_subwords_over_bytes(driver: Driver) -> None:
    pytest.importorskip("tokenizers")
    words = [" the", " The", "'ll", " 's", "'re", "   ", "<s>", "</s>", "<s", " 12", "１２", " don't", "ſ"]
    compare(driver, TALES, load_vocab(TALES / "vocab.json"), random_texts(60, words))


def test_subwords_over_characters(driver: Driver, tmp_path: Path, text: str) -> None:
    pytest.importorskip("tokenizers")
    from trainer.data.subwords import learn_subwords

    learned = learn_subwords("bpe", 400, lambda: iter([text[:20_000]]))
    document = {**learned.to_json(), "size": 2560}
    content = learned.files["tokenizer.json"]
    folder = with_vocabulary(TALES, tmp_path / "bpe", document, tokenizer_json=content)
    words = [text[at : at + 30] for at in range(0, 900, 30)]
    compare(driver, folder, load_vocab(folder / "vocab.json"), random_texts(40, [*words, "▁", "▁▁a"]))


def test_other_subwords_take_ids_alone_and_say_so(driver: Driver, tmp_path: Path) -> None:
    file = json.loads((TALES / "tokenizer.json").read_text())
    document = json.loads((TALES / "vocab.json").read_text())
    changes: dict[str, Any] = {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordPiece"},
        "decoder": {"add_prefix_space": False},  # older releases write other fields
        "added_tokens": [{"content": "<s>"}],
    }
    for name, change in changes.items():
        content = json.dumps({**file, name: change}).encode()
        own = {**document, "sha256": hashlib.sha256(content).hexdigest()}
        folder = with_vocabulary(TALES, tmp_path / name, own, tokenizer_json=content)
        assert "does not compute" in driver.refusal("encode", folder, text="a")
        assert "does not compute" in driver.refusal("generate", folder, ids=[5], tokens=2)
        assert len(driver.ask("generate", folder, ids=[5], tokens=2, text=False)["ids"]) == 2
