"""A published corpus → DATASET: found, verified, counted, encoded; never held in memory as a whole."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from runtimes.base.errors import TextError, UserError
from runtimes.base.files import write_json
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.contract.spec import VOCAB, FileFacts, file_facts
from runtimes.contract.vocabulary import ByteVocab, CharVocab, WordVocab
from trainer.data.corpora import CORPORA, WHOLE, Corpus
from trainer.data.dataset import DATA, SPLITS, DatasetFacts, DType, save_facts, smallest_dtype
from trainer.data.published import Files, Tick, find_corpus, progress_bar, read_blocks

LONGEST_LINE = 1 << 24  # bytes
MOST_WORDS = 1 << 23  # different ones; One Billion Word has 2.4 million
ALPHABET = " abcdefghijklmnopqrstuvwxyz"  # of text8


def prepare(
    name: str,
    source: Path,
    out: Path,
    *,
    force: bool = False,
    unverified: bool = False,
    progress: bool = True,
) -> DatasetFacts:
    """Writes the corpus `name`, found in the archive, folder or file `source`, as the dataset `out`, whole or not at all.

    Raises UserError for a source that is damaged, lacks a part, or is not what was published; `unverified` takes it
    all the same, unless it is another corpus. A tar or zip is unpacked beside `out` for the while.
    """
    corpus = CORPORA[name]
    refuse_existing(out, force=force, marker=DATA, sources=[source])
    with atomic_folder(out, force=force, marker=DATA, sources=[source]) as folder:
        scratch = folder / "unpacked"
        found = find_corpus(corpus, source, scratch, unverified=unverified, progress=progress)
        vocab = _vocabulary(corpus, found.parts, progress)
        write_json(folder / VOCAB, vocab.to_json())
        dtype, tokens, files = smallest_dtype(vocab.size), {}, {VOCAB: file_facts(folder / VOCAB)}
        for split in SPLITS:
            path = folder / f"{split}.bin"
            with progress_bar(f"encoding {split}", progress) as tick:
                if isinstance(vocab, WordVocab):
                    ids = _words(corpus, vocab, found.parts[split], tick)
                else:
                    ids = _symbols(corpus, vocab, found.parts[WHOLE], split, tick)
                tokens[split], files[path.name] = _write(path, ids, dtype)
            if tokens[split] < 2:
                raise UserError(
                    f"{source} gives {tokens[split]} tokens for the {split} part, too few to predict one; give more."
                )
        shutil.rmtree(scratch, ignore_errors=True)
        facts = DatasetFacts(
            corpus=name, published=found.published, dtype=dtype, vocab_size=vocab.size, tokens=tokens, files=files,
            sources=found.sources,
        )  # fmt: skip
        save_facts(folder, facts)
    return facts


def word_vocab(counts: Counter[str], *, min_count: int, unknown: str, end_of_line: str) -> WordVocab:
    """`end_of_line`, then the words by frequency, ties in order of appearance, as adaptive softmax needs them.

    Words seen fewer than `min_count` times are counted as `unknown`, which is there even where none is.
    """
    kept = Counter({word: count for word, count in counts.items() if count >= min_count or word == unknown})
    kept[unknown] += counts.total() - kept.total()
    kept.pop(end_of_line, None)
    return WordVocab(
        [end_of_line, *(word for word, _ in kept.most_common())], unknown=unknown, end_of_line=end_of_line
    )


def _vocabulary(corpus: Corpus, parts: dict[str, Files], progress: bool) -> ByteVocab | CharVocab | WordVocab:
    if corpus.kind == "byte":
        return ByteVocab()
    if corpus.kind == "char":
        return CharVocab(list(ALPHABET))
    counts: Counter[str] = Counter()
    with progress_bar("counting words", progress) as tick:
        for lines in _lines(corpus, parts["train"], tick):
            counts.update(lines.split())
            if len(counts) > MOST_WORDS:
                raise UserError(
                    f"that text has more than {MOST_WORDS:,} different words; it is no {corpus.name}."
                )
    return word_vocab(
        counts, min_count=corpus.min_count, unknown=corpus.unknown, end_of_line=corpus.end_of_line
    )


def _words(corpus: Corpus, vocab: WordVocab, files: Files, tick: Tick) -> Iterator[np.ndarray]:
    if corpus.bounded:
        yield vocab.encode("\n")
    for lines in _lines(corpus, files, tick):
        yield vocab.encode(lines)


def _lines(corpus: Corpus, files: Files, tick: Tick) -> Iterator[str]:
    """The text of some files, whole lines at a time; the last line of each ends with a newline as the others do."""
    for name, path in files.items():
        rest, at = b"", 0
        for block in read_blocks(path, tick):
            lines, newline, rest = (rest + block).rpartition(b"\n")
            yield _text(corpus, name, lines + newline, at)
            at += len(lines + newline)
            if len(rest) > LONGEST_LINE:
                raise TextError(
                    f"{name} has a line of more than {LONGEST_LINE:,} bytes; it is no file of {corpus.name}."
                )
        if rest:
            yield _text(corpus, name, rest + b"\n", at)


def _text(corpus: Corpus, name: str, lines: bytes, at: int) -> str:
    try:
        return lines.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{name}: byte {at + error.start} (0x{lines[error.start]:02x}) is not UTF-8; it is damaged, or no file of "
            f"{corpus.name}."
        ) from error


def _symbols(
    corpus: Corpus, vocab: ByteVocab | CharVocab, files: Files, split: str, tick: Tick
) -> Iterator[np.ndarray]:
    """Byte by byte: the first 90 % of the file, the next 5 %, or the last."""
    (path,) = files.values()
    ids = np.arange(256, dtype=np.int16)
    if isinstance(vocab, CharVocab):
        ids[:] = -1
        ids[[ord(symbol) for symbol in vocab.symbols]] = np.arange(vocab.size)
    size = path.stat().st_size
    cuts = [size * percent // 100 for percent in (0, 90, 95, 100)]
    at = cuts[SPLITS.index(split)]
    for block in read_blocks(path, tick, start=at, end=cuts[SPLITS.index(split) + 1]):
        encoded = ids[np.frombuffer(block, np.uint8)]
        if encoded.min() < 0:
            first = int(np.argmin(encoded))
            raise TextError(
                f"byte {at + first} of the file (0x{block[first]:02x}) is not among the {vocab.size} characters of "
                f"{corpus.name}; it is another corpus."
            )
        at += len(block)
        yield encoded


def _write(path: Path, pieces: Iterable[np.ndarray], dtype: DType) -> tuple[int, FileFacts]:
    """Writes ids as they come; returns their number and the file's facts."""
    digest, count, little_endian = hashlib.sha256(), 0, np.dtype(dtype).newbyteorder("<")
    with open(path, "wb") as stream:
        for ids in pieces:
            data = ids.astype(little_endian).tobytes()
            stream.write(data)
            digest.update(data)
            count += len(ids)
        num_bytes = stream.tell()
    return count, FileFacts(sha256=digest.hexdigest(), num_bytes=num_bytes)
