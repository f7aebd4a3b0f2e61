"""Log-probabilities from logits, without overflow, and how much two answers differ."""

from __future__ import annotations

import math

import numpy as np

# What answers say of a token that the model deems impossible, in nats. JSON has no word for -inf, and null
# would pass for a value that is not known. OpenAI's servers and vLLM answer the same number.
IMPOSSIBLE = -9999.0


def clamped(log_probs: np.ndarray) -> np.ndarray:
    """Log-probabilities as all answers report and add them up: none is below IMPOSSIBLE. NaN stays NaN."""
    reported: np.ndarray = np.maximum(log_probs, IMPOSSIBLE)
    return reported


def log_probability(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """log p(target) in nats [B, T], from logits [B, T, V] and token ids [B, T]; 0 where the target is -1."""
    if targets.size == 1:
        return _of_one_token(logits.reshape(-1), targets)
    size = logits.shape[-1]
    chosen = logits.take(np.arange(0, logits.size, size) + targets.ravel())  # of a target -1 any number
    log_probs: np.ndarray = chosen.reshape(targets.shape) - log_sum_exp(logits)
    log_probs[targets < 0] = 0
    return log_probs


def _of_one_token(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The same bits for one token, from logits [V], with few calls: after a step each takes microseconds."""
    log_probs = np.empty(targets.shape, logits.dtype)
    target = targets.item()
    top = logits[logits.argmax()]
    if target < 0:
        log_probs.fill(0)
    elif not math.isfinite(top):
        log_probs.fill(np.nan)
    else:
        weights = logits - top
        np.exp(weights, out=weights)
        log_probs.fill(logits[target] - (np.log(np.add.reduce(weights)) + top))
    return log_probs


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """log of the sum of exponentials over the last axis; NaN, without a warning, if any is NaN or +inf."""
    top = np.maximum.reduce(logits, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.subtract(logits, top)
        np.exp(weights, out=weights)
        result: np.ndarray = np.log(np.add.reduce(weights, axis=-1))
    result += top[..., 0]
    return result


def differences(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """How much log-probabilities differ, in nats; 0 where both are -inf, which a padded vocabulary has.

    NaN where either is not a log-probability, so that no comparison with a tolerance holds.
    """
    impossible = (mine == -np.inf) & (theirs == -np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(impossible, 0, np.abs(mine - theirs))


def output_differences(mine: np.ndarray, theirs: np.ndarray, *, scale: float = 1.0) -> np.ndarray:
    """How much outputs differ, as a share of `scale`, or of theirs where that is larger."""
    with np.errstate(invalid="ignore"):
        return np.abs(mine - theirs) / np.maximum(scale, np.abs(theirs))


def are_log_probs(values: np.ndarray) -> bool:
    """Whether no value is NaN or +inf. The log-probability of an impossible token is -inf."""
    return bool((values < np.inf).all())
