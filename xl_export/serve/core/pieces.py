"""How the tokens of a task are cut into pieces: by their number and the segment alone, never by the load.

A row's numbers are bitwise the same in every batch of the same padded width, and differ by rounding between
widths. So a cut that depends on the request alone gives the same answers under any load.
"""

from __future__ import annotations


def piece_after(fed: int, count: int, segment: int) -> tuple[int, int]:
    """How many of a task's `count` tokens come next when `fed` of them were fed, and the width in which they
    are fed.

    Pieces are whole segments; the rest is one piece, padded on the right to the next power of two, so that
    few widths occur. fed: a multiple of the segment that is less than `count`.
    """
    length = min(segment, count - fed)
    return length, min(segment, 1 << (length - 1).bit_length())
