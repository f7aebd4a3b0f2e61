"""Draws a token for each row of an engine, and finds the likeliest tokens and their log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from runtimes.base.logits import log_sum_exp
from runtimes.tasks.sample import Draw, penalties_of
from xl_export.serve.core.running import Running
from xl_export.serve.core.task import Likeliest


class RowSampler:
    """Samples a token for each of some runs. It is made once for as long as the runs stay the same.

    runs: in the order of the rows. size: of the vocabulary. end: the token that ends a document. places: what
    a token needs of its run: the run, how it notes a drawn token, its text, `GrowingText.plain` of that, the
    token that ends it (-1 if none does), and the most tokens. keeps: whether a stream of them is kept.
    tokens: int64 [N, 1], those that were drawn last. accounts: how many of the runs each tenant has. scored:
    the rows whose log-probabilities are wanted. tops: those whose likeliest tokens are wanted, with their
    number.
    """

    def __init__(self, runs: list[Running], size: int, end: int | None) -> None:
        self.runs = runs
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
        self.scored = [row for row, task in enumerate(tasks) if task.score or task.top]
        self.tops = [(row, task.top) for row, task in enumerate(tasks) if task.top]
        self._uniform = [run.uniform for run in runs]
        for run, drawing in zip(runs, drawings, strict=True):
            if run.penalties is None:  # a run that was drawn from before keeps its counts
                prompt = run.task.tokens if drawing.prompt is None else drawing.prompt
                run.penalties = penalties_of(drawing.sampler, size, prompt, drawing.bias)
        self._draw = Draw([drawing.sampler for drawing in drawings], size, [run.penalties for run in runs])

    def sample(self, logits: np.ndarray) -> list[int]:
        """The token of each row of logits float32 [N, V]; -1 if a row has no finite maximum."""
        uniform = () if self._draw.greedy else [next_number() for next_number in self._uniform]
        tokens = self._draw.tokens(logits, uniform)
        self.tokens = tokens[:, None]
        drawn: list[int] = tokens.tolist()
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
