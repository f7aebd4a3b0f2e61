"""Draws the next token from logits: greedily, or with temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtimes.base.errors import UserError

HOTTEST = 1e6  # at this temperature all tokens are as good as equally likely


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How to draw a token.

    temperature: 0 is greedy. top_k: only the k likeliest tokens are drawn from; all when None. top_p: only
    the likeliest tokens are drawn from that together have this probability. The paper generates with top_k 40
    (Dai et al. 2019, Appendix E).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= HOTTEST:
            raise UserError(f"temperature is {self.temperature}; expected 0 (greedy) to {HOTTEST:,.0f}.")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; expected at least 1.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; expected above 0 and at most 1.")

    def __call__(self, logits: np.ndarray, rng: np.random.Generator) -> int:
        """One token id from logits [V]; raises UserError where they have no finite maximum."""
        if not np.isfinite(logits.max()):
            raise UserError(
                "the model's logits are not finite, so no token can be drawn; its weights are damaged or "
                "diverged."
            )
        if self.temperature == 0:
            return int(logits.argmax())
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to minus infinity
            scaled = (logits.astype(np.float64) - logits.max()) / self.temperature
        probabilities = keep_top_p(np.exp(keep_top_k(scaled, self.top_k)), self.top_p)
        return int(rng.choice(len(probabilities), p=probabilities / probabilities.sum()))


def keep_top_k(logits: np.ndarray, k: int | None) -> np.ndarray:
    """Logits [V] in which all but the k largest are minus infinity. Of equals the smaller id is kept."""
    if k is None or k >= len(logits):
        return logits
    kept = np.full_like(logits, -np.inf)
    best = np.argsort(-logits, kind="stable")[:k]
    kept[best] = logits[best]
    return kept


def keep_top_p(weights: np.ndarray, p: float) -> np.ndarray:
    """Unnormalised probabilities [V], zero outside the smallest set of tokens that together have the share
    p.
    """
    if p >= 1:
        return weights
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = weights.copy()
    kept[order[before >= p * weights.sum()]] = 0.0
    return kept
