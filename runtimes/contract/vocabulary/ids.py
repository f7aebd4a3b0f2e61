"""A vocabulary of token ids that another program makes: music, events, actions, or encoded text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtimes.base.errors import ConfigError, TextError
from runtimes.base.ranges import Range
from runtimes.contract.model_facts import MAX_SIZE
from runtimes.contract.vocabulary.base import (
    Decoder,
    SpecialTokens,
    VocabKind,
    WholeTokens,
    as_text,
)


class IdsVocab:
    """The tokens 0 to size - 1, which have a meaning only for the user's own program.

    names: a name for each token, without white space; by default its number. A text is a sequence of names
    between white space. Pieces of decoded text are separated by one blank.
    """

    kind: VocabKind = "ids"

    def __init__(
        self, size: int, *, names: Sequence[str] | None = None, special: SpecialTokens | None = None
    ) -> None:
        Range(1, MAX_SIZE, whole=True).check("size", size, ConfigError)
        self.size = size
        self.special = special or SpecialTokens()
        self.names = None if names is None else list(names)
        self._ids = {name: i for i, name in enumerate(self.names or [])}

    def encode(self, text: str | bytes) -> np.ndarray:
        words = as_text(text).split()
        ids = np.fromiter((self._id(word) for word in words), np.int64, len(words))
        if len(ids) and ids.min() < 0:
            at = int(np.argmin(ids))
            expected = "the numbers" if self.names is None else "the names"
            example = "0" if self.names is None else self.names[0]
            raise TextError(
                f"{words[at]!r:.80}, word {at + 1} of the text, is not among {expected} of this model's "
                f"{self.size} tokens; give tokens with blanks between, such as {example!r:.80}, or ids."
            )
        return ids

    def _id(self, word: str) -> int:
        """The token with this name; -1 if there is none."""
        if self.names is not None:
            return self._ids.get(word, -1)
        is_number = word.isascii() and word.isdecimal() and len(word) <= 8
        return int(word) if is_number and int(word) < self.size else -1

    def decoder(self) -> Decoder:
        begun = False

        def decode(token: int) -> str:
            nonlocal begun
            blank = " " if begun else ""
            begun = True
            return blank + (str(token) if self.names is None else self.names[token])

        return WholeTokens(decode)

    def to_json(self) -> dict[str, Any]:
        names = {} if self.names is None else {"names": self.names}
        special = {"special": ids} if (ids := self.special.to_json()) else {}
        return {"kind": self.kind, "size": self.size, **names, **special}
