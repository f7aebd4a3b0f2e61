"""The rest of a session, for stand-ins that compute all logits in `step`."""

from __future__ import annotations

import numpy as np

from runtimes.base.logits import log_probability
from runtimes.contract.checks import checked_targets, last_fed
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session


class FromLogits:
    """`predict`, `score` and `paths` of a session that has a `step`."""

    paths = None
    spec = None
    pads_right = True

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
