"""Text for training: the built-in corpus or a text file, cut into three parts and turned into tokens."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtimes.base.errors import ConfigError, TextError
from runtimes.base.files import read_bytes
from runtimes.contract.tokens import DATA
from runtimes.contract.vocabulary import ByteVocab, CharVocab, Vocab, WordVocab, as_text, vocab_from_file
from trainer.data.formats import kind_of
from trainer.run.choices import VOCAB_KINDS

MANY_WORDS = 1_000_000


@dataclass(frozen=True)
class Splits:
    """The first 90 % of a text, the next 5 % and the last 5 %."""

    train: bytes
    valid: bytes
    test: bytes


def load_splits(text: str | None) -> Splits:
    """The parts of a text file, or of the built-in corpus for None. No UTF-8 character is cut.

    Raises TextError for a file that is empty or no text, and for a folder.
    """
    if text is not None:
        refuse_no_text(Path(text))
    data = built_in_corpus() if text is None else read_bytes(Path(text))
    if not data:
        raise TextError(f"{text} is empty; give a text of at least a few thousand characters.")
    first, second = (_character_start(data, len(data) * percent // 100) for percent in (90, 95))
    return Splits(data[:first], data[first:second], data[second:])


def built_in_corpus() -> bytes:
    """The English text of Python's own help topics: about 460 thousand characters, on every machine.

    It changes a little from one Python version to the next; a run keeps its held-out parts.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode("utf-8")


def build_vocab(name: str, splits: Splits, *, min_count: int = 1, max_size: int | None = None) -> Vocab:
    """The vocabulary of a text: all bytes, its characters, or the words of its training part and `<unk>`.

    Any other name is that of a vocabulary's file: see `vocab_of_file`.
    """
    if name == "byte":
        return ByteVocab()
    if name == "char":
        return CharVocab.build(as_text(splits.train + splits.valid + splits.test))
    if name == "word":
        return WordVocab.build(as_text(splits.train), min_count=min_count, max_size=max_size)
    return vocab_of_file(name)


def vocab_of_file(name: str) -> Vocab:
    """The vocabulary in a file that a user gives as --vocab.

    Raises ConfigError for a name that is neither a file nor a kind.
    """
    if Path(name).is_file():
        return vocab_from_file(Path(name))
    near = difflib.get_close_matches(name, VOCAB_KINDS, n=1)
    meant = f" ({near[0]} was probably meant)" if near else ""
    raise ConfigError(
        f"--vocab is {name}; expected {', '.join(VOCAB_KINDS)}, or a file: the vocab.json of a run, a "
        f"tokenizer.json, or a SentencePiece .model{meant}."
    )


def many_words(vocab: Vocab) -> str | None:
    """One sentence on a vocabulary of so many words that a model of it is mostly a table; None otherwise."""
    if not isinstance(vocab, WordVocab) or vocab.size <= MANY_WORDS:
        return None
    return (
        f"the vocabulary has {vocab.size:,} words, and a model needs weights for each of them; keep fewer "
        "with --min-count or --max-size, or take subwords with --vocab FILE."
    )


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
        raise TextError(f"{option} is {path}, which is a dataset; give it as --data {path}.")
    if path.is_dir():
        raise TextError(
            f"{option} is {path}, which is a folder; give one UTF-8 text file, or prepare a public corpus "
            f"with `xl-export prepare NAME --from {path} --out DATASET` and give --data DATASET."
        )
    kind = kind_of(path) if path.is_file() else None
    if kind == "npy":
        raise TextError(
            f"{option} is {path}, which holds a NumPy array (.npy) and no text; give a UTF-8 text file, or "
            f"prepare token ids with `xl-export prepare tokens --train {path} --vocab-size N --out DATASET` "
            "and give --data DATASET."
        )
    if kind is not None:
        raise TextError(
            f"{option} is {path}, which is a {kind} file; unpack it and give the text, or prepare a public "
            f"corpus with `xl-export prepare NAME --from {path} --out DATASET` and give --data DATASET."
        )


def _character_start(data: bytes, at: int) -> int:
    # A character has at most four bytes. If there is none, the text is not UTF-8, and it may be cut anywhere.
    end = min(at + 3, len(data))
    while 0 < at < end and 0x80 <= data[at] < 0xC0:
        at += 1
    return at
