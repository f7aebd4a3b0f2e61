"""Text for training: the built-in corpus or a text file, cut into three parts and turned into tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtimes.base.errors import ConfigError, TextError, UserError
from runtimes.base.files import read_bytes
from runtimes.base.text import TextDecoder
from runtimes.contract.tokens import DATA
from runtimes.contract.vocabulary import (
    ByteVocab,
    CharVocab,
    Vocab,
    WordVocab,
    vocab_from_file,
)
from trainer.data.archives import kind_of
from trainer.data.subwords import SUBWORDS, Texts, learn_subwords
from trainer.run.choices import VOCAB_KINDS, refuse_vocab_name

MOST_WORDS = 1 << 24  # different words that are counted; they need a few gigabytes


@dataclass(frozen=True)
class Splits:
    """The first 90 % of a text, the next 5 % and the last 5 %."""

    train: bytes
    valid: bytes
    test: bytes
    note: str | None = None
    """What the user should know about the file, such as how it was decoded; None for nothing."""


def load_splits(text: str | None, *, as_bytes: bool = False) -> Splits:
    """The parts of a text file, or of the built-in corpus for None. No UTF-8 character is cut.

    as_bytes: cut the file as it is, for a vocabulary of bytes. Otherwise it is decoded first, as
    `runtimes.base.text` says, so the parts do not depend on its line ends.
    Raises TextError for a file that is empty or no text, and for a folder.
    """
    if text is not None:
        refuse_no_text(Path(text))
    data = built_in_corpus() if text is None else read_bytes(Path(text))
    note = None
    if text is not None and not as_bytes:
        decoder = TextDecoder(text)
        data = decoder.decode(data, final=True).encode()
        note = decoder.note
    if text is not None and re.fullmatch(rb"[\d\s,;\[\]-]+", data[:1_000_000]):
        note = (
            f"{text} holds nothing but numbers, and their digits are read as text; if they are token ids, "
            f"prepare them with `xl-export prepare tokens --train {text} --vocab-size N --out DATASET` and "
            "give --data DATASET"
        )
    if not data:
        raise TextError(f"{text} is empty; give a text of at least a few thousand characters.")
    first, second = (_character_start(data, len(data) * percent // 100) for percent in (90, 95))
    return Splits(data[:first], data[first:second], data[second:], note)


def built_in_corpus() -> bytes:
    """The English text of Python's own help topics: about 460 thousand characters, on every machine.

    It changes a little from one Python version to the next; a run keeps its held-out parts.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode("utf-8")


def build_vocab(
    name: str, training: Texts, everything: Texts, *, min_count: int = 1, max_size: int | None = None
) -> Vocab:
    """The vocabulary of a text: all bytes, its characters, or the words or subwords of its training part.

    Any other name is a vocabulary's file: see `vocab_of_file`. training, everything: the text in
    pieces that cut no word. Raises ConfigError for limits of a vocabulary that has none.
    """
    if (min_count > 1 and name != "word") or (max_size is not None and name not in ("word", "subword")):
        raise ConfigError(
            "min_count is for vocabularies of words and max_size for words or subwords, and vocab is "
            f"{name}; leave them out."
        )
    if name == "byte":
        return ByteVocab()
    if name == "char":
        symbols: set[str] = set()
        for piece in everything():
            symbols.update(piece)
        return CharVocab(sorted(symbols))
    if name == "word":
        return learn_words(training(), min_count=min_count, max_size=max_size)
    if name == "subword":
        return learn_subwords("byte-bpe", max_size or SUBWORDS, training)
    return vocab_of_file(name)


def learn_words(texts: Iterable[str], *, min_count: int = 1, max_size: int | None = None) -> WordVocab:
    """The vocabulary of the words of texts."""
    return WordVocab.from_counts(count_words(texts), min_count=min_count, max_size=max_size)


def count_words(texts: Iterable[str]) -> Counter[str]:
    """How often each word between white space appears, in the order of first appearance."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
        if len(counts) > MOST_WORDS:
            raise UserError(
                f"the text has more than {MOST_WORDS:,} different words; give --vocab a file of subwords, "
                "which `xl-export prepare vocab --kind bpe` makes."
            )
    return counts


def takes_bytes(name: str) -> bool:
    """Whether this is a vocabulary of bytes, which takes a file as it is; name: as for `build_vocab`."""
    return name == "byte" or (name not in VOCAB_KINDS and isinstance(vocab_of_file(name), ByteVocab))


def vocab_of_file(name: str) -> Vocab:
    """The vocabulary in a file that a user gives as --vocab, to encode texts with it.

    Raises ConfigError for a name that no vocabulary can have, and for a file that does not exist.
    """
    refuse_vocab_name(name)
    if not Path(name).is_file():
        raise ConfigError(f"vocab is {name}, which does not exist; give the file of a vocabulary.")
    return vocab_from_file(Path(name))


def lanes(tokens: np.ndarray, batch: int, segment: int) -> np.ndarray:
    """The stream cut into `batch` contiguous lanes [B, N], so that memory can be carried along (section 3.2).

    The last tokens, fewer than `batch`, are left out. So is, while training, the end of a lane that does not
    fill a segment. The result is a view, so a memory-mapped stream stays on disk. Raises TextError if a lane
    would be shorter than one segment and its targets.
    """
    length = len(tokens) // batch
    if length < segment + 1:
        raise TextError(
            f"the training text has {len(tokens)} tokens, too few for {batch} lanes of more than {segment}; "
            "give a longer text, or a smaller batch or segment."
        )
    return tokens[: batch * length].reshape(batch, length)


def refuse_no_text(path: Path, *, option: str = "--text") -> None:
    """Raises TextError for what is often given in place of a text file, and says where it belongs."""
    if (path / DATA).is_file():
        raise TextError(
            f"{option} is {path}, which is a dataset; train on it with `xl-export train --data {path}`."
        )
    kind = "folder" if path.is_dir() else kind_of(path) if path.is_file() else None
    if kind is not None:
        raise TextError(
            f"{option} is {path}, which is a {kind}{'' if kind == 'folder' else ' file'} and no text; give "
            "one UTF-8 text file, or a dataset with --data, which `xl-export prepare text` makes of several "
            f"texts, `xl-export prepare tokens` of token ids, and `xl-export prepare NAME --from {path}` of "
            "a public corpus."
        )


def _character_start(data: bytes, at: int) -> int:
    # A character has at most four bytes. If there is none, the text is not UTF-8, and it may be cut anywhere.
    end = min(at + 3, len(data))
    while 0 < at < end and 0x80 <= data[at] < 0xC0:
        at += 1
    return at
