"""Drawing a token in each row of a batch of logits, and the likeliest tokens beside it.

Every token is the one of `runtimes.tasks.sample.Sampler` for the same random numbers; the tests compare them.
The Sampler sorts and adds up the whole vocabulary, row by row. Here rows that are drawn alike are drawn
together, and only what may be drawn is added up, in another order. That changes the last bits of the sums. So
a row whose random number lies too near to the border between two tokens, or whose top_k or top_p cuts between
equals, is drawn again as the Sampler does it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from runtimes.base.logits import log_sum_exp
from runtimes.tasks.sample import Sampler, keep_top_k, keep_top_p
from xl_export.serve.core.running import Running
from xl_export.serve.core.task import Likeliest

MOST_SPARSE = 1024  # the largest top_k for which the kept tokens are gathered
HEAD = 512  # the likeliest tokens among which the end of top_p is looked for first
CELLS = 1 << 16  # logits that are drawn from at once; more would leave the cache of the processor
SORTED = 1024  # a row of so many logits is sorted faster than its top k are found
BLOCK = 256  # weights that are added up one by one
ROUNDING = 1e-9  # far more than any order of adding changes, relative to the sum
COLDEST = 1e-200  # temperatures below may overflow


class Draws:
    """How the rows of some runs are drawn. It is made once for as long as the runs stay the same.

    runs: in the order of the rows. end: the token that ends a document. places: what a token needs of its
    run: the run, how it notes a drawn token, its text, `GrowingText.plain` of that, the token that ends it
    (-1 where none does), and the most tokens. keeps: whether a stream of them is kept. tokens: int64 [N, 1],
    those that were drawn last. accounts: how many of the runs each tenant has. scored: the rows whose
    log-probabilities are wanted. tops: those whose likeliest tokens are wanted, with their number.
    """

    def __init__(self, runs: list[Running], end: int | None) -> None:
        self.runs, self._end = runs, end
        tasks = [run.task for run in runs]
        drawings = [task.drawing for task in tasks if task.drawing is not None]
        assert len(drawings) == len(runs), "every run draws"
        self.places = [
            (
                run,
                run.drawn.append,
                text,
                text.plain,
                end if drawing.ends and end is not None else -1,
                drawing.max_tokens,
            )
            for run, drawing in zip(runs, drawings, strict=True)
            if (text := run.text) is not None
        ]
        self.keeps = any(task.keep for task in tasks)
        self.tokens = np.empty((0, 1), np.int64)
        self.accounts = list(Counter(run.account for run in runs).items())
        self.samplers = [drawing.sampler for drawing in drawings]
        self.biased = [(row, drawing.bias) for row, drawing in enumerate(drawings) if drawing.bias]
        self.scored = [row for row, task in enumerate(tasks) if task.score or task.top]
        self.tops = [(row, task.top) for row, task in enumerate(tasks) if task.top]

    def draw(self, logits: np.ndarray) -> list[int]:
        """The token of each row of logits float32 [N, V]; -1 where a row has no finite maximum."""
        if self._all_greedy:
            tokens = logits.argmax(axis=1)
            if math.isfinite(np.add.reduce(logits[self._rows, tokens])):  # it is not where any of them is not
                self.tokens = tokens[:, None]
                drawn: list[int] = tokens.tolist()
                return drawn
        drawn = self._draw(logits)
        self.tokens = np.array(drawn, np.int64)[:, None]
        return drawn

    def _draw(self, logits: np.ndarray) -> list[int]:
        if self.biased:
            logits = logits.copy()
            for row, bias in self.biased:
                logits[row, list(bias)] += np.array(list(bias.values()), np.float32)
        highest = logits.max(axis=1)
        sound = np.isfinite(highest)
        if not sound.all():
            rows = np.flatnonzero(sound).tolist()
            tokens = [-1] * len(self.runs)
            others = Draws([self.runs[row] for row in rows], self._end)._drawn(logits[rows], highest[rows])
            for row, token in zip(rows, others, strict=True):
                tokens[row] = token
            return tokens
        return self._drawn(logits, highest)

    def _drawn(self, logits: np.ndarray, highest: np.ndarray) -> list[int]:
        """The tokens where every row has its bias and a finite maximum, `highest`."""
        groups = self._groups
        if len(groups) == 1 and groups[0].whole:
            drawn: list[int] = groups[0].draw(logits, highest, self.runs).tolist()
            return drawn
        tokens = np.empty(len(self.runs), np.int64)
        for group in groups:
            rows = group.rows
            tokens[rows] = group.draw(logits[rows], highest[rows], [self.runs[row] for row in rows])
        drawn = tokens.tolist()
        return drawn

    def log_probs(
        self, logits: np.ndarray, tokens: Sequence[int]
    ) -> tuple[dict[int, float], dict[int, Likeliest]]:
        """log p of the drawn tokens, and the likeliest ones, by the rows that want them."""
        wanted = self.scored
        if not wanted:
            return {}, {}
        found = log_probs_of(logits[wanted], np.array([tokens[row] for row in wanted])).tolist()
        likely = {row: likeliest(logits[row][None], top) for row, top in self.tops}
        return dict(zip(wanted, found, strict=True)), likely

    @cached_property
    def _rows(self) -> np.ndarray:
        return np.arange(len(self.runs))

    @cached_property
    def _all_greedy(self) -> bool:
        """Whether the token of every row is that of its largest logit."""
        return not self.biased and all(sampler.temperature == 0 for sampler in self.samplers)

    @cached_property
    def _groups(self) -> list[_Group]:
        """The rows that are drawn in the same way."""
        rows: dict[int | str, list[int]] = {}
        for row, sampler in enumerate(self.samplers):
            k = sampler.top_k
            kind: int | str
            if sampler.temperature == 0:
                kind = "greedy"
            elif k is not None and k <= MOST_SPARSE:
                kind = k
            else:
                kind = f"alone {row}" if k is not None else "whole" if sampler.top_p >= 1 else "share"
            rows.setdefault(kind, []).append(row)
        return [_Group(kind, own, self.samplers, len(self.runs)) for kind, own in rows.items()]


class _Group:
    """Rows that are drawn in the same way: greedily, from their top k, from a share of the probability, from
    everything, or one row alone.
    """

    def __init__(self, kind: int | str, rows: list[int], samplers: Sequence[Sampler], total: int) -> None:
        self.kind, self.rows, self.whole = kind, rows, len(rows) == total
        self.samplers = [samplers[row] for row in rows]
        temperatures = np.array([sampler.temperature for sampler in self.samplers])
        self._temperature = temperatures[:, None]
        self._share = np.array([sampler.top_p for sampler in self.samplers])[:, None]
        self._shares = bool((self._share < 1).any())
        self._extreme = bool((temperatures < COLDEST).any())

    def draw(self, logits: np.ndarray, highest: np.ndarray, runs: Sequence[Running]) -> np.ndarray:
        """The tokens int64 [N] of the group's rows. highest: the largest logit of each."""
        if self.kind == "greedy":
            return logits.argmax(axis=1)
        uniform = np.array([run.random.popleft() if run.random else run.uniform() for run in runs])
        at_once = max(1, CELLS // logits.shape[1])
        if len(logits) <= at_once:
            return self._draw(logits, highest, uniform, slice(None))
        parts = [slice(at, at + at_once) for at in range(0, len(logits), at_once)]
        return np.concatenate([self._draw(logits[p], highest[p], uniform[p], p) for p in parts])

    def _draw(self, logits: np.ndarray, highest: np.ndarray, uniform: np.ndarray, part: slice) -> np.ndarray:
        if isinstance(self.kind, int) and self.kind < logits.shape[1]:
            tokens, sure = self._from_top_k(self.kind, logits, highest, uniform, part)
        elif self.kind == "share" and not self._extreme:
            tokens, sure = self._from_share(logits, highest, uniform, part)
        elif self._extreme or self._shares or str(self.kind).startswith("alone"):
            tokens, sure = np.empty(len(logits), np.int64), np.zeros(len(logits), bool)
        else:
            tokens, sure = _chosen(self._weights(logits, highest, part), uniform)
        if not sure.all():
            samplers = self.samplers[part]
            for row in np.flatnonzero(~sure).tolist():
                tokens[row] = _alone(samplers[row], logits[row], float(uniform[row]))
        return tokens

    def _weights(self, logits: np.ndarray, highest: np.ndarray, part: slice) -> np.ndarray:
        """Unnormalised probabilities float64 of some logits [N, K] of each row."""
        weights = logits.astype(np.float64)
        weights -= highest[:, None]
        weights /= self._temperature[part]
        return np.exp(weights, out=weights)

    def _from_top_k(
        self, k: int, logits: np.ndarray, highest: np.ndarray, uniform: np.ndarray, part: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, and whether they are sure."""
        rows, size = logits.shape
        if size <= SORTED:
            ordered = np.sort(logits, axis=1)
            edge, below = ordered[:, size - k], ordered[:, size - k - 1]
            clear = _apart(edge, below, highest)
        else:
            edge = np.partition(logits, size - k, axis=1)[:, size - k]
            below = np.where(logits < edge[:, None], logits, -np.inf).max(axis=1)
            clear = _apart(edge, below, highest) & ((logits >= edge[:, None]).sum(axis=1) == k)
        if self._extreme or not clear.all():
            return self._where_clear(k, clear, logits, highest, uniform, part)
        kept = (logits >= edge[:, None]).ravel().nonzero()[0]
        values = logits.ravel()[kept].reshape(rows, k)
        weights = self._weights(values, highest, part)
        sure = True if not self._shares else _within_shares(weights, self._share[part])
        places, found = _chosen(weights, uniform)
        tokens = kept.reshape(rows, k)[np.arange(rows), places] - np.arange(0, rows * size, size)
        return tokens, found & sure

    def _from_share(
        self, logits: np.ndarray, highest: np.ndarray, uniform: np.ndarray, part: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens where top_p alone leaves some out, and whether they are sure: not where the likeliest
        HEAD of them hold less than the share.
        """
        size = logits.shape[1]
        count = min(size, HEAD)
        head = np.partition(logits, size - count, axis=1)[:, size - count :] if count < size else logits
        head = np.sort(head, axis=1)[:, ::-1]
        weights = self._weights(logits, highest, part)
        total = weights.sum(axis=1, keepdims=True)
        ordered = self._weights(head, highest, part)
        up_to = np.cumsum(ordered, axis=1)
        before = up_to - ordered
        limit, margin = self._share[part] * total, ROUNDING * total
        rows, kept = np.arange(len(logits)), (before < limit).sum(axis=1)  # at least one: before begins at 0
        edge = head[rows, kept - 1]
        below = np.where(kept < count, head[rows, np.minimum(kept, count - 1)], -np.inf)
        sure = (np.abs(before - limit) > margin).all(axis=1) & _apart(edge, below, highest)
        sure &= (kept < count) | (count == size)
        weights[logits < edge[:, None]] = 0.0
        places, found = _chosen(weights, uniform)
        return places, found & sure

    def _where_clear(
        self,
        k: int,
        clear: np.ndarray,
        logits: np.ndarray,
        highest: np.ndarray,
        uniform: np.ndarray,
        part: slice,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`_from_top_k` of the rows whose top k do not end between equals; the others are not sure."""
        tokens, sure = np.zeros(len(logits), np.int64), np.zeros(len(logits), bool)
        rows = np.flatnonzero(clear & ~self._extreme)
        if len(rows):
            samplers = [self.samplers[part][row] for row in rows]
            own = _Group(k, list(range(len(rows))), samplers, len(rows))
            tokens[rows], sure[rows] = own._from_top_k(
                k, logits[rows], highest[rows], uniform[rows], slice(None)
            )
        return tokens, sure


def _apart(edge: np.ndarray, below: np.ndarray, highest: np.ndarray) -> np.ndarray:
    """Whether two logits of each row [N] are different for sure once the largest is subtracted."""
    with np.errstate(invalid="ignore"):  # minus infinity twice
        return edge - below > ROUNDING * (np.abs(edge) + np.abs(highest))


def _within_shares(weights: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Sets the weights [N, K] to zero that top_p leaves out, and says in which rows that is sure."""
    order = np.argsort(-weights, axis=1, kind="stable")
    order += np.arange(0, weights.size, weights.shape[1])[:, None]
    flat = weights.ravel()
    ordered = flat[order]
    up_to = np.cumsum(ordered, axis=1)
    before = up_to - ordered
    limit = share * up_to[:, -1:]
    margin = ROUNDING * up_to[:, -1:]
    flat[order[(before >= limit) & (share < 1)]] = 0.0
    sure: np.ndarray = ((np.abs(before - limit) > margin) | (share >= 1)).all(axis=1)
    return sure


def _chosen(weights: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The place in each row of weights [N, K] that a random number of [0, 1) falls on, and whether it does
    for sure, in whatever order the weights are added.
    """
    rows, size = np.arange(len(weights)), weights.shape[1]
    if size <= 2 * BLOCK:
        up_to = np.cumsum(weights, axis=1)
        total = up_to[:, -1]
        wanted = uniform * total
        places = (up_to > wanted[:, None]).argmax(axis=1)
        upper = up_to[rows, places]
        lower = upper - weights[rows, places]
    else:  # first the block, then the place in it
        blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, size, BLOCK), axis=1), axis=1)
        total = blocks[:, -1]
        wanted = uniform * total
        block = (blocks > wanted[:, None]).argmax(axis=1)
        before = np.where(block > 0, blocks[rows, block - 1], 0.0)
        inside = block[:, None] * BLOCK + np.arange(BLOCK)
        own = np.where(inside < size, weights[rows[:, None], np.minimum(inside, size - 1)], 0.0)
        up_to = before[:, None] + np.cumsum(own, axis=1)
        place = (up_to > wanted[:, None]).argmax(axis=1)
        places = inside[rows, place]
        upper = up_to[rows, place]
        lower = upper - own[rows, place]
    margin = ROUNDING * total
    sure: np.ndarray = (upper - wanted > margin) & ((wanted - lower > margin) | (places == 0))
    return places, sure


def _alone(sampler: Sampler, logits: np.ndarray, uniform: float) -> int:
    """What the Sampler draws from logits [V] for a random number, bit by bit."""
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - logits.max()) / sampler.temperature
    weights = _within_share(np.exp(keep_top_k(scaled, sampler.top_k)), sampler.top_p)
    below = (weights / weights.sum()).cumsum()
    below /= below[-1]
    return int(below.searchsorted(uniform, side="right"))


def _within_share(weights: np.ndarray, share: float) -> np.ndarray:
    """`keep_top_p`, which sorts only the head where that holds the share."""
    if share >= 1 or len(weights) <= 2 * HEAD:
        return keep_top_p(weights, share)
    least = np.partition(weights, len(weights) - HEAD)[len(weights) - HEAD]
    ids = np.flatnonzero(weights >= least)
    order = ids[np.argsort(-weights[ids], kind="stable")]
    ordered = weights[order]
    up_to, wanted = np.cumsum(ordered), share * weights.sum()
    if up_to[-1] * (1 - ROUNDING) < wanted:  # the rest may hold some of the share
        return keep_top_p(weights, share)
    kept = np.zeros_like(weights)
    inside = order[up_to - ordered < wanted]
    kept[inside] = weights[inside]
    return kept


def log_probs_of(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """log p float32 [N] of tokens int64 [N] from logits [N, V]."""
    chosen = np.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    found: np.ndarray = (chosen - log_sum_exp(logits)).astype(np.float32)
    return found


def likeliest(logits: np.ndarray, count: int) -> Likeliest:
    """The `count` likeliest tokens at N places, from logits [N, V]; of equals the smaller id first."""
    ids = _largest(logits, min(count, logits.shape[1]))
    log_probs = np.take_along_axis(logits, ids, axis=1) - log_sum_exp(logits)[:, None]
    return Likeliest(ids=ids, log_probs=log_probs.astype(np.float32))


def _largest(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids int64 [N, count] of the largest logits, in descending order."""
    size = logits.shape[1]
    if 4 * count < size:
        edge = np.partition(logits, size - count, axis=1)[:, size - count, None]
        rows, ids = (logits >= edge).nonzero()
        if len(ids) == count * len(logits) and (np.bincount(rows, minlength=len(logits)) == count).all():
            ids = ids.reshape(-1, count)
            order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
            return np.take_along_axis(ids, order, axis=1)
    return np.argsort(-logits, axis=1, kind="stable")[:, :count]
