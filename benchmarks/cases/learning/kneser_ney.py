"""An interpolated n-gram model with modified Kneser-Ney smoothing (Chen and Goodman 1999, section 3).

It is what language models were before neural ones, and it is still hard to beat on little text. The highest
order counts n-grams. A lower order counts how many different tokens stand before one, so a word that only
follows one other word is unlikely elsewhere. Each count is lowered by a discount, and what that frees goes to
the next lower order. Below the unigrams, every token of the vocabulary is equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtimes.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Order:
    """The n-grams of one order. Keys pack the tokens of an n-gram, the last one in the lowest bits.

    grams [K], counts [K]: the n-grams, ascending. contexts [C], totals [C]: the first n - 1 tokens, and the
    sum of the counts that follow them. freed [C]: the probability that the discounts leave to lower orders.
    discounts [4]: of the counts 0, 1, 2, and 3 or more.
    """

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    freed: np.ndarray
    discounts: np.ndarray


class KneserNey:
    """An n-gram model of a stream of token ids."""

    def __init__(self, tokens: np.ndarray, *, vocab_size: int, order: int = 5) -> None:
        """Counts the n-grams of `tokens` [N]; raises ConfigError if an n-gram does not fit into 64 bits."""
        self.vocab_size = vocab_size
        self.bits = max(1, (vocab_size - 1).bit_length())
        if order * self.bits > 64:
            raise ConfigError(
                f"{order}-grams of {vocab_size:,} tokens do not fit into 64 bits; give a lower order, or a "
                "vocabulary with fewer tokens."
            )
        orders: list[Order] = []
        grams, counts = np.unique(self._pack(tokens, order), return_counts=True)
        for n in range(order, 0, -1):
            orders.insert(0, self._order(grams, counts))
            # An n-gram without its first token is one of the next order. That is counted once for each
            # different first token.
            rest = grams & np.uint64((1 << (n - 1) * self.bits) - 1)
            grams, counts = np.unique(rest, return_counts=True)
        self.orders = tuple(orders)

    def probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """The probability of each token [N] after the tokens before it, of which it sees order - 1."""
        found = np.full(len(tokens), 1 / self.vocab_size)
        for n, order in enumerate(self.orders, 1):
            if len(tokens) < n:
                break
            grams = self._pack(tokens, n)
            at, known = _find(order.contexts, grams >> np.uint64(self.bits))
            gram, seen = _find(order.grams, grams)
            count = np.where(seen, order.counts[gram], 0)
            kept = count - order.discounts[np.minimum(count, 3)]
            higher = kept / order.totals[at] + order.freed[at] * found[n - 1 :]
            found[n - 1 :] = np.where(known, higher, found[n - 1 :])
        return found

    def _pack(self, tokens: np.ndarray, n: int) -> np.ndarray:
        """The n-grams [N - n + 1] of a stream as numbers."""
        tokens, length = np.asarray(tokens).astype(np.uint64), max(0, len(tokens) - n + 1)
        packed = np.zeros(length, np.uint64)
        for i in range(n):
            packed = (packed << np.uint64(self.bits)) | tokens[i : i + length]
        return packed

    def _order(self, grams: np.ndarray, counts: np.ndarray) -> Order:
        discounts = _discounts(counts)
        contexts, first = np.unique(grams >> np.uint64(self.bits), return_index=True)
        totals = np.add.reduceat(counts, first)
        freed = np.add.reduceat(discounts[np.minimum(counts, 3)], first) / totals
        return Order(
            grams=grams, counts=counts, contexts=contexts, totals=totals, freed=freed, discounts=discounts
        )


def _discounts(counts: np.ndarray) -> np.ndarray:
    """The discounts [4] of the counts 0, 1, 2 and at least 3 (Chen and Goodman 1999, equation 17).

    A text without n-grams of one of the counts 1 to 4 is too short for the equation; it gets half a count.
    """
    one, two, three, four = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    if not (one and two and three and four):
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = one / (one + 2 * two)
    return np.array([0.0, 1 - 2 * y * two / one, 2 - 3 * y * three / two, 3 - 4 * y * four / three]).clip(0)


def _find(ascending: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each number stands, or would stand but for the end, and whether it is there."""
    at = np.searchsorted(ascending, wanted).clip(max=len(ascending) - 1)
    return at, ascending[at] == wanted
