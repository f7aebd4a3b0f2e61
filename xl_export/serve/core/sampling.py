"""The next token of each row, and log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtimes.base.logits import clamped, log_sum_exp
from runtimes.contract.vocabulary.base import Decoder
from runtimes.contract.vocabulary.growing_text import GrowingText
from runtimes.tasks.sample import Draw, penalties_of
from xl_export.serve.core.running import Running
from xl_export.serve.core.task import Likeliest


class RowSampler:
    """Samples a token for each of some runs. It is made once for as long as the runs stay the same.

    runs: in the order of the rows. size: of the vocabulary. end: the token that ends a document.
    """

    def __init__(self, runs: list[Running], size: int, end: int | None) -> None:
        self.runs = runs
        self.places: list[tuple[Running, Callable[[int], None], GrowingText, Decoder | None, int, int]] = []
        """What a token needs of its run: the run, how it notes a drawn token, its text, `GrowingText.plain`
        of that, the token that ends it (-1 if none does), and the most tokens.
        """
        self.keeps = False
        """Whether a stream of them is kept."""
        self.tokens = np.empty((len(runs), 1), np.int64)
        """int64 [N, 1], those that were drawn last."""
        self.scored: list[int] = []
        """The rows whose log-probabilities are wanted."""
        self.tops: list[tuple[int, int]] = []
        """The rows whose likeliest tokens are wanted, with their number."""
        samplers = []
        penalties = []
        self._uniform = []
        for row, run in enumerate(runs):
            task = run.task
            sampling = task.sampling
            text = run.text
            assert sampling is not None, "every run draws"
            assert text is not None
            ends_at = end if sampling.ends and end is not None else -1
            self.places.append((run, run.drawn.append, text, text.plain, ends_at, sampling.max_tokens))
            self.keeps |= task.keep
            if task.score or task.top:
                self.scored.append(row)
            if task.top:
                self.tops.append((row, task.top))
            if run.penalties is None:  # a run that was drawn from before keeps its counts
                prompt = task.tokens if sampling.prompt is None else sampling.prompt
                run.penalties = penalties_of(sampling.sampler, size, prompt, sampling.bias)
            samplers.append(sampling.sampler)
            penalties.append(run.penalties)
            self._uniform.append(run.uniform)
        self._draw = Draw(samplers, size, penalties)

    def sample(self, logits: np.ndarray) -> list[int]:
        """The token of each row of logits float32 [N, V]; -1 if a row has no finite maximum."""
        uniform = () if self._draw.greedy else [next_number() for next_number in self._uniform]
        tokens = self._draw.tokens(logits, uniform)
        self.tokens[:, 0] = tokens
        return tokens

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
    return Likeliest(ids=ids, log_probs=clamped(log_probs).astype(np.float32))


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
