"""Public corpora from the archives people have: parts, vocabularies, newlines, and every file that is not
what it should be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer.data.published
import trainer.data.text
from runtimes.base.errors import UserError
from runtimes.contract.vocabulary import WordVocab, decode
from tests.trainer.data.corpus_files import (
    ENWIK8,
    PTB,
    PUBLISHED,
    TEXT8,
    WIKI,
    make_folder,
    make_source,
    make_zip,
)
from trainer.data.corpora import CORPORA, Fingerprint
from trainer.data.dataset import SPLITS, Dataset, open_dataset
from trainer.data.prepare import prepare
from trainer.data.published import fingerprint

Prepare = Callable[..., Dataset]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """`prepared(name, source)`: the dataset of small files, which are not the published ones."""

    def make(name: str, source: Path, *, unverified: bool = True) -> Dataset:
        before = sorted(tmp_path.rglob("*"))
        try:
            prepare(name, source, tmp_path / "out", force=True, unverified=unverified)
        except UserError:
            assert sorted(tmp_path.rglob("*")) == before, "something was written"
            raise
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
            "data.json",
            "test.bin",
            "train.bin",
            "valid.bin",
            "vocab.json",
        ]
        return open_dataset(tmp_path / "out")

    return make


def refused(prepared: Prepare, name: str, source: Path, match: str, *, unverified: bool = True) -> None:
    with pytest.raises(UserError, match=match) as caught:
        prepared(name, source, unverified=unverified)
    assert "\n" not in str(caught.value)


def texts(dataset: Dataset) -> dict[str, str]:
    return {split: decode(dataset.vocab, getattr(dataset, split)) for split in SPLITS}


@pytest.mark.parametrize("form", ["zip", "file"])
def test_enwik8_is_its_bytes_cut_90_5_5(form: str, prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "enwik8-bare").write_bytes(ENWIK8)
    source = tmp_path / "enwik8-bare" if form == "file" else make_source(tmp_path / "in", "enwik8", form)
    dataset = prepared("enwik8", source)
    parts = [np.asarray(getattr(dataset, split)).tobytes() for split in SPLITS]
    assert b"".join(parts) == ENWIK8
    assert parts[0].count(b"\n") > 10
    assert [len(part) for part in parts] == [len(ENWIK8) * 90 // 100, *(len(part) for part in parts[1:])]
    assert len(parts[0]) + len(parts[1]) == len(ENWIK8) * 95 // 100
    assert (dataset.train.dtype, dataset.vocab.kind, dataset.vocab.size) == (np.uint8, "byte", 256)


def test_text8_has_27_characters(prepared: Prepare, tmp_path: Path) -> None:
    dataset = prepared("text8", make_source(tmp_path / "in", "text8", "tar"))
    assert "".join(texts(dataset).values()) == TEXT8.decode()
    assert (dataset.train.dtype, dataset.vocab.size) == (np.uint8, 27)
    assert np.array_equal(dataset.train, dataset.vocab.encode(TEXT8[: len(dataset.train)]))


def test_wikitext_words_are_ordered_by_frequency(prepared: Prepare, tmp_path: Path) -> None:
    vocab = prepared("wikitext-103", make_source(tmp_path / "in", "wikitext-103", "zip")).vocab
    assert isinstance(vocab, WordVocab)
    assert vocab.symbols[:5] == ["<eos>", "the", "film", "=", "Robert"]
    assert vocab.symbols.index("<unk>") == 6  # at its own frequency, as any word
    assert vocab.encode("the lobster\n").tolist() == [1, vocab.symbols.index("<unk>"), 0]


def test_one_billion_word_is_its_shards_in_order(prepared: Prepare, tmp_path: Path) -> None:
    dataset = prepared("one-billion-word", make_source(tmp_path / "in", "one-billion-word", "tar.gz"))
    assert isinstance(dataset.vocab, WordVocab)
    # 7 words are seen less than three times.
    assert dataset.vocab.symbols == ["<S>", "<UNK>", ".", "The", "cat"]
    symbols = {split: " ".join(dataset.vocab.symbols[i] for i in getattr(dataset, split)) for split in SPLITS}
    assert symbols["train"] == (
        "<S> <UNK> The cat . cat <S> . <UNK> <S> "  # shard 1 before 2, whatever their order in the archive
        "The cat <UNK> The <UNK> . <S> The <UNK> <UNK> <UNK> . <S> "
        "cat . <S>"
    )
    assert symbols["test"] == "<S> The <UNK> cat . <S>"
    assert symbols["valid"] == "<S> cat . <S> The . <S>"
    assert decode(dataset.vocab, dataset.test) == "\nThe <UNK> cat .\n"


@pytest.mark.parametrize("name", ["wikitext-103", "penn-treebank"])
def test_the_names_that_the_public_script_leaves_are_known(
    name: str, prepared: Prepare, tmp_path: Path
) -> None:
    parts = WIKI if name == "wikitext-103" else PTB
    source = make_folder(tmp_path / "in", {f"{part}.txt": data for part, data in parts.items()})
    assert len(prepared(name, source).valid) == len(parts["valid"].split()) + parts["valid"].count(b"\n")


def test_the_archive_in_the_public_scripts_folder_is_found(prepared: Prepare, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "in", {"train.txt": b"60 109", "valid.txt": b"60", "test.txt": b"60"})
    make_zip(source / "enwik8.zip", PUBLISHED["enwik8"])
    assert len(prepared("enwik8", source).train) == len(ENWIK8) * 90 // 100


WORDS = st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"]), min_size=1, max_size=4).filter(
    lambda w: w.split() == [w]
)
LINES = st.lists(st.lists(WORDS, max_size=5).map(" ".join), min_size=2, max_size=8)


@settings(max_examples=15)
@given(lines=LINES, block=st.integers(1, 40))
def test_words_come_back_however_a_file_is_cut(lines: list[str], block: int, tmp_path_factory) -> None:
    folder, text = tmp_path_factory.mktemp("words"), "\n".join(lines) + "\n"
    source = make_folder(folder / "in", {f"ptb.{part}.txt": text.encode() for part in SPLITS})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.data.published, "BLOCK_BYTES", block)
        facts = prepare("penn-treebank", source, folder / "out", unverified=True)
    dataset = open_dataset(folder / "out")
    assert texts(dataset) == dict.fromkeys(SPLITS, text.replace("<eos>", "\n"))
    assert np.array_equal(dataset.train, dataset.vocab.encode(text))
    assert facts == dataset.facts


@pytest.mark.parametrize("name", list(CORPORA))
def test_unpublished_files_are_refused_without_unverified(
    name: str, prepared: Prepare, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "in", name, "tar.gz")
    refused(
        prepared,
        name,
        source,
        rf"is not the published {name}: for .* expected .*, found .* --unverified",
        unverified=False,
    )
    assert prepared(name, source).facts.published is False


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], None]:
    """`publish(name, source)`: makes the table know a small archive, or its members, as published."""

    def known(name: str, source: Path) -> None:
        corpus = CORPORA[name]
        if source.is_file():
            archive = dataclasses.replace(fingerprint({"": source}), lines=None)
            monkeypatch.setitem(CORPORA, name, dataclasses.replace(corpus, archive=archive))
        else:
            names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
            files = {part: {n: source / n for n in corpus.matching(part, names)} for part in corpus.parts}
            prints = {part: fingerprint(members) for part, members in files.items()}
            if name == "one-billion-word":  # number of shards and lines alone are public
                prints = {
                    part: Fingerprint(num_files=p.num_files, lines=p.lines) for part, p in prints.items()
                }
            monkeypatch.setitem(CORPORA, name, dataclasses.replace(corpus, files=prints))

    return known


@pytest.mark.parametrize(
    ("name", "form"), [*zip(CORPORA, ("folder", "tar.gz", "folder", "folder", "tar.gz"), strict=True)]
)
def test_the_published_files_are_recognised(
    name: str, form: str, publish, prepared: Prepare, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "in", name, form)
    publish(name, source)
    facts = prepared(name, source, unverified=False).facts
    assert facts.published
    assert set(facts.sources) == ({source.name} if form == "tar.gz" else set(CORPORA[name].parts))


def test_an_archive_of_the_published_size_alone_is_not_trusted(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "in", "penn-treebank", "tar.gz")
    size = Fingerprint(num_bytes=source.stat().st_size)  # no hash of it is public
    monkeypatch.setitem(CORPORA, "penn-treebank", dataclasses.replace(CORPORA["penn-treebank"], archive=size))
    refused(
        prepared,
        "penn-treebank",
        source,
        "is not the published penn-treebank: for ptb.train.txt expected md5 f26c4b",
        unverified=False,
    )


def test_a_missing_shard_is_refused(publish, prepared: Prepare, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", "one-billion-word", "folder")
    publish("one-billion-word", source)
    next(source.rglob("news.en-00010-of-00100")).unlink()
    refused(prepared, "one-billion-word", source, "expected 3 files, found 2 files", unverified=False)


def parts(content: bytes, names: tuple[str, ...] = SPLITS) -> dict[str, bytes]:
    return {f"ptb.{name}.txt": content for name in names}


CUT_WORD = {"ptb.train.txt": b"ab\n\n caf\xe9 \n"}
REFUSED = [
    ("text8", {"text8": TEXT8 + b"A"}, rf"byte {len(TEXT8)} of the file \(0x41\) is not among the 27 char"),
    ("penn-treebank", parts(b"a b\n", ("train", "valid")), r"has no ptb\.test\.txt, which .* give its whole"),
    (
        "penn-treebank",
        parts(b"a b\n") | {"b/ptb.train.txt": b"a\n"},
        "has both b/ptb.train.txt and",
    ),
    ("penn-treebank", {}, r"has no ptb\.train\.txt"),
    ("penn-treebank", parts(b"a b\n") | CUT_WORD, r"ptb\.train\.txt: byte 8 \(0xe9\) is not UTF-8"),
    ("penn-treebank", parts("\n".join(map(str, range(200))).encode()), "more than 50 different words"),
    ("enwik8", {"enwik8": b"0123456789"}, "the valid part has 0 tokens, too few"),
]


@pytest.mark.parametrize(("name", "files", "words"), REFUSED)
def test_files_that_are_no_corpus_are_refused(
    name: str,
    files: dict[str, bytes],
    words: str,
    prepared: Prepare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer.data.published, "BLOCK_BYTES", 4)
    monkeypatch.setattr(trainer.data.text, "MOST_WORDS", 50)
    (tmp_path / "in").mkdir()
    refused(prepared, name, make_folder(tmp_path / "in", files), words)


def test_the_table_is_complete() -> None:
    for name, corpus in CORPORA.items():
        assert name == corpus.name
        assert set(corpus.files) == set(corpus.parts)
        assert all(url.rpartition("/")[2] == corpus.archive_name for url in corpus.urls)
        assert all(file.differs(Fingerprint(num_files=None)) is None for file in corpus.files.values())
        for fact, length in (("md5", 32), ("sha1", 40), ("sha256", 64)):
            hashes = [getattr(file, fact) for file in (corpus.archive, *corpus.files.values())]
            assert all(h is None or (len(h) == length and int(h, 16)) for h in hashes)
