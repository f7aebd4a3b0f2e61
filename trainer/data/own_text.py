"""Prepares a user's own texts as a dataset, block by block: texts of any size, never whole in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtimes.base.errors import ConfigError, TextError, json_fault
from runtimes.base.files import atomic_file, open_file, reading, write_json
from runtimes.base.text import MAX_LINE_BYTES, byte_lines, text_lines, text_pieces
from runtimes.contract.id_files import ticked
from runtimes.contract.vocabulary import ByteVocab, Vocab, not_unicode
from runtimes.contract.vocabulary.subword import pieces
from trainer.data.archives import Tick
from trainer.data.own import OWN_TEXT, OwnFiles, Prepared, write_dataset
from trainer.data.published import progress_bar, read_blocks, total_bytes
from trainer.data.subwords import VocabChoice, learn_subwords
from trainer.data.text import build_vocab, learn_words, refuse_no_text

Documents = Literal["file", "line", "jsonl"]


def prepare_text(
    files: OwnFiles,
    out: Path,
    *,
    vocab: str,
    documents: Documents = "file",
    min_count: int = 1,
    max_size: int | None = None,
    force: bool = False,
) -> Prepared:
    """The dataset `out` of UTF-8 texts.

    vocab: byte, char, word, subword, or the file of a vocabulary. documents: a document is a file, a line of
    a file, or the `text` of each line of JSON. The vocabulary's end-of-document token follows each document.
    A vocabulary without that token keeps files as they are, and lines and texts end with a newline.
    min_count: of a vocabulary of words. max_size: of one of words or subwords. Both vocabularies are made
    from the training part only.
    """
    if vocab == "word" and not (files.valid and files.test):
        raise ConfigError(
            "--vocab word counts only the words of the training part; give --valid and --test too, or a "
            "vocabulary from `xl-export prepare vocab --kind word`."
        )
    for path in files.all:
        refuse_no_text(path, option="the text")
    end_of_line = [] if documents == "file" else ["\n"]
    made = build_vocab(
        vocab,
        lambda: texts(files.train, documents, "word"),
        lambda: itertools.chain(end_of_line, texts(files.all, documents, "char")),
        min_count=min_count,
        max_size=max_size,
    )

    def encode(path: Path, tick: Tick) -> Iterator[np.ndarray]:
        return encode_file(path, made, documents, tick)

    prepared = write_dataset(
        out,
        corpus=OWN_TEXT,
        vocab=made,
        files=files,
        encode=encode,
        joined=files.joined and documents == "file" and made.special.end_of_document is None,
        force=force,
    )
    if made.special.end_of_document is None and documents != "file":
        prepared.notes.append(
            "the vocabulary has no end-of-document token, so each document ends with a newline"
        )
    return prepared


def learn_vocab(
    kind: VocabChoice,
    paths: Sequence[Path],
    out: Path,
    *,
    size: int | None,
    mode: Documents = "file",
    min_count: int = 1,
) -> Vocab:
    """The vocabulary that was learned from these files and written to the file `out`.

    size: the number of tokens; None for all words. min_count: rarer words are left out. Raises UserError for
    a file that is no text, and where a library cannot make a vocabulary of this size.
    """
    for path in paths:
        refuse_no_text(path)
    if kind == "word":
        words = learn_words(texts(paths, mode, "word"), min_count=min_count, max_size=size)
        write_json(out, words.to_json())
        return words
    assert size is not None
    vocab = learn_subwords(kind, size, lambda: texts(paths, mode, "word"))
    with atomic_file(out) as temporary:
        temporary.write_bytes(vocab.content)
    return vocab


def encode_file(path: Path, vocab: Vocab, mode: Documents, tick: Tick) -> Iterator[np.ndarray]:
    """The ids of a file, in blocks. Each document is encoded whole and by itself."""
    if isinstance(vocab, ByteVocab) and mode == "file":  # takes any file, UTF-8 or not
        for block in read_blocks(path, tick):
            yield vocab.encode(block)
        return
    if isinstance(vocab, ByteVocab) and mode == "line":
        for line in _byte_lines(path, tick):
            yield vocab.encode(line.removesuffix(b"\n").removesuffix(b"\r") + b"\n")
        return
    end = vocab.special.end_of_document
    for where, chunks in _documents(path, mode, tick):
        if end is None and (mode != "file" or vocab.kind == "word"):
            chunks = _with_newline(chunks)
        at = 0
        for piece in _cut(chunks, vocab.kind, where):
            try:
                yield vocab.encode(piece)
            except TextError as error:
                after = f", after {at:,} characters" if at else ""
                raise TextError(f"{where}{after}: {error}") from error
            at += len(piece)
        if end is not None and at:
            yield np.array([end])


def texts(paths: Sequence[Path], mode: Documents, kind: str) -> Iterator[str]:
    """The text of the files in pieces, as a vocabulary of this kind is made of them."""
    with progress_bar("reading", total_bytes(paths)) as tick:
        for path in paths:
            for where, chunks in _documents(path, mode, tick):
                yield from _cut(chunks, kind, where)


def _documents(path: Path, mode: Documents, tick: Tick) -> Iterator[tuple[str, Iterable[str]]]:
    """A name for messages and the text, in chunks, of each document of a file."""
    if mode == "file":
        yield str(path), text_pieces(read_blocks(path, tick), str(path))
        return
    for number, line in enumerate(text_lines(_byte_lines(path, tick), str(path)), 1):
        where = f"{path}: line {number}"
        if mode == "line":
            yield where, [line]
        elif line.strip():
            yield where, [_text_of(line, where)]


def _byte_lines(path: Path, tick: Tick) -> Iterator[bytes]:
    with reading(path), open_file(path) as stream:
        yield from ticked(byte_lines(stream, str(path)), tick)


def _text_of(line: str, where: str) -> str:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextError(
            f"{where} is not JSON ({json_fault(error):.200}); expected an object with a text."
        ) from error
    text = data.get("text") if isinstance(data, dict) else data
    if not isinstance(text, str) or not_unicode([text]) is not None:
        raise TextError(f'{where} has no text; expected a line such as {{"text": "One document."}}.')
    return text


def _with_newline(chunks: Iterable[str]) -> Iterator[str]:
    """The chunks, and a newline where the last of them does not end with one."""
    last = ""
    for chunk in chunks:
        last = chunk or last
        yield chunk
    if not last.endswith("\n"):
        yield "\n"


def _cut(chunks: Iterable[str], kind: str, where: str) -> Iterator[str]:
    """The text in pieces that can be encoded one by one: the ids are the same as of the whole text."""
    rest = ""
    for chunk in chunks:
        if kind == "subword":
            *whole, rest = pieces(rest + chunk)
        elif kind in ("word", "ids"):
            head, newline, tail = chunk.rpartition("\n")
            whole, rest = ([rest + head + newline], tail) if newline else ([], rest + tail)
            if len(rest) > MAX_LINE_BYTES:
                raise TextError(
                    f"{where} has a line of more than {MAX_LINE_BYTES:,} characters; give --vocab byte or "
                    "char, or a text in lines."
                )
        else:
            whole = [chunk]
        yield from whole
    if rest:
        yield rest
