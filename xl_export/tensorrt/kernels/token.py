"""Attention of single tokens; `segment.py` has the contract."""

from __future__ import annotations

import triton
import triton.language as tl

from xl_export.tensorrt.kernels.common import (
    LOG2E,
    LOWEST,
    clip,
    farthest,
    first_row,
    level_of,
    part_of,
    place_of,
    visible_columns,
)


@triton.jit
def token_attention(
    query,
    key,
    value,
    first,
    u,
    v,
    position_table,
    bias_table,
    persistent_key,
    persistent_value,
    slot,
    T,
    J,
    mixed_out,
    level,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BIAS_R: tl.constexpr,
    N: tl.constexpr,
    TABLE_PER_HEAD: tl.constexpr,
    BIAS_PER_HEAD: tl.constexpr,
    FULL_MASK: tl.constexpr,
    NEAREST: tl.constexpr,
    INITIAL_MASKED: tl.constexpr,
    PERSISTENT: tl.constexpr,
    MEM_LEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The answer of one query of one row and head in one part of the keys, for single tokens; BLOCK_T is 1.

    Reading keys, values and table dominates the time. So the keys are dealt to BLOCK_J lanes, each with its
    own softmax over every BLOCK_J-th key: threads wait for each other once, at the end, to join the
    softmaxes.
    """
    row = tl.program_id(0)
    h = row % H
    t = tl.program_id(1)
    M = J - T if slot is None else MEM_LEN
    columns = J if slot is None else M + T
    oldest = None if slot is None else tl.load(slot + row // H) - M
    lane = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    key += row.to(tl.int64) * J * K
    value += row.to(tl.int64) * J * K
    table = position_table + TABLE_PER_HEAD * h * R * K
    bias = bias_table + BIAS_PER_HEAD * h * BIAS_R
    position = tl.load(first + row // H) + t

    # The biases u and v are added once; the plain query meets the persistent keys.
    plain = tl.load(query + (row.to(tl.int64) * T + t) * K + k, mask=k < K, other=0.0)
    content = (plain + tl.load(u + h * K + k, mask=k < K, other=0.0)).to(tl.float32)
    positional = (plain + tl.load(v + h * K + k, mask=k < K, other=0.0)).to(tl.float32)

    highest = tl.full([BLOCK_J], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_J], tl.float32)
    mixed = tl.zeros([BLOCK_J, BLOCK_K], tl.float32)
    if PERSISTENT > 0:
        start, stop = part_of(0, PERSISTENT, BLOCK_J)
        for n0 in range(start, stop, BLOCK_J):
            n = n0 + lane
            in_range = (n < PERSISTENT)[:, None] & (k < K)
            keys = tl.load(persistent_key + (h * N + n)[:, None] * K + k, mask=in_range, other=0.0)
            values = tl.load(persistent_value + (h * N + n)[:, None] * K + k, mask=in_range, other=0.0)
            scores = tl.sum(keys * plain.to(tl.float32)[None, :], axis=1)
            scores = tl.where(n < PERSISTENT, scores * LOG2E, float("-inf"))
            highest, total, mixed = _mix_lanes(highest, total, mixed, scores, values)

    most = farthest(position, t, M, FULL_MASK, INITIAL_MASKED)
    start, stop = visible_columns(t, 1, position, M, columns, FULL_MASK, NEAREST, INITIAL_MASKED)
    start, stop = part_of(start // BLOCK_J * BLOCK_J, stop, BLOCK_J)
    for j0 in range(start, stop, BLOCK_J):
        j = j0 + lane
        d = M + t - j
        in_range = (j < columns)[:, None] & (k < K)
        place = place_of(j, oldest, J)[:, None] * K
        keys = tl.load(key + place + k, mask=in_range, other=0.0)
        values = tl.load(value + place + k, mask=in_range, other=0.0)
        rows = tl.load(table + clip(d, R)[:, None] * K + k, mask=(k < K)[None, :], other=0.0)
        scores = tl.sum(keys * content[None, :] + rows * positional[None, :], axis=1) + tl.load(
            bias + clip(d, BIAS_R)
        )
        visible = (d >= NEAREST) & (d <= most)
        highest, total, mixed = _mix_lanes(
            highest, total, mixed, tl.where(visible, scores * LOG2E, float("-inf")), values
        )

    # The lanes' softmaxes become one: each is scaled by its maximum against the highest of all.
    peak = tl.max(highest, axis=0)
    share = tl.exp2(highest - peak)
    # Adding zero rounds the products before threads add them up. Otherwise each thread would fuse its own
    # product into its sum, and the sums that several threads write to one place would differ in the last bit.
    whole = tl.sum(total * share + 0.0, axis=0)
    result = tl.sum(mixed * share[:, None] + 0.0, axis=0) / tl.where(whole > 0, whole, 1.0)
    at = first_row(row, T) + t
    tl.store(mixed_out + at * K + k, result, mask=k < K)
    tl.store(level + at, level_of(peak, whole))


@triton.jit
def _mix_lanes(highest, total, mixed, scores, values):
    """The running maximum, sum and weighted values of each lane after one more key, with its value.

    scores: in units of log 2.
    """
    peak = tl.maximum(highest, scores)
    rescale = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak)
    return peak, total * rescale + weights, mixed * rescale[:, None] + weights[:, None] * values
