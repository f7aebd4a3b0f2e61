"""Drawing a token in each row of a batch of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtimes.base.logits import log_sum_exp
from xl_export.serve.core.running import Running
from xl_export.serve.core.task import Likeliest


def draw(logits: np.ndarray, runs: Sequence[Running]) -> list[int]:
    """The token that each run draws from its row of logits float32 [N, V]; -1 where a row has no finite
    maximum.
    """
    tokens = []
    for row, run in zip(logits, runs, strict=True):
        drawing = run.task.drawing
        assert drawing is not None
        assert run.rng is not None
        if drawing.bias:
            row = row.copy()
            row[list(drawing.bias)] += np.array(list(drawing.bias.values()), np.float32)
        tokens.append(drawing.sampler(row, run.rng) if np.isfinite(row.max()) else -1)
    return tokens


def log_probs_of(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """log p float32 [N] of tokens int64 [N] from logits [N, V]."""
    chosen = np.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    found: np.ndarray = (chosen - log_sum_exp(logits)).astype(np.float32)
    return found


def likeliest(logits: np.ndarray, count: int) -> Likeliest:
    """The `count` likeliest tokens at N places, from logits [N, V]; of equals the smaller id first."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    log_probs = np.take_along_axis(logits, ids, axis=-1) - log_sum_exp(logits)[:, None]
    return Likeliest(ids=ids, log_probs=log_probs.astype(np.float32))
