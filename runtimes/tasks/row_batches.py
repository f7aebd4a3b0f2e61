"""Which texts of unequal lengths are scored together as rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtimes.contract.session import Session

MOST_ROWS = 32
MOST_TOKENS = 1024  # of a step, padding included; more of them are not faster on any machine measured
STATE_BYTES = 320 << 20  # of the memory of the largest batch
LOGIT_BYTES = 128 << 20  # of the logits of a step, and of the arrays made of them
STEP = 16  # a step costs about as much as this many tokens beyond those that it is given


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest batch."""

    #: Of a batch.
    rows: int
    #: Of a step, padding included.
    tokens: int
    #: Tokens of a row in a step.
    segment: int

    @classmethod
    def of(cls, session: Session, *, rows: int | None = None) -> BatchLimits:
        """The limits that keep the arrays of a session's step within a few hundred MB.

        rows: the largest number of rows, where the user gives one.
        """
        if rows is None:
            row_bytes = sum(tensor.row_bytes for tensor in session.state)
            rows = max(1, min(MOST_ROWS, STATE_BYTES // max(1, row_bytes)))
        tokens = MOST_TOKENS
        if session.spec is None or not session.spec.model.selective:  # such a graph computes fewer logits
            tokens = max(1, min(tokens, LOGIT_BYTES // (3 * 4 * session.vocab.size)))
        return cls(rows=rows, tokens=tokens, segment=session.rule.segment)

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that batches have: powers of 2, and the largest.

        There are few of them, so that one memory of each size serves all batches.
        """
        return sorted({self.rows, *(1 << bits for bits in range(self.rows.bit_length()))})


def make_batches(lengths: Sequence[int], limits: BatchLimits, *, padding: bool) -> list[np.ndarray]:
    """Indices of `lengths` in batches: all of them, each once, the longest first.

    Their rows are padded to the longest of the batch. Of all ways to cut the sorted lengths, this one costs
    the least: the tokens of all steps with their padding, and STEP for each step. padding: False puts only
    equal lengths together.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    ordered = [int(lengths[index]) for index in order]
    count = len(ordered)
    # costs[i] is the least cost of the first i rows, and cuts[i] the size of the last batch of that way.
    costs = [0.0] + [float("inf")] * count
    cuts = [0] * (count + 1)
    for first, longest in enumerate(ordered):
        most = max(1, limits.tokens // min(longest, limits.segment))
        step_costs = STEP * -(-longest // limits.segment)
        for size in limits.sizes:
            end = first + size
            if end > count or size > most or (not padding and ordered[end - 1] != longest):
                break
            cost = costs[first] + size * longest + step_costs
            if cost < costs[end]:
                costs[end], cuts[end] = cost, size
    batches = []
    end = count
    while end > 0:
        batches.append(order[end - cuts[end] : end])
        end -= cuts[end]
    return batches[::-1]
