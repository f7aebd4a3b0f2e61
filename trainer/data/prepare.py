"""Prepares a public corpus as a dataset. The corpus is found, verified, counted and encoded block by block.

It is never held in memory as a whole.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from runtimes.base.errors import TextError
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.base.kinds import DATASET
from runtimes.contract.vocabulary import ByteVocab, CharVocab, WordVocab, save_vocab
from trainer.data.archives import Tick
from trainer.data.corpora import CORPORA, WHOLE, Corpus
from trainer.data.dataset import SPLITS, DatasetFacts, save_facts, write_part
from trainer.data.published import Files, find_corpus, progress_bar, read_blocks, total_bytes
from trainer.data.text import count_words

ALPHABET = " abcdefghijklmnopqrstuvwxyz"  # all characters of text8


def prepare(
    name: str,
    source: Path,
    out: Path,
    *,
    force: bool = False,
    unverified: bool = False,
) -> DatasetFacts:
    """Facts of the dataset `out`, newly prepared from the corpus `name` in an archive, folder or file.

    The folder appears as a whole. An archive is unpacked to a temporary folder next to it. Raises UserError
    for a source that is damaged, lacks a part, is another corpus, or is not the published one. The last is
    accepted if `unverified`.
    """
    corpus = CORPORA[name]
    refuse_existing(out, DATASET, force=force, sources=[source])
    with atomic_folder(out, DATASET, force=force, sources=[source]) as folder:
        scratch = folder / "unpacked"
        found = find_corpus(corpus, source, scratch, unverified=unverified)
        vocab = _vocabulary(corpus, found.parts)
        save_vocab(folder, vocab)
        for split in SPLITS:
            files = found.parts[WHOLE if WHOLE in found.parts else split]
            with progress_bar(f"encoding {split}", _num_bytes(corpus, files, split)) as tick:
                if isinstance(vocab, WordVocab):
                    ids = _words(corpus, vocab, files, tick)
                else:
                    ids = _symbols(corpus, vocab, files, split, tick)
                write_part(folder / f"{split}.bin", ids, vocab.size)
        shutil.rmtree(scratch, ignore_errors=True)
        return save_facts(folder, vocab, corpus=name, published=found.published, sources=found.sources)


def _vocabulary(corpus: Corpus, parts: dict[str, Files]) -> ByteVocab | CharVocab | WordVocab:
    """The vocabulary of a corpus.

    Of words, it has the token of newlines, and then the words with the most frequent first, for adaptive
    softmax; ties are in the order of their first appearance. Rare words are counted as `unknown`, which is
    always part of the vocabulary.
    """
    if corpus.kind == "byte":
        return ByteVocab()
    if corpus.kind == "char":
        return CharVocab(list(ALPHABET))
    with progress_bar("counting words", total_bytes(parts["train"].values())) as tick:
        counts = count_words(_lines(corpus, parts["train"], tick))
    unknown = corpus.unknown
    kept = Counter({word: n for word, n in counts.items() if n >= corpus.min_count or word == unknown})
    kept[unknown] += counts.total() - kept.total()
    kept.pop(corpus.end_of_line, None)
    symbols = [corpus.end_of_line, *(word for word, _ in kept.most_common())]
    return WordVocab(symbols, unknown=unknown, end_of_line=corpus.end_of_line)


def _words(corpus: Corpus, vocab: WordVocab, files: Files, tick: Tick) -> Iterator[np.ndarray]:
    if corpus.bounded:
        yield vocab.encode("\n")
    for lines in _lines(corpus, files, tick):
        yield vocab.encode(lines)


def _lines(corpus: Corpus, files: Files, tick: Tick) -> Iterator[str]:
    """The text of the files in pieces of whole lines. A newline is added to a last line that has none."""
    for name, path in files.items():
        rest = b""
        at = 0
        for block in read_blocks(path, tick):
            lines, newline, rest = (rest + block).rpartition(b"\n")
            yield _text(corpus, name, lines + newline, at)
            at += len(lines + newline)
        if rest:
            yield _text(corpus, name, rest + b"\n", at)


def _text(corpus: Corpus, name: str, lines: bytes, at: int) -> str:
    try:
        return lines.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{name}: byte {at + error.start} (0x{lines[error.start]:02x}) is not UTF-8; give a file of "
            f"{corpus.name} that is not damaged."
        ) from error


def _symbols(
    corpus: Corpus, vocab: ByteVocab | CharVocab, files: Files, split: str, tick: Tick
) -> Iterator[np.ndarray]:
    """The ids of one part of the file, whose every byte is a token."""
    (path,) = files.values()
    ids = np.arange(256, dtype=np.int16)
    if isinstance(vocab, CharVocab):
        ids[:] = -1
        ids[[ord(symbol) for symbol in vocab.symbols]] = np.arange(vocab.size)
    at, end = _cut(files, split)
    for block in read_blocks(path, tick, start=at, end=end):
        encoded = ids[np.frombuffer(block, np.uint8)]
        if encoded.min() < 0:
            first = int(np.argmin(encoded))
            raise TextError(
                f"byte {at + first} of the file (0x{block[first]:02x}) is not among the {vocab.size} "
                f"characters of {corpus.name}; give {corpus.name} itself."
            )
        at += len(block)
        yield encoded


def _cut(files: Files, split: str) -> tuple[int, int]:
    """First byte and end of a part of the only file: the first 90 %, the next 5 % or the last 5 %."""
    (path,) = files.values()
    cuts = [path.stat().st_size * percent // 100 for percent in (0, 90, 95, 100)]
    return cuts[SPLITS.index(split)], cuts[SPLITS.index(split) + 1]


def _num_bytes(corpus: Corpus, files: Files, split: str) -> int:
    if corpus.kind == "word":
        return total_bytes(files.values())
    start, end = _cut(files, split)
    return end - start
