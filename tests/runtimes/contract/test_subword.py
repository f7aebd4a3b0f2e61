"""Subword vocabularies: the library's own ids and text, saved, streamed, and files that are none."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtimes.base.errors import ArtefactError, MissingPackageError, TextError
from runtimes.contract.tokens import ReadText, TextSize, predicted_size
from runtimes.contract.vocabulary import (
    SpecialTokens,
    SubwordVocab,
    decode,
    load_vocab,
    save_vocab,
    vocab_from_file,
)
from runtimes.contract.vocabulary import subword as module

TEXT = "the cat sat on the mat\nthe dog sat on the log, the cat — naïve 🙂 — ran\n" * 40
KINDS = ["byte-level", "unigram", "wordpiece", "sentencepiece"]


def trained(kind: str, folder: Path) -> Path:
    """The file of a small vocabulary, trained by its own library."""
    if kind == "sentencepiece":
        stream = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines()),
            model_writer=stream,
            vocab_size=280,
            byte_fallback=True,
            minloglevel=2,
        )
        (folder / "small.model").write_bytes(stream.getvalue())
        return folder / "small.model"
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=100, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=100, special_tokens=["[UNK]", "[PAD]"], show_progress=False
        )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.enable_truncation(3)  # a file that says so must not cut a text
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module", params=KINDS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(request.param, tmp_path_factory.mktemp("vocabulary"))


def test_ids_and_text_are_those_of_the_library(file: Path) -> None:
    vocab = vocab_from_file(file)
    ids = vocab.encode(TEXT)
    assert ids.dtype == np.int64
    if file.suffix == ".model":
        library = sentencepiece.SentencePieceProcessor(model_file=str(file))
        assert ids.tolist() == library.encode(TEXT)
        assert decode(vocab, ids) == library.decode(ids.tolist())
    else:
        library = Tokenizer.from_file(str(file))
        library.no_truncation()
        assert ids.tolist() == library.encode(TEXT, add_special_tokens=False).ids
        assert decode(vocab, ids) == library.decode(ids.tolist())


def test_a_long_text_is_encoded_without_pythons_lock(tmp_path: Path) -> None:
    """`Tokenizer.encode` of the library holds it, `encode_batch` does not."""
    vocab, batches = vocab_from_file(trained("byte-level", tmp_path)), []

    def encode_batch(texts: list[str], *, add_special_tokens: bool) -> list[SimpleNamespace]:
        batches.append((len(texts), add_special_tokens))
        return [SimpleNamespace(ids=[7]) for _ in texts]

    vocab._engine._tokenizer = SimpleNamespace(encode_batch=encode_batch)
    assert vocab.encode("a" * 50_000).tolist() == [7]
    assert batches == [(1, False)]


def test_a_saved_vocabulary_is_verified_when_loaded(file: Path, tmp_path: Path) -> None:
    vocab = vocab_from_file(file)
    save_vocab(tmp_path, vocab)
    again = load_vocab(tmp_path / "vocab.json")
    assert again.to_json() == vocab.to_json()
    assert again.special == vocab.special
    assert again.encode(TEXT).tolist() == vocab.encode(TEXT).tolist()
    name = module.FILES[vocab.library]
    (tmp_path / name).write_bytes(vocab.content + b" ")
    with pytest.raises(ArtefactError, match=r"was altered: its SHA-256 is not the one in vocab\.json"):
        load_vocab(tmp_path / "vocab.json")
    (tmp_path / name).unlink()
    with pytest.raises(ArtefactError, match="is missing; copy the whole folder again"):
        load_vocab(tmp_path / "vocab.json")


@pytest.mark.parametrize(
    ("kind", "special"),
    [
        ("byte-level", SpecialTokens(end_of_document=0)),
        ("unigram", SpecialTokens(unknown=0, beginning=1, end_of_document=2)),
        ("wordpiece", SpecialTokens(unknown=0, padding=1)),
        ("sentencepiece", SpecialTokens(unknown=0, beginning=1, end_of_document=2)),
    ],
)
def test_special_tokens_are_found(kind: str, special: SpecialTokens, tmp_path: Path) -> None:
    assert vocab_from_file(trained(kind, tmp_path)).special == special


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"[M]": 0, "<unk>": 1, "the": 2}, unk_token="[M]"),
        models.BPE({"[M]": 0, "<unk>": 1, "t": 2}, [], unk_token="[M]"),
        models.WordPiece({"[M]": 0, "<unk>": 1, "the": 2}, unk_token="[M]"),
        models.Unigram([("the", -1.0), ("<unk>", -2.0), ("[M]", 0.0)], unk_id=2),
    ],
    ids=["WordLevel", "BPE", "WordPiece", "Unigram"],
)
def test_the_unknown_token_is_the_one_of_the_file(model: models.Model, tmp_path: Path) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert vocab_from_file(tmp_path / "tokenizer.json").special.unknown == tokenizer.token_to_id("[M]")


def test_special_tokens_come_from_the_files_of_transformers(tmp_path: Path) -> None:
    path = trained("unigram", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<s>"}}))
    assert vocab_from_file(path).special == SpecialTokens(unknown=0, beginning=1, end_of_document=1)


@pytest.mark.parametrize("kind", ["byte-level", "wordpiece", "sentencepiece"])
def test_a_long_text_is_encoded_in_pieces_that_end_lines(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = vocab_from_file(trained(kind, tmp_path))
    whole = vocab.encode(TEXT)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 100)
    assert list(module.pieces("a" * 60 + " " + "b" * 60 + "c" * 60)) == [
        "a" * 60,
        " " + "b" * 60 + "c" * 39,
        "c" * 21,
    ]
    assert next(module.pieces(TEXT)).endswith("\n")
    assert "".join(module.pieces(TEXT)) == TEXT
    assert vocab.encode(TEXT).tolist() == whole.tolist()


def test_ids_need_no_library(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = vocab_from_file(file)
    save_vocab(tmp_path, vocab)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    opened = load_vocab(tmp_path / "vocab.json")
    assert (opened.size, opened.special) == (vocab.size, vocab.special)
    with pytest.raises(MissingPackageError, match=r"is not installed .*pip install .*sentencepiece>"):
        opened.encode("the cat")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\0\1\2",
        b"some text",
        b'{"model": 3}',
        b'{"model": {"type": "BPE"}}',
        b'{"version": "1.0", "model": {"type": "Unigram", "unk_id": 7, "vocab": []}}',
        b'{"kind": "subword", "library": "other", "size": 3}',
        b'{"kind": "ids", "size": 0}',
        b'{"kind": "ids", "size": 2, "names": ["a", "a b"]}',
        b'{"kind": "ids", "size": 2, "special": {"end_of_document": 2}}',
        b'{"kind": "ids", "size": 2, "special": {"other": 1}}',
    ],
)
def test_other_files_are_refused_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(ArtefactError, match=r"some\.json is (no|not an? \w*) ?vocabulary") as caught:
        vocab_from_file(tmp_path / "some.json")
    assert "\n" not in str(caught.value)


def test_mutated_files_are_refused_or_read(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    draw = np.random.default_rng(0)
    for _ in range(60):
        damaged = content.copy()
        for at in draw.integers(0, len(content), 4):
            damaged[at] = draw.integers(256)
        (tmp_path / file.name).write_bytes(damaged)
        try:
            vocab = vocab_from_file(tmp_path / file.name)
            assert isinstance(vocab, SubwordVocab)
            decode(vocab, vocab.encode("the cat"))
        except ArtefactError:
            pass


def test_tokens_between_documents_have_no_text_that_counts(tmp_path: Path) -> None:
    vocab = vocab_from_file(trained("byte-level", tmp_path))
    end = vocab.special.end_of_document
    assert end is not None
    documents = [vocab.encode(text) for text in ("the cat", "the mat 🙂")]
    joined = np.concatenate([part for document in documents for part in (document, [end])])
    first = len(decode(vocab, joined[:1]))
    assert predicted_size(ReadText(joined), vocab) == TextSize(characters=16 - first, num_bytes=19 - first)


def test_figures_per_character_need_the_library(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = vocab_from_file(file)
    save_vocab(tmp_path, vocab)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert predicted_size(ReadText(np.arange(5)), load_vocab(tmp_path / "vocab.json")) is None


def test_one_token_for_everything_is_not_the_unknown_one(tmp_path: Path) -> None:
    path = trained("byte-level", tmp_path)
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    assert vocab_from_file(path).special == SpecialTokens(end_of_document=0, beginning=0)


def test_special_token_ids_come_from_the_library(tmp_path: Path) -> None:
    path = trained("byte-level", tmp_path)
    data = json.loads(path.read_text())
    data["added_tokens"].append(data["added_tokens"][0] | {"content": "<end>", "id": 3_000_000_000})
    path.write_text(json.dumps(data))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<no>"}))
    vocab = vocab_from_file(path)
    assert vocab.special.end_of_document == vocab.size - 1
    assert vocab.special.padding is None
    assert vocab.size < 3_000


def test_a_file_that_is_no_text_is_refused(file: Path) -> None:
    with pytest.raises(TextError, match="byte 1 of the text is NUL"):
        vocab_from_file(file).encode(b"a\0b")


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(143), SystemExit),
        (type("PanicException", (BaseException,), {})("rust"), ArtefactError),
        (RuntimeError("C++"), ArtefactError),
    ],
)
def test_only_what_a_library_raises_becomes_a_sentence(
    error: BaseException, becomes: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = module._Tokenizers(trained("byte-level", tmp_path).read_bytes())

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(library, "_tokenizer", SimpleNamespace(encode=fails))
    with pytest.raises(becomes):
        library.encode("the cat")
