"""Log-probabilities from logits, without overflow."""

from __future__ import annotations

import numpy as np


def log_probability(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """log p(target) in nats [B, T], from logits [B, T, V] and token ids [B, T]; 0 where the target is -1."""
    chosen = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return np.where(targets < 0, np.float32(0), chosen - log_sum_exp(logits))


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """log of the sum of exponentials over the last axis; NaN without a warning where one is NaN or +inf."""
    top = logits.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        result: np.ndarray = top[..., 0] + np.log(np.exp(logits - top).sum(axis=-1))
    return result
