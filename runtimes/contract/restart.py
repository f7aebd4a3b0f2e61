"""A row that starts a new text must not see what is not a number in its old memory.

What a mask hides from a token counts with weight 0 in its attention, and 0 times NaN is NaN. So one text that
overflowed could spoil the next one in the same row. Clearing every row that starts again would cost more than
a short text; so a session remembers which rows may hold such values, and clears only those.
"""

from __future__ import annotations

import numpy as np

from runtimes.contract.memory import Memory


def clear_restarted_rows(memory: Memory) -> None:
    """Sets the tensors of those rows to zero that start a new text and may hold values that are not finite.

    A value that is not finite and visible makes every later output of its row not a number. So `observe` need
    only look at the last output of each step.
    """
    rows = memory.unsure & (memory.positions <= 0)
    if not rows.any():
        return
    for name, array in memory.tensors.items():
        if not isinstance(
            array, np.ndarray
        ):  # on a device: the session uploads the new array at its next step
            memory.tensors[name] = array = np.array(array)
        array[rows] = 0
    memory.unsure[rows] = False


def observe(memory: Memory, last: np.ndarray) -> None:
    """Notes the rows [B] whose last output is not finite, or was not computed at all (NaN in `last` for
    both).
    """
    memory.unsure |= ~np.isfinite(last)
