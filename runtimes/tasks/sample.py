"""Draws the next token of each row of a batch from its logits (docs/reference/step.md, "Sampling")."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from runtimes.base.errors import UserError
from runtimes.contract.sampling import Sampler

MIN_TEMPERATURE = (
    1e-250  # a temperature this low is greedy, and no difference of logits overflows when divided by it
)
NOT_FINITE = (
    "the model's logits are not finite, so no token can be drawn; its weights are damaged or diverged."
)
RANDOM_BATCH = 64  # random numbers
LOGITS_PER_DRAW = (
    1 << 16
)  # logits that are drawn from at once; the arrays of more would leave the processor's cache


def numbers(seed: int, row: int) -> Iterator[float]:
    """The random numbers of [0, 1) with which a row draws its tokens, without an end.

    Many are made at once: a step leaves none of NumPy's code in the processor's cache, so a call of its
    generator after each takes 7 µs.
    """
    chance = np.random.default_rng([seed, row])
    while True:
        yield from chance.random(RANDOM_BATCH).tolist()


class Penalties:
    """Changes the logits of one row, by a bias and by the tokens that the row has had.

    prompt: token ids before the first generated one. bias: added to the logits of some ids.
    """

    def __init__(
        self, sampler: Sampler, size: int, prompt: Sequence[int] | np.ndarray, bias: Mapping[int, float]
    ) -> None:
        self._sampler = sampler
        self._counts: Counter[int] = Counter()  # how often each token was generated
        self._has_bias = bool(bias)
        self._bias = np.zeros(size)
        self._subtracted = np.zeros(size)
        self._factor = np.ones(size)
        self._bias[list(bias)] = list(bias.values())
        self._factor[prompt] = sampler.repetition_penalty

    def apply(self, logits: np.ndarray) -> None:
        """Changes logits float64 [V] in place."""
        sampler = self._sampler
        if self._has_bias:
            logits += self._bias
        if sampler.repetition_penalty != 1:
            logits[:] = np.where(logits > 0, logits / self._factor, logits * self._factor)
        if sampler.presence_penalty or sampler.frequency_penalty:
            logits -= self._subtracted

    def add(self, token: int) -> None:
        """Counts a generated token."""
        sampler = self._sampler
        self._counts[token] += 1
        self._factor[token] = sampler.repetition_penalty
        self._subtracted[token] = sampler.presence_penalty + sampler.frequency_penalty * self._counts[token]


def penalties_of(
    sampler: Sampler, size: int, prompt: Sequence[int] | np.ndarray, bias: Mapping[int, float] | None = None
) -> Penalties | None:
    """The penalties of a row with these settings; None if they would change nothing."""
    penalises = (sampler.repetition_penalty, sampler.presence_penalty, sampler.frequency_penalty) != (1, 0, 0)
    return Penalties(sampler, size, prompt, bias or {}) if penalises or bias else None


class Draw:
    """Draws a token for each row of a batch. It is made once for as long as the rows stay the same.

    samplers, penalties: of each row, which keep count of the tokens that are drawn here. size: V. Every
    operation is elementwise or goes along one row, so a row's token does not depend on the other rows.
    """

    def __init__(
        self, samplers: Sequence[Sampler], size: int, penalties: Sequence[Penalties | None] = ()
    ) -> None:
        self._penalties = [(row, each) for row, each in enumerate(penalties) if each is not None]
        self._rows = np.arange(len(samplers))
        self._starts = self._rows * size
        settings = np.array([(each.temperature, each.top_p, each.min_p) for each in samplers], np.float64)
        temperature, self._top_p, self._min_p = settings.reshape(-1, 3).T[:, :, None]
        # Greedy is the first of the likeliest tokens, which is what the number 0 draws.
        self._random = temperature[:, 0] > 0
        self._all_random = bool(self._random.all())
        self.greedy = not self._random.any()  # then `uniform` is not used
        self._temperature = np.maximum(temperature, MIN_TEMPERATURE)
        self._any_temperature = bool((temperature != 1).any())
        self._without_top_p = self._top_p == 1
        self._any_top_p = not self._without_top_p.all()
        self._any_min_p = bool(self._min_p.any())
        kept = [size if sampler.top_k is None else min(sampler.top_k, size) for sampler in samplers]
        self._edge = size - np.array(kept)  # the place of the k-th largest logit in ascending order
        self._edges = sorted(set(self._edge.tolist()))  # np.unique would import numpy.ma
        # k, if all rows keep equally few tokens: the others, whose weight is 0, change no sum.
        self._few = kept[0] if len(self._edges) == 1 and 4 * kept[0] <= size else 0
        self._firsts = self._rows * self._few
        self._at_once = max(1, LOGITS_PER_DRAW // size)  # rows
        # The settings of the only row.
        self._only = (*samplers, self._edge.item()) if len(samplers) == 1 else None

    def __call__(self, logits: np.ndarray, uniform: Sequence[float] | np.ndarray) -> np.ndarray:
        """The tokens int64 [N] from logits float32 [N, V] and a random number of [0, 1) for each row.

        Raises UserError if a row has no finite maximum.
        """
        tokens = self.tokens(logits, uniform)
        if -1 in tokens:
            raise UserError(NOT_FINITE)
        return np.array(tokens)

    def tokens(self, logits: np.ndarray, uniform: Sequence[float] | np.ndarray) -> list[int]:
        """The same as a list; -1 for a row without a finite maximum."""
        if self._penalties:
            logits = logits.astype(np.float64)
            for row, penalties in self._penalties:
                penalties.apply(logits[row])
        if self._only is not None:
            tokens = [_drawn_alone(logits[0], uniform, *self._only)]
        else:
            tokens = self._of_rows(logits, uniform).tolist()
        for row, penalties in self._penalties:
            penalties.add(tokens[row])
        return tokens

    def _of_rows(self, logits: np.ndarray, uniform: Sequence[float] | np.ndarray) -> np.ndarray:
        tokens = logits.argmax(axis=1)
        highest = logits.take(self._starts + tokens)
        sound = None  # whether each row has a finite maximum, unless all have one
        if not all(map(math.isfinite, highest.tolist())):
            sound = np.isfinite(highest)
            logits = np.where(sound[:, None], logits, 0)
            highest = np.where(sound, highest, 0)
        if not self.greedy:
            wanted = np.asarray(uniform) if self._all_random else uniform * self._random
            if len(logits) <= self._at_once:
                tokens = self._drawn(logits, highest, wanted, slice(None))
            else:
                parts = [slice(at, at + self._at_once) for at in range(0, len(logits), self._at_once)]
                tokens = np.concatenate([self._drawn(logits[p], highest[p], wanted[p], p) for p in parts])
        if sound is not None:
            tokens[~sound] = -1
        return tokens

    def _drawn(self, logits: np.ndarray, highest: np.ndarray, uniform: np.ndarray, part: slice) -> np.ndarray:
        rows = self._rows[: len(logits)]
        kept = ids = None
        if self._edges != [0]:  # top_k
            ordered = logits.copy()  # np.partition does the same in 3 µs more
            ordered.partition(self._edges, axis=1)
            one = len(self._edges) == 1
            kept = logits >= (
                ordered[:, self._edges[0], None] if one else ordered[rows, self._edge[part], None]
            )
            if self._few:
                ids = kept.ravel().nonzero()[0]
                if len(ids) == self._few * len(logits):
                    kept = None
                    logits = logits.take(ids).reshape(-1, self._few)
                else:  # more, because some are equal
                    ids = None
        weights = np.subtract(logits, highest[:, None], dtype=np.float64)
        if self._any_temperature:
            weights /= self._temperature[part]
        np.exp(weights, out=weights)
        if kept is not None:
            weights *= kept
        if self._any_min_p:
            weights *= weights >= self._min_p[part]  # the largest weight is 1
        if self._any_top_p:
            ordered = weights.copy()
            ordered.sort(axis=1)
            ordered = ordered[:, ::-1]
            up_to = np.add.accumulate(ordered, axis=1)
            last = (up_to >= self._top_p[part] * up_to[:, -1:]).argmax(axis=1)
            weights *= (weights >= ordered[rows, last, None]) | self._without_top_p[part]
        up_to = np.add.accumulate(weights, axis=1)
        place: np.ndarray = (up_to > (uniform * up_to[:, -1])[:, None]).argmax(axis=1)
        if ids is None:
            return place
        drawn: np.ndarray = ids.take(self._firsts[: len(logits)] + place) - self._starts[: len(logits)]
        return drawn


def _drawn_alone(
    logits: np.ndarray, uniform: Sequence[float] | np.ndarray, sampler: Sampler, edge: int
) -> int:
    """The token of the only row, which is the one that it draws among others, with fewer calls of NumPy.

    logits: [V]. edge: the place of the k-th largest in ascending order.
    Returns -1 if there is no finite maximum.
    """
    token = int(logits.argmax())
    highest = logits.item(token)
    if not math.isfinite(highest):
        return -1
    if sampler.temperature == 0:
        return token
    ids = None
    if edge:
        ordered = logits.copy()
        ordered.partition(edge)
        ids = (logits >= ordered[edge]).nonzero()[0]
        logits = logits[ids]
    weights = np.subtract(logits, highest, dtype=np.float64)
    if sampler.temperature != 1:
        weights /= max(sampler.temperature, MIN_TEMPERATURE)
    np.exp(weights, out=weights)
    if sampler.min_p:
        weights *= weights >= sampler.min_p
    if sampler.top_p < 1:
        ordered = weights.copy()
        ordered.sort()
        ordered = ordered[::-1]
        up_to = np.add.accumulate(ordered)
        weights *= weights >= ordered[(up_to >= sampler.top_p * up_to[-1]).argmax()]
    up_to = np.add.accumulate(weights)
    place = int(up_to.searchsorted(uniform[0] * up_to[-1], side="right"))
    return place if ids is None else int(ids[place])
