"""What the attention kernels share: which keys a program attends to, which of them are visible, and what it
writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Scores are multiplied by it, because GPUs have an instruction for powers of two and none for powers of e.
LOG2E = tl.constexpr(1.4426950408889634)
# A running maximum starts here. It is finite, since -inf - -inf is NaN. Why masked keys weigh exactly 0, and
# nothing overflows, under fused multiply-adds (which do not round the product):
# - Running maxima are in units of log 2 already. They are only subtracted from each other, so LOWEST - LOWEST
#   is 0 while no key was visible. Never write this as a difference of products: for -1e30,
#   fma(highest, log2 e, -round(highest * log2 e)) is +6.4e21.
# - A score's product may be fused with the subtraction of the maximum. For -inf the result is -inf. For
#   the largest score it is at most the rounding error of the maximum.
# - LOWEST is a power of two, so its product with any factor is exact, whatever a compiler fuses.
LOWEST = tl.constexpr(-(2.0**100))


@triton.jit
def part_of(start, stop, BLOCK: tl.constexpr):
    """This program's part of the columns from start to stop: whole tiles, except the last one."""
    each = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), tl.num_programs(2)), BLOCK) * BLOCK
    start += tl.program_id(2) * each
    return start, tl.minimum(start + each, stop)


@triton.jit
def first_row(row, T):
    """The row of `mixed` and `level` at which this program's part of a row and head begins."""
    return (tl.program_id(2) * tl.num_programs(0) + row).to(tl.int64) * T


@triton.jit
def level_of(highest, total):
    """The logarithm (base 2) of a softmax's sum; -inf where no key was visible.

    highest: the maximum that was subtracted from the scores, in units of log 2.
    """
    return tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def place_of(column, oldest, J):
    """Where the keys of these columns are among the J of a row and head.

    oldest: the slot of column 0 in a ring of J slots, minus J if that column is before the wrap. None if the
    keys are in the order of their columns.
    """
    place = column
    if oldest is not None:
        place += oldest
        place = tl.where(place < 0, place + J, place)
    return place


@triton.jit
def visible_columns(
    t0,
    count,
    position,
    M,
    columns,
    FULL_MASK,
    NEAREST,
    INITIAL_MASKED,
):
    """The columns [start, stop) that hold every key visible to any of `count` queries from t0 on.

    position: the stream position of the first of these queries. columns: how many there are.
    """
    start = t0 * (1 - FULL_MASK)
    # the first key visible to query i is in column M + i - max(position of i, 0), or later
    if INITIAL_MASKED:
        start = tl.maximum(start, M + tl.minimum(t0 - position, t0))
    return start, tl.minimum(M + t0 + count - NEAREST, columns)


@triton.jit
def farthest(position, t, M, FULL_MASK, INITIAL_MASKED):
    """The largest distance that is visible to the query at index t of its segment.

    With NEAREST as the smallest one this is `MemoryRule.visible`. Columns beyond the last key have a negative
    distance, so they are not visible.
    """
    distance = M + t * FULL_MASK
    if INITIAL_MASKED:
        distance = tl.minimum(distance, tl.maximum(position, 0))
    return distance


@triton.jit
def clip(d, rows):
    """The row of a table for distances d; all larger distances use the last row."""
    return tl.minimum(tl.maximum(d, 0), rows - 1)
