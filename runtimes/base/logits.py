"""Log-probabilities from logits, without overflow, and how far two answers are apart."""

from __future__ import annotations

import numpy as np


def log_probability(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """log p(target) in nats [B, T], from logits [B, T, V] and token ids [B, T]; 0 where the target is -1."""
    rows = logits.reshape(-1, logits.shape[-1])
    chosen = rows[np.arange(len(rows)), np.maximum(targets, 0).ravel()].reshape(targets.shape)
    return np.where(targets < 0, np.float32(0), chosen - log_sum_exp(logits))


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """log of the sum of exponentials over the last axis; NaN, without a warning, where one is NaN or +inf."""
    top = logits.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        shifted = logits - top
        result: np.ndarray = top[..., 0] + np.log(np.exp(shifted, out=shifted).sum(axis=-1))
    return result


def differences(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """How far log-probabilities are apart, in nats; 0 where both are -inf, which a padded vocabulary has.

    NaN where either is not a log-probability, so that no comparison with a tolerance holds.
    """
    impossible = (mine == -np.inf) & (theirs == -np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(impossible, 0, np.abs(mine - theirs))


def output_differences(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """How far outputs of any scale are apart: absolute where theirs are at most 1, and relative above."""
    with np.errstate(invalid="ignore"):
        return np.abs(mine - theirs) / np.maximum(1, np.abs(theirs))


def are_log_probs(values: np.ndarray) -> bool:
    """Whether no value is NaN or +inf. The log-probability of an impossible token is -inf."""
    return bool((values < np.inf).all())
