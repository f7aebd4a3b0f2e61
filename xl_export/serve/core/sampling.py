"""Drawing a token in each row of a batch of logits, and the likeliest tokens beside it.

The tokens are bitwise those of `runtimes.tasks.sample.Sampler` for the same random numbers; the tests compare
them. The Sampler sorts the whole vocabulary, row by row. Here rows that are drawn alike are drawn together,
and only what may be drawn is sorted. Sums go over the whole vocabulary all the same, with its zeros: the
order in which NumPy adds decides the last bit.
"""

from __future__ import annotations

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


class Draws:
    """How the rows of some runs are drawn. It is made once for as long as the runs stay the same.

    runs: in the order of the rows. scored: the rows whose log-probabilities are wanted. tops: those whose
    likeliest tokens are wanted, with their number.
    """

    def __init__(self, runs: list[Running]) -> None:
        self.runs = runs
        tasks = [run.task for run in runs]
        drawings = [task.drawing for task in tasks if task.drawing is not None]
        assert len(drawings) == len(runs), "every run draws"
        self.samplers = [drawing.sampler for drawing in drawings]
        self.biased = [(row, drawing.bias) for row, drawing in enumerate(drawings) if drawing.bias]
        self.scored = [row for row, task in enumerate(tasks) if task.score or task.top]
        self.tops = [(row, task.top) for row, task in enumerate(tasks) if task.top]

    def draw(self, logits: np.ndarray) -> list[int]:
        """The token of each row of logits float32 [N, V]; -1 where a row has no finite maximum."""
        if self.biased:
            logits = logits.copy()
            for row, bias in self.biased:
                logits[row, list(bias)] += np.array(list(bias.values()), np.float32)
        highest = logits.max(axis=1)
        sound = np.isfinite(highest)
        if not sound.all():
            rows = np.flatnonzero(sound).tolist()
            tokens = [-1] * len(self.runs)
            for row, token in zip(
                rows, Draws([self.runs[r] for r in rows])._drawn(logits[rows]), strict=True
            ):
                tokens[row] = token
            return tokens
        return self._drawn(logits)

    def _drawn(self, logits: np.ndarray) -> list[int]:
        """The tokens where every row has a finite maximum and its bias."""
        groups = self._groups
        if len(groups) == 1 and groups[0].whole:
            drawn: list[int] = groups[0].draw(logits, self.runs).tolist()
            return drawn
        tokens = np.empty(len(self.runs), np.int64)
        for group in groups:
            tokens[group.rows] = group.draw(logits[group.rows], [self.runs[row] for row in group.rows])
        drawn = tokens.tolist()
        return drawn

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
                kind = "whole" if sampler.top_p >= 1 and k is None else f"alone {row}"
            rows.setdefault(kind, []).append(row)
        return [_Group(kind, own, self.samplers, len(self.runs)) for kind, own in rows.items()]


class _Group:
    """Rows that are drawn in the same way: greedily, from their top k, from everything, or one row alone."""

    def __init__(self, kind: int | str, rows: list[int], samplers: Sequence[Sampler], total: int) -> None:
        self.kind, self.rows, self.whole = kind, rows, len(rows) == total
        self.samplers = [samplers[row] for row in rows]
        self._temperature = np.array([sampler.temperature for sampler in self.samplers])[:, None]
        self._share = np.array([sampler.top_p for sampler in self.samplers])[:, None]
        self._shares = bool((self._share < 1).any())

    def draw(self, logits: np.ndarray, runs: Sequence[Running]) -> np.ndarray:
        """The tokens int64 [N] of the group's rows."""
        if self.kind == "greedy":
            return logits.argmax(axis=1)
        uniform = np.array([run.uniform() for run in runs])
        at_once = max(1, CELLS // logits.shape[1])
        if len(logits) <= at_once:
            return self._draw(logits, uniform, slice(None))
        parts = [slice(at, at + at_once) for at in range(0, len(logits), at_once)]
        return np.concatenate([self._draw(logits[part], uniform[part], part) for part in parts])

    def _draw(self, logits: np.ndarray, uniform: np.ndarray, part: slice) -> np.ndarray:
        if isinstance(self.kind, int) and self.kind < logits.shape[1]:
            return self._from_top_k(self.kind, logits, uniform, part)
        if self._shares or str(self.kind).startswith("alone"):
            alone = zip(self.samplers[part], logits, uniform.tolist(), strict=True)
            return np.array([_alone(*row) for row in alone])
        weights = np.exp(_scaled(logits, logits, self._temperature[part]))
        return _chosen(weights / weights.sum(axis=1, keepdims=True), uniform)

    def _from_top_k(self, k: int, logits: np.ndarray, uniform: np.ndarray, part: slice) -> np.ndarray:
        size = logits.shape[1]
        parted = np.partition(logits, (size - k - 1, size - k), axis=1)
        edge = parted[:, size - k, None]
        kept = logits >= edge
        # Equals at the edge, as large as they are or once they are scaled: the smaller ids are kept.
        edges = _scaled(parted[:, size - k - 1 : size - k + 1], logits, self._temperature[part])
        if (edges[:, 0] == edges[:, 1]).any():
            alone = zip(self.samplers[part], logits, uniform.tolist(), strict=True)
            return np.array([_alone(*row) for row in alone])
        rows, ids = kept.nonzero()
        ids = ids.reshape(-1, k)
        weights = np.exp(_scaled(logits[rows, ids.ravel()].reshape(-1, k), logits, self._temperature[part]))
        spread = np.zeros(logits.shape)
        if self._shares:
            np.put_along_axis(spread, ids, weights, axis=1)
            order = np.argsort(-weights, axis=1, kind="stable")
            ordered = np.take_along_axis(weights, order, axis=1)
            before = np.cumsum(ordered, axis=1) - ordered
            share = self._share[part]
            dropped = (before >= share * spread.sum(axis=1, keepdims=True)) & (share < 1)
            np.put_along_axis(weights, order, np.where(dropped, 0.0, ordered), axis=1)
        np.put_along_axis(spread, ids, weights, axis=1)
        chosen = _chosen(weights / spread.sum(axis=1, keepdims=True), uniform)
        return ids[np.arange(len(ids)), chosen]


def _scaled(values: np.ndarray, logits: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """Some values [N, K] of logits [N, V] as the Sampler scales them, float64."""
    with np.errstate(over="ignore"):
        scaled: np.ndarray = (values.astype(np.float64) - logits.max(axis=1)[:, None]) / temperature
    return scaled


def _chosen(probabilities: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """The index that `Generator.choice` takes in each row for a random number of [0, 1)."""
    below = np.cumsum(probabilities, axis=1)
    below /= below[:, -1:].copy()
    chosen: np.ndarray = (below <= uniform[:, None]).sum(axis=1)
    return chosen


def _alone(sampler: Sampler, logits: np.ndarray, uniform: float) -> int:
    """The token of one row, for any sampler."""
    scaled = _scaled(logits[None], logits[None], np.array([[sampler.temperature]]))[0]
    weights = _within_share(np.exp(keep_top_k(scaled, sampler.top_k)), sampler.top_p)
    return int(_chosen((weights / weights.sum())[None], np.array([uniform]))[0])


def _within_share(weights: np.ndarray, share: float) -> np.ndarray:
    """`keep_top_p`, which sorts only the head where that holds the share."""
    if share >= 1 or len(weights) <= 2 * HEAD:
        return keep_top_p(weights, share)
    least = np.partition(weights, len(weights) - HEAD)[len(weights) - HEAD]
    ids = np.flatnonzero(weights >= least)
    order = ids[np.argsort(-weights[ids], kind="stable")]
    ordered = weights[order]
    up_to, wanted = np.cumsum(ordered), share * weights.sum()
    if up_to[-1] * (1 - 1e-9) < wanted:  # the rest may hold some of the share
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
