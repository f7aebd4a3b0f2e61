"""Relative effective context length: how far back a model finds what helps it, against a group of models.

Dai et al. 2019, section 4.3 and Appendix C. With l_i(c, t) the loss of model i on token t given the c tokens
before it:

    b(c, t)     = min_i l_i(c, t)                           the group's baseline, position by position
    T           = the share r of all positions where b(c, t) is largest
    f_i(c, c')  = mean over T of min(b(c, t), l_i(c', t))   the relative loss: a loss above the baseline is
    cut g_i(c, c')  = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)    the relative gain, of perplexity

and RECL is the first c, from the shortest on, for which g_i(c, c + Δ) < 0.01.

The paper leaves some choices open. Here the shortest c and the step Δ follow from the lengths measured,
which need not be evenly spaced. T has round(r N) of the N positions, at least one, and the earlier of two
equals. A model that still gains at the last length has *at least* that RECL.

Letters: I models, C context lengths, N positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

THRESHOLD = 0.01


@dataclass(frozen=True)
class Recl:
    """A model's RECL in tokens; a lower bound where it still gains at the last length measured."""

    length: int
    at_least: bool

    def __str__(self) -> str:
        return f"≥ {self.length}" if self.at_least else str(self.length)


def recl(losses_ICN: np.ndarray, lengths: Sequence[int], *, r: float) -> list[Recl]:
    """The RECL of each model.

    losses_ICN: nats; lengths: the C context lengths, ascending; r: 0 to 1, 0 excluded.
    """
    found = []
    for gains in relative_gains(losses_ICN, r=r):
        small = np.flatnonzero(gains < THRESHOLD)
        found.append(
            Recl(lengths[small[0]], at_least=False) if len(small) else Recl(lengths[-1], at_least=True)
        )
    return found


def relative_gains(losses_ICN: np.ndarray, *, r: float) -> np.ndarray:
    """The gain g_i(c, c') [I, C - 1] of each step from one length to the next."""
    steps = range(losses_ICN.shape[1] - 1)
    pairs = [relative_losses(losses_ICN, step, step + 1, r=r) for step in steps]
    return np.stack([-np.expm1(after - before) for before, after in pairs], axis=1)


def perplexity_gains(losses_ICN: np.ndarray, *, r: float) -> np.ndarray:
    """exp f_i(c, c) - exp f_i(c, c') [I, C - 1], the gain before it is divided: the paper's Figure 3."""
    steps = range(losses_ICN.shape[1] - 1)
    pairs = [relative_losses(losses_ICN, step, step + 1, r=r) for step in steps]
    return np.stack([_exp(before) - _exp(after) for before, after in pairs], axis=1)


def perplexities(losses_ICN: np.ndarray) -> np.ndarray:
    """Perplexity [I, C] at each context length, over all positions and without a baseline: the paper's Figure
    4.
    """
    return _exp(losses_ICN.mean(axis=2, dtype=np.float64))


def relative_losses(
    losses_ICN: np.ndarray, short: int, long: int, *, r: float
) -> tuple[np.ndarray, np.ndarray]:
    """f_i(c, c) and f_i(c, c'), each [I]: c and c' are lengths number `short` and `long`."""
    baseline_N = losses_ICN[:, short].min(axis=0).astype(np.float64)
    count = max(1, round(r * len(baseline_N)))
    hardest = np.argsort(-baseline_N, kind="stable")[:count]
    kept = np.minimum(baseline_N, losses_ICN[:, [short, long]])[:, :, hardest].mean(axis=2)
    return kept[:, 0], kept[:, 1]


def _exp(nats: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(nats, 700.0))  # finite even where a model knows nothing
