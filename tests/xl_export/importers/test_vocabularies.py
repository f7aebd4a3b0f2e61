"""Vocabularies of other projects: the same ids for the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from runtimes.base.errors import ArtefactError
from runtimes.contract.vocabulary import ByteVocab, CharVocab, IdsVocab, Vocab, WordVocab, decode
from tests.xl_export.importers.oracles import DATA, NAMES
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.shared.vocabularies import ReadVocabulary, read_vocabulary, translated, vocabulary

FILES = {
    "kimiyoung-enwik8": "cache.pt",
    "kimiyoung-wt103-large": "cache.pt",
    "kimiyoung-ptb-full-mask": "cache.pt",
    "nvidia-wt103-base": "cache.pt",
    "adaptive-span-enwik8": "corpus.pt",
    "adaptive-span-persistent": "corpus.pt",
    "hf-wt103": "pretrained/vocab.pkl",
}


def symbol_of(vocab: Vocab, token: int) -> str:
    """The symbol that the project has for one of our tokens."""
    if isinstance(vocab, ByteVocab):
        return "<eos>" if vocab.values[token] == 10 else str(vocab.values[token])
    assert isinstance(vocab, WordVocab)
    return vocab.symbols[token]


@pytest.mark.parametrize("name", NAMES)
def test_ids_mean_what_they_mean_in_the_oracle(name: str) -> None:
    facts = json.loads((DATA / name / "config.json").read_text())
    probe = facts["vocab_probe"]
    vocab = read_vocabulary(DATA / name / FILES[name], size=probe["size"]).vocab
    assert [symbol_of(vocab, token) for token in probe["ids"]] == probe["symbols"]
    assert vocab.size == probe["size"]


@pytest.mark.parametrize(
    "name", ["kimiyoung-enwik8", "adaptive-span-enwik8", "kimiyoung-wt103-large", "kimiyoung-ptb-full-mask"]
)
def test_a_text_gets_the_ids_of_its_project(name: str) -> None:
    """The test split as its project stored it, decoded to text and encoded again by our vocabulary."""
    corpus = read_pickle(DATA / name / FILES[name]).state
    size = json.loads((DATA / name / "config.json").read_text())["vocab_probe"]["size"]
    vocab = read_vocabulary(DATA / name / FILES[name], size=size).vocab
    ids = corpus["test"].tolist()
    assert vocab.encode(decode(vocab, ids)).tolist() == ids


@pytest.mark.parametrize(
    ("symbols", "lower_case", "kind", "text", "ids", "again"),
    [
        (["104", "<eos>", "105"], True, ByteVocab, "hi\ni\n", [0, 2, 1, 2, 1], "hi\ni\n"),
        (["104", "105"], True, ByteVocab, "hi\ni\n", [0, 1, 1], "hii"),  # newlines are left out
        (["_", "a", "b", "<eos>"], True, CharVocab, "a b\n", [1, 0, 2, 3], "a b\n"),  # _ is a blank
        (["<eos>", "<unk>", "the"], True, WordVocab, "The cat\n", [2, 1, 0], "the <unk>\n"),
        (["<eos>", "<unk>", "the"], False, WordVocab, "The\n", [1, 0], "<unk>\n"),
        (["<S>", "<UNK>", "the"], False, WordVocab, "a\nthe\n", [0, 1, 0, 0, 2, 0], "<UNK>\nthe\n"),
        (["_", " "], False, WordVocab, "_", [0], "_"),  # ambiguous symbols are words
        (["<eos>", "\n"], False, WordVocab, "\n", [0], "\n"),
        (["1" * 5000, "2"], False, WordVocab, "2", [1], "2"),
        (["256", "2"], False, WordVocab, "2", [1], "2"),
    ],
)  # fmt: skip
def test_symbols_become_a_vocabulary_of_their_kind(
    symbols: list[str], lower_case: bool, kind: type, text: str, ids: list[int], again: str
) -> None:
    vocab = translated(symbols, lower_case=lower_case).vocab
    assert isinstance(vocab, kind)
    assert vocab.encode(text.encode() if kind is ByteVocab else text).tolist() == ids
    assert decode(vocab, ids) == again


def test_a_list_of_words_is_read_as_projects_do(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("<UNK> 12\n the 3\n<S>\n")
    vocab = read_vocabulary(tmp_path / "vocab.txt", size=3).vocab
    assert isinstance(vocab, WordVocab)
    assert vocab.symbols == ["<UNK>", "the", "<S>"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "is not a vocabulary"),
        (["a", ""], "is not a vocabulary"),
        ({"idx2sym": torch.zeros(3)}, "is not a vocabulary"),
        ({"vocab": 3}, "is not a vocabulary"),
        (["a", "a"], "its symbols repeat"),
        (["a", "\ud800"], "is not Unicode"),
        (["a", "b", "c"], "has 3 symbols and the model 2"),
    ],
)
def test_what_is_no_vocabulary_of_the_model_is_refused(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=words):
        vocabulary(content, where=tmp_path / "cache.pt", size=2)


def test_the_word_ids_is_a_vocabulary_of_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids").write_bytes(b"a file of the user")
    found = read_vocabulary(Path("ids"), size=300)
    assert found.vocab.to_json() == IdsVocab(300).to_json()
    assert "they are numbers" in found.notes[0]


def test_ids_may_have_special_tokens_in_a_file(tmp_path: Path) -> None:
    content = {"kind": "ids", "size": 83, "special": {"end_of_document": 0}}
    (tmp_path / "vocab.json").write_text(json.dumps(content))
    assert read_vocabulary(tmp_path / "vocab.json", size=83).vocab.special.end_of_document == 0
    guide = Path(__file__).parents[3] / "docs" / "guides" / "own-checkpoint.md"
    assert json.loads(guide.read_text().split("```json\n")[1].split("```")[0]) == content


def test_a_tokenizer_may_have_fewer_tokens_than_the_model(tmp_path: Path) -> None:
    """As far as projects round up: by less than a tenth, and by fewer than 1,024."""

    def read(count: int, size: int) -> ReadVocabulary:
        words = {"a": 0, "b": 1, "<unk>": 2} | {f"word{i}": i for i in range(3, count)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return read_vocabulary(tmp_path / "tokenizer.json", size=size)

    found = read(46, 50)
    assert (found.vocab.size, found.vocab.special.unknown) == (50, 2)
    assert found.vocab.encode("b a c").tolist() == [1, 0, 2]
    assert "the last 4 of the model's 50 tokens" in found.notes[0]
    assert read(46, 46).notes == ()
    assert read(19_977, 21_000).notes
    for count, size in ((3, 2), (45, 50), (3, 50_000), (19_976, 21_000)):
        with pytest.raises(ArtefactError, match=f"has {count:,} symbols and the model {size:,}; name "):
            read(count, size)
