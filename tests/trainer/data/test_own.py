"""Own files as datasets: the same ids as of the whole text, documents and their ends, parts that are cut
off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from runtimes.base.errors import ConfigError, TextError, UserError
from runtimes.contract.vocabulary import decode, vocab_from_file
from tests.commands import json_of, xl
from trainer.data import published, subwords
from trainer.data.dataset import Dataset, open_dataset, write_part
from trainer.data.own import OwnFiles
from trainer.data.own_ids import ids_vocab, prepare_ids
from trainer.data.own_text import Documents, prepare_text
from trainer.data.subwords import SubwordKind, cut_line, learn_subwords

SOME = "the cat sat on the mat\nthe dog  sat, too: ééé 😀\n\n the end\n" * 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vocabulary of bytes and pairs of them, with an end of document."""
    path = tmp_path_factory.mktemp("vocab") / "tokenizer.json"
    vocab = learn_subwords("byte-bpe", 300, lambda: iter([SOME]))
    path.write_bytes(vocab.content)
    return path


def write(path: Path, content: str | bytes | np.ndarray) -> Path:
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def ids(folder: Path, *files: Path, size: int = 9, end: int | None = None, **options: str) -> Dataset:
    vocab = ids_vocab(size, names=None, end_of_document=end)
    held_out = write(folder / "held.npy", np.array([1, 2]))
    parts = OwnFiles(train=files, valid=[held_out], test=[held_out])
    prepare_ids(parts, folder / "out", vocab=vocab, **options)  # type: ignore[arg-type]
    return open_dataset(folder / "out")


def text(folder: Path, train: str, *, vocab: str | Path, documents: Documents = "file") -> Dataset:
    files = {name: write(folder / name, train) for name in ("a.txt", "b.txt", "c.txt")}
    parts = OwnFiles(train=[files["a.txt"], files["b.txt"]], valid=[files["b.txt"]], test=[files["c.txt"]])
    prepare_text(parts, folder / "out", vocab=str(vocab), documents=documents)
    return open_dataset(folder / "out")


def test_files_of_ids_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.own_ids.IDS_PER_CHECK", 2)  # several blocks
    first = write(tmp_path / "a.npy", np.array([3, 4, 5], np.int64))
    second = write(tmp_path / "b.bin", np.array([6, 7], "<u4").tobytes())
    dataset = ids(tmp_path, first, second, dtype="uint32")
    assert dataset.train.tolist() == [3, 4, 5, 6, 7]
    assert (dataset.facts.corpus, dataset.facts.vocab_size) == ("own ids", 9)
    assert list(dataset.facts.sources) == ["train/a.npy", "train/b.bin", "valid/held.npy", "test/held.npy"]


def test_documents_end_with_their_token_once(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", "[3, 4]\n[]\n[5, 0]\n")
    rows = write(tmp_path / "b.npy", np.array([[6, 7], [8, 0]]))
    whole = write(tmp_path / "c.npy", np.array([1, 1]))
    dataset = ids(tmp_path, lines, rows, whole, end=0)
    assert dataset.train.tolist() == [3, 4, 0, 5, 0, 6, 7, 0, 8, 0, 1, 1, 0]
    assert dataset.vocab.special.end_of_document == 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npy", np.array([1, 9]), r"a\.npy has the token id 9 at index 1, outside the vocabulary \(0"),
        ("a.npy", np.array([1, -1]), r"the token id -1 at index 1"),
        ("a.jsonl", "[1]\n[2, 3, 10]\n", r"a\.jsonl, document 2, has the token id 10 at index 2"),
        ("a.csv", "1 2 3", "no file of token ids.*xl-export prepare text"),
        ("a.txt", "1 2,9", r"a\.txt has the token id 9 at index 2, outside the vocabulary"),
    ],
)
def test_what_is_wrong_with_ids_is_told(
    name: str, content: str | np.ndarray, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.own_ids.IDS_PER_CHECK", 1)  # one block for each id
    with pytest.raises(TextError, match=words):
        ids(tmp_path, write(tmp_path / name, content), end=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "[1]\n"), ("a.npy", np.array([[1, 2]]))])
def test_documents_need_a_token_between_them(name: str, content: str | np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one document a (line|row).*give --end-of-document ID"):
        ids(tmp_path, write(tmp_path / name, content))


def test_names_and_sizes_must_fit(tmp_path: Path) -> None:
    lines = write(tmp_path / "names.txt", "C4\nD4\nE4\n")
    listed = write(tmp_path / "names.json", json.dumps(["C4", "D4", "E4"]))
    bracket = ids_vocab(2, names=write(tmp_path / "pad.txt", "[PAD]\nC4\n"), end_of_document=None)
    assert bracket.names == ["[PAD]", "C4"]  # no JSON
    for path in (lines, listed):
        vocab = ids_vocab(None, names=path, end_of_document=2)
        assert (vocab.size, vocab.encode("E4 C4").tolist()) == (3, [2, 0])
    for path, size, end, words in (
        (lines, 4, None, "has 3 names and --vocab-size is 4"),
        (lines, 3, 3, "the ids 0 to 2; .* give --vocab-size 4"),
        (None, None, None, "give --vocab-size, or --names"),
        (write(tmp_path / "two.txt", "C4\nC4\n"), 2, None, "names repeat"),
    ):
        with pytest.raises(ConfigError, match=words):
            ids_vocab(size, names=path, end_of_document=end)


@pytest.mark.parametrize(
    ("stream", "end", "cuts", "note"),
    [
        (np.tile([1, 2, 3, 0, 4], 40), 0, (184, 194), "at the end of a document or line"),  # after each 0
        (np.tile([1, 2, 3, 0, 4], 40), None, (180, 190), "at any token"),
        (np.array([1] * 199 + [0]), 0, (180, 190), "at any token"),  # the only end leaves nothing
    ],
)
def test_held_out_parts_begin_after_a_document(
    stream: np.ndarray, end: int | None, cuts: tuple[int, int], note: str, tmp_path: Path
) -> None:
    train = write(tmp_path / "a.npy", stream)
    vocab = ids_vocab(9, names=None, end_of_document=end)
    if end is not None and stream[-1] != end:
        stream = np.append(stream, end)
    prepared = prepare_ids(OwnFiles(train=[train]), tmp_path / "out", vocab=vocab)
    dataset = open_dataset(tmp_path / "out")
    parts = [part.tolist() for part in (dataset.train, dataset.valid, dataset.test)]
    assert [*parts[0], *parts[1], *parts[2]] == stream.tolist()
    assert (len(parts[0]), len(parts[0] + parts[1])) == cuts
    assert prepared.notes[0] == (
        f"the valid and test parts were not given and are the last 10 % of the training ids, cut {note}"
    )


def test_an_unknown_id_is_never_written_as_another(tmp_path: Path) -> None:
    for wrong in (65_536, -1):
        with pytest.raises(
            TextError, match=f"gives the token id {wrong} for a text and has the ids 0 to 299"
        ):
            write_part(tmp_path / "train.bin", [np.array([1, wrong])], 300)


@pytest.mark.parametrize("vocab", ["byte", "char", "word", "subword"])
def test_blocks_of_a_text_have_its_ids(
    vocab: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "BLOCK_BYTES", 7)  # cuts words, lines and characters
    monkeypatch.setattr("runtimes.contract.vocabulary.subword.PIECE_CHARACTERS", 100)
    dataset = text(tmp_path, SOME, vocab=tokenizer if vocab == "subword" else vocab)
    whole = dataset.vocab.encode(SOME).tolist()
    end = [2] if vocab == "subword" else []
    assert dataset.train.tolist() == (whole + end) * 2
    assert dataset.valid.tolist() == whole + end


def test_each_line_and_each_json_text_is_a_document(tokenizer: Path, tmp_path: Path) -> None:
    vocab = vocab_from_file(tokenizer)
    expected = [*vocab.encode("one"), 2, *vocab.encode(" two "), 2]
    for documents, content in (
        ("line", "one\r\n\n two \n"),
        ("jsonl", '{"text": "one"}\n\n {"text": " two ", "id": 3}'),
    ):
        folder = tmp_path / documents
        folder.mkdir()
        dataset = text(folder, content, vocab=tokenizer, documents=documents)  # type: ignore[arg-type]
        assert dataset.valid.tolist() == expected


def test_without_an_end_token_documents_end_with_a_newline(tmp_path: Path) -> None:
    dataset = text(tmp_path, '{"text": "one two"}\n{"text": "one\\n"}\n', vocab="char", documents="jsonl")
    assert decode(dataset.vocab, dataset.valid) == "one two\none\n"
    (tmp_path / "words").mkdir()
    dataset = text(tmp_path / "words", "one two\n\none", vocab="word", documents="line")
    assert decode(dataset.vocab, dataset.valid) == "one two\n\none\n"


def test_lines_of_bytes_need_not_be_utf8(tmp_path: Path) -> None:
    train = write(tmp_path / "a.txt", b"caf\xe9 one\r\n\ntwo")
    files = OwnFiles(train=[train], valid=[train], test=[train])
    prepare_text(files, tmp_path / "out", vocab="byte", documents="line")
    assert bytes(open_dataset(tmp_path / "out").train) == b"caf\xe9 one\n\ntwo\n"


@pytest.mark.parametrize(
    ("content", "vocab", "documents", "words"),
    [
        (b"ab\xffc", "char", "file", r"line 1 of .*a\.txt is not UTF-8 \(byte 0xff\)"),
        (b'{"txt": "a"}', "char", "jsonl", "line 1 has no text"),
        (b'{"text": "\\ud800"}', "char", "jsonl", "line 1 has no text"),
        (b'{"text": "a"', "char", "jsonl", "line 1 is not JSON"),
        (b"a", "char", "file", "the train part has 0 tokens, too few to predict one; give more"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(
    content: bytes,
    vocab: str,
    documents: Documents,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(published, "BLOCK_BYTES", 4)
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(UserError, match=words):
        prepare_text(OwnFiles(train=[path]), tmp_path / "out", vocab=vocab, documents=documents)
    assert not (tmp_path / "out").exists()


def test_an_unknown_symbol_is_named_with_its_place(tmp_path: Path) -> None:
    vocab = write(tmp_path / "vocab.json", json.dumps({"kind": "char", "symbols": ["a", "\n"]}))
    path = write(tmp_path / "a.txt", "aa\nab\n")
    files = OwnFiles(train=[path], valid=[path], test=[path])
    with pytest.raises(TextError, match=r"a\.txt: line 2: 'b', character 2 of the text"):
        prepare_text(files, tmp_path / "out", vocab=str(vocab), documents="line")


@pytest.mark.parametrize("kind", get_args(SubwordKind))
def test_learned_subwords_are_deterministic_and_lossless(kind: SubwordKind) -> None:
    lines = SOME.splitlines(keepends=True)
    size = {"unigram": 25, "sentencepiece": 280}.get(kind, 300)
    first, second = (learn_subwords(kind, size, lambda: iter(lines)) for _ in range(2))
    assert first.content == second.content
    assert first.size <= size
    assert first.special.to_json() == {"unknown": 0, "beginning": 1, "end_of_document": 2, "padding": 3}
    again = decode(first, first.encode(SOME))
    assert again == SOME or (
        kind == "wordpiece" and again.startswith("the cat sat on the mat the dog sat, too")
    )


@pytest.mark.parametrize("marks", ["< / > ", ""])
@pytest.mark.parametrize("kind", get_args(SubwordKind))
def test_text_never_becomes_a_special_token(kind: SubwordKind, marks: str) -> None:
    size = {"unigram": 30, "sentencepiece": 285}.get(kind, 300) - (0 if marks else 3)
    vocab = learn_subwords(kind, size, lambda: iter([f"{SOME}\n {marks}s p a d u n k b\n"]))
    ids = set(vocab.encode("a </s>b<pad> <s> <unk>").tolist())
    assert not ids & ({0, 1, 2, 3} if marks else {1, 2, 3})  # 0 is for what is unknown


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("bpe", 9, "of 9 tokens was asked for, and the text needs .* for its single symbols"),
        ("unigram", 9, "the size 9 could be made .*smaller than required"),
        ("sentencepiece", 2, "the size 2 could be made"),
    ],
)
def test_impossible_vocabulary_sizes_are_refused(kind: SubwordKind, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        learn_subwords(kind, size, lambda: iter([SOME]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), TextError("line 3 is not UTF-8.")])
@pytest.mark.parametrize("kind", get_args(SubwordKind))
def test_an_interrupt_and_a_fault_of_the_text_end_the_learning(
    kind: SubwordKind, error: BaseException
) -> None:
    def texts() -> Iterator[str]:
        yield SOME
        raise error

    with pytest.raises(type(error)) as caught:
        learn_subwords(kind, 300, texts)
    assert str(caught.value) == str(error)


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(143), SystemExit),
        (type("PanicException", (BaseException,), {})("rust"), ConfigError),
        (RuntimeError("C++"), ConfigError),
    ],
)
def test_only_what_a_library_raises_becomes_a_sentence(
    error: BaseException, becomes: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(size: int, texts: Any) -> bytes:
        raise error

    monkeypatch.setattr(subwords, "_bpe", fails)
    with pytest.raises(becomes):
        learn_subwords("bpe", 300, lambda: iter([SOME]))


@pytest.mark.parametrize("blank", [" ", "x"])
def test_long_lines_are_learned_from_too(blank: str) -> None:
    line = f"{'é' * 7}{blank}" * 5_000
    parts = list(cut_line(line))
    assert "".join(parts) == line
    assert max(len(part.encode()) for part in parts) <= subwords.LONGEST_SENTENCE
    assert all(part.startswith(" ") for part in parts[1:]) == (blank == " ")
    vocab = learn_subwords("unigram", 10, lambda: iter(["ab\n" * 9 + line]))
    assert vocab.special.unknown not in vocab.encode("éé")


def tokens_command(folder: Path, *train: object, size: int = 60) -> list[object]:
    files = [word for path in train for word in ("--train", path)]
    return ["prepare", "tokens", *files, "--vocab-size", size, "--out", folder / "out"]


@pytest.mark.parametrize("end", [None, 0])
def test_a_text_file_of_numbers_is_one_stream(
    end: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtimes.contract.id_files.TEXT_BLOCK_BYTES", 5)  # several blocks
    stream = [1 + i % 59 for i in range(100)]
    lines = [" ".join(map(str, stream[at : at + 7])) for at in range(0, 100, 7)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    ends = [] if end is None else ["--end-of-document", end]
    made = json_of(xl(*tokens_command(tmp_path, tmp_path / "lines.txt"), *ends, "--json"))
    assert sum(made["tokens"].values()) == 100 + len(ends[1:])
    dataset = open_dataset(tmp_path / "out")
    parts = [part.tolist() for part in (dataset.train, dataset.valid, dataset.test)]
    assert [*parts[0], *parts[1], *parts[2]] == stream + ends[1:]


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", "1 2 0\n3 4\n" * 20), ("a.jsonl", "[1, 0, 2]\n" * 20)]
)
def test_an_end_of_document_that_is_also_data_is_noted(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    made = json_of(xl(*tokens_command(tmp_path, tmp_path / name), "--end-of-document", 0, "--json"))
    notes = " ".join(made["notes"])
    assert f"{name} has 0, the end of a document, 20 times before the end of its documents" in notes
