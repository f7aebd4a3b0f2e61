"""Text for training: the built-in corpus or a file, split 90/5/5, as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from runtimes.base.errors import TextError
from runtimes.base.files import read_bytes
from runtimes.contract.vocabulary import ByteVocab, CharVocab, Vocab, WordVocab, as_text


@dataclass(frozen=True)
class Splits:
    """Contiguous parts of one text, 90 % / 5 % / 5 %."""

    train: bytes
    valid: bytes
    test: bytes


def load_splits(text: str | None) -> Splits:
    """The splits of a text file, or of the built-in corpus for None. Cuts fall on whole UTF-8 characters."""
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


def build_vocab(kind: Literal["byte", "char", "word"], splits: Splits, *, min_count: int) -> Vocab:
    """Characters of the whole text, or words of its training part (others become `<unk>`)."""
    if kind == "byte":
        return ByteVocab()
    if kind == "char":
        return CharVocab.build(as_text(splits.train + splits.valid + splits.test))
    return WordVocab.build(as_text(splits.train), min_count=min_count)


def lanes(tokens: np.ndarray, batch: int, segment: int) -> np.ndarray:
    """`batch` contiguous lanes [B, N] of a stream, for memory to be carried along (section 3.2).

    The remainder of fewer than `batch` tokens is left out, and so is, while training, the end of a lane that does
    not fill a segment. It is a view: a mapped stream stays on disk. Raises TextError when a lane would be shorter
    than one segment and its targets.
    """
    length = len(tokens) // batch
    if length < segment + 1:
        raise TextError(
            f"the training text has {len(tokens)} tokens, too few for {batch} lanes of more than {segment}; "
            "give a longer text, or a smaller batch or segment."
        )
    return tokens[: batch * length].reshape(batch, length)


def _character_start(data: bytes, at: int) -> int:
    end = min(
        at + 3, len(data)
    )  # a character is at most four bytes; what is longer is not UTF-8, and any cut will do
    while 0 < at < end and 0x80 <= data[at] < 0xC0:
        at += 1
    return at
