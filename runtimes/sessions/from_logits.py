"""`predict` and `score` for a session that computes all logits in `step`."""

from __future__ import annotations

import numpy as np

from runtimes.base.logits import log_probability
from runtimes.contract.checks import checked_targets, last_fed
from runtimes.contract.memory import Memory
from runtimes.contract.session import Paths, Session


class FromLogits:
    """`predict` and `score` from `step`. That is enough for a vocabulary of moderate size."""

    @property
    def paths(self) -> Paths | None:
        """None: there is one way to compute a step, unless a session overrides this."""
        return None

    def predict(
        self: Session, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        logits, memory = self.step(tokens, memory, lengths=lengths)
        last = logits[:, -1] if lengths is None else logits[range(len(logits)), last_fed(lengths, tokens)]
        return last, memory

    def score(
        self: Session,
        tokens: np.ndarray,
        targets: np.ndarray,
        memory: Memory,
        *,
        lengths: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Memory]:
        targets = checked_targets(self, targets, tokens, lengths)
        logits, memory = self.step(tokens, memory, lengths=lengths)
        return log_probability(logits, targets), memory
