"""What a step promises beyond its numbers, and the refusal of what an artefact does not promise.

A written graph keeps every promise. A traced module may decline some (`xl_export.trace(without=…)`); the
spec lists the ones that it does not keep, and every runtime refuses to rely on them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

import numpy as np

from runtimes.base.errors import StreamError

Promise = Literal["padding", "unequal", "cuts", "rows"]
PROMISES: dict[Promise, str] = {
    "padding": "tokens at negative positions leave no trace",
    "unequal": "the rows of one step may have different numbers of tokens",
    "cuts": "a stream has the same answers however it is cut into steps",
    "rows": "a step may have any number of rows, and no row depends on another",
}
assert get_args(Promise) == tuple(PROMISES)


def refuse_unpromised(without: Collection[Promise], positions: np.ndarray, segment: int) -> None:
    """Raises StreamError for a step that relies on a promise that its artefact does not keep.

    without: the promises that it does not keep. positions: int64 [B], of the first token of each row.
    segment: the most tokens of a step.
    """
    if "rows" in without and len(positions) > 1:
        raise StreamError(
            f"the memory has {len(positions)} rows, and this artefact does not keep the promise `rows` "
            f"({PROMISES['rows']}): its rows would change each other; give each stream a memory of its own."
        )
    if "padding" in without and positions.min() < 0:
        raise StreamError(
            f"a row is at position {positions.min()}, and this artefact does not keep the promise `padding` "
            f"({PROMISES['padding']}); start each row at position 0, and feed rows of equal length."
        )
    if "cuts" in without and (positions % segment).any():
        row = int(np.flatnonzero(positions % segment)[0])
        raise StreamError(
            f"row {row} is at position {positions[row]}, and this artefact does not keep the promise `cuts` "
            f"({PROMISES['cuts']}): a step begins at a multiple of {segment} tokens; feed whole segments of "
            f"{segment}, and a shorter one only at the end of a stream."
        )
