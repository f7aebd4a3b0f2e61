"""A row that starts a new text must not see what is not a number in its old memory.

What a mask hides from a token counts with weight 0 in its attention, and 0 times NaN is NaN. So one text that
overflowed could spoil the next one in the same row. Clearing every row that starts again would cost more than
a short text; so a session remembers whether a memory may hold such values, and clears rows only then.
"""

from __future__ import annotations

import numpy as np

from runtimes.contract.memory import Memory


def clear_restarted_rows(memory: Memory) -> None:
    """Sets the tensors of rows that start a new text to zero if they may hold values that are not finite.

    Before position 0 a row holds only padding, so nothing is lost. Afterwards all rows are checked once: the
    memory stays unsure only if another row does hold such values.
    """
    if not memory.unsure:
        return
    rows = memory.positions <= 0
    if not rows.any():
        return
    for name, array in memory.tensors.items():
        if not isinstance(
            array, np.ndarray
        ):  # on a device: the session uploads the new array at its next step
            memory.tensors[name] = array = np.array(array)
        array[rows] = 0
    memory.unsure = not all(np.isfinite(array).all() for array in memory.tensors.values())


def observe(memory: Memory, last: np.ndarray) -> None:
    """Notes whether the last output of a step is finite in every row.

    last: a number for each row, of any output that depends on the memory; NaN where it was not computed. With
    `lengths` it is the output after the last fed token. A row of length 0 has none and may be left out.

    A visible value that is not finite makes every later output of its row NaN, so the last output is enough.
    """
    if not np.isfinite(last).all():
        memory.unsure = True
