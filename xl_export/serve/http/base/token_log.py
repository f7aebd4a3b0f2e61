"""The tokens of one text with their log-probabilities, noted as they arrive and read when they are sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from runtimes.contract.vocabulary import Vocab
from xl_export.serve.core.task import Likeliest, TokenOut

MOST_TEXTS = 1 << 17  # pairs of tokens whose texts are kept
CONTEXT_TOKENS = 32  # tokens before a text that decide how its first token reads


class TokenTexts:
    """The text that a token adds after another token; pairs that come again are decoded once.

    A decoder has to be made for each pair, because it keeps what came before.
    """

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self.after = lru_cache(MOST_TEXTS)(self._after)
        """`after(last, token)` is the text that `token` adds after `last`; None is the beginning of a text.
        """

    def _after(self, last: int | None, token: int) -> str:
        decode = self.vocab.decoder()
        if last is not None:
            decode(last)
        return decode(token)


class Tokens(NamedTuple):
    """Some tokens of a text that follow each other: lists with an item for each."""

    ids: list[int]
    texts: list[str]
    """Text that each token adds; empty if it completes no character."""
    log_probs: list[float | None]
    """Log-probability of each token in nats; None if unknown, as for the first token of a text."""
    likeliest: list[list[tuple[int, float]]]
    """Ids and log-probabilities of the likeliest tokens at each place, in descending order."""
    before: int | None
    """The token before the first one."""
    offset: int
    """Number of characters of the text before the first one."""


class TokenLog:
    """Collects the tokens of one text. `add` is cheap; `take` decodes them, which may take long.

    before: int64 [N], the tokens before the first one. shown: whether the text of these is shown, so that
    only what follows it is returned. top: number of likeliest tokens that are returned for each token.
    offset: number of characters before the first token.
    """

    def __init__(self, vocab: Vocab, before: np.ndarray, *, shown: bool, top: int, offset: int = 0) -> None:
        self._top = top
        self._offset = offset
        self._decode = vocab.decoder()
        context = before[-CONTEXT_TOKENS:].tolist()
        if shown:
            self._decode.prime(context)
        else:
            for token in context:
                self._decode(token)
        self._before: int | None = context[-1] if context else None
        self._noted: list[tuple[np.ndarray, np.ndarray, Likeliest | None]] = []
        self.total = 0.0
        """Sum of the known log-probabilities, in nats."""
        self.known = 0
        """Number of known log-probabilities."""

    def add(
        self, tokens: np.ndarray, log_probs: np.ndarray | None, likeliest: Likeliest | None = None
    ) -> None:
        """Notes the next tokens. log_probs: NaN for an unknown one; None if none is known."""
        if log_probs is None:
            log_probs = np.full(len(tokens), math.nan)
        self._noted.append((tokens, log_probs, likeliest))
        self.total += float(np.nansum(log_probs, dtype=np.float64))
        self.known += int(np.count_nonzero(~np.isnan(log_probs)))

    def add_drawn(self, drawn: TokenOut) -> None:
        """Notes a token that was drawn."""
        log_prob = math.nan if drawn.log_prob is None else drawn.log_prob
        self._noted.append((np.array([drawn.token]), np.array([log_prob]), drawn.likeliest))
        if drawn.log_prob is not None:
            self.total += drawn.log_prob
            self.known += 1

    def take(self, *, at_end: bool = False) -> Tokens:
        """The tokens that were added since the last call. at_end: whether the text ends with them; then the
        last one gets what is left of it, such as half a character.
        """
        found = Tokens([], [], [], [], self._before, self._offset)
        for tokens, log_probs, likeliest in self._noted:
            found.ids.extend(tokens.tolist())
            found.log_probs.extend([None if x != x else x for x in log_probs.tolist()])
            if self._top and likeliest is not None:
                found.likeliest.extend(_pairs(likeliest, self._top))
            else:
                found.likeliest.extend([[]] * len(tokens))
        found.texts.extend(map(self._decode, found.ids))
        self._noted = []
        self._offset += sum(map(len, found.texts))
        self._before = found.ids[-1] if found.ids else self._before
        if found.ids and at_end:
            found.texts[-1] += self._decode.rest()
        return found


def _pairs(likeliest: Likeliest, top: int) -> Iterator[list[tuple[int, float]]]:
    """Ids and log-probabilities at each place, none at a place with nothing before it."""
    for ids, log_probs in zip(
        likeliest.ids[:, :top].tolist(), likeliest.log_probs[:, :top].tolist(), strict=True
    ):
        yield [] if log_probs[0] != log_probs[0] else list(zip(ids, log_probs, strict=True))
