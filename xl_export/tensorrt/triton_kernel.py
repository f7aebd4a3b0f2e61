"""`xl::RelativeAttention` on the GPU, in Triton: two kernels of one contract (`operator.py`), without a score matrix in memory.

Both go through the keys a tile at a time with the running maximum and sum of Milakov and Gimelshein (2018), float32, and skip
the tiles that nobody in them can see. Position scores need no shift: a key's distance says which row of the table it meets.

Programs are numbered by row and head (axis 0), by tile of queries (axis 1), and by part of the keys (axis 2): a few queries over
a long memory are split, since a program for each head would leave most of a GPU idle (Dao et al. 2023, Flash-Decoding). Each
part is an attention of its own; a third kernel, `join_parts`, makes them one.

Arguments of the first two: the operator's inputs in order, then T and J, then what a part gives, float32, in rows
(part · B · H + row) · T + t: `mixed` [K], the values under its own softmax, and `level`, the logarithm (base 2) of the softmax's
sum, -inf where nothing was seen. Everything else is fixed when a kernel is compiled (`compile.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(
    -1.0e30
)  # where a running maximum starts: finite, so that nothing is ever subtracted from -inf
LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is what GPUs have


@triton.jit
def segment_attention(
    query, key, value, first, u, v, position_table, bias_table, persistent_key, persistent_value, T, J, mixed_out, level,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BIAS_R: tl.constexpr, N: tl.constexpr,
    TABLE_PER_HEAD: tl.constexpr, BIAS_PER_HEAD: tl.constexpr,
    FULL_MASK: tl.constexpr, NEAREST: tl.constexpr, INITIAL_MASKED: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_T queries of one row and head, for segments; BLOCK_T ≤ BLOCK_J, powers of two of at least 16.

    A tile of BLOCK_T queries and BLOCK_J keys has distances d0 - e, where e = j - i runs from -BLOCK_T + 1 to BLOCK_J - 1.
    Their position scores are two products by row of the table: `near` for e ≥ 0, in columns e, and `far` for e < 0, in columns
    e + BLOCK_J, which is the `near` of the tile before. Key j of query i is then in column (j - i) mod BLOCK_J of its row.
    """
    row = tl.program_id(0)
    h = row % H
    t0 = tl.program_id(1) * BLOCK_T
    M = J - T
    i = tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    here = ((t0 + i) < T)[:, None] & (k < K)
    query += row.to(tl.int64) * T * K
    key += row.to(tl.int64) * J * K
    value += row.to(tl.int64) * J * K
    table = position_table + TABLE_PER_HEAD * h * R * K
    bias = bias_table + BIAS_PER_HEAD * h * BIAS_R
    position = tl.load(first + row // H) + t0  # of the tile's first query

    asking = tl.load(query + (t0 + i)[:, None] * K + k, mask=here, other=0.0)
    content = asking + tl.load(u + h * K + k, mask=k < K, other=0.0)[None, :]
    positional = asking + tl.load(v + h * K + k, mask=k < K, other=0.0)[None, :]

    highest = tl.full([BLOCK_T], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    mixed = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    start, stop = _part(0, PERSISTENT, BLOCK_J)
    for n0 in range(start, stop, BLOCK_J):
        n = n0 + j
        known = (n < PERSISTENT)[:, None] & (k < K)
        keys = tl.load(persistent_key + (h * N + n)[:, None] * K + k, mask=known, other=0.0)
        values = tl.load(persistent_value + (h * N + n)[:, None] * K + k, mask=known, other=0.0)
        scores = tl.dot(asking, tl.trans(keys), input_precision="ieee")
        scores = tl.where((n < PERSISTENT)[None, :], scores * LOG2E, float("-inf"))
        highest, total, mixed = _mix(highest, total, mixed, scores, values)

    start, stop = _span(t0, BLOCK_T, position, M, J, FULL_MASK, NEAREST, INITIAL_MASKED)
    start, stop = _part(start // BLOCK_J * BLOCK_J, stop, BLOCK_J)
    far = _position_scores(positional, table, bias, M + t0 - start + BLOCK_J - j, k, K, R, BIAS_R)
    for j0 in range(start, stop, BLOCK_J):
        d0 = M + t0 - j0
        near = _position_scores(positional, table, bias, d0 - j, k, K, R, BIAS_R)
        by_column = tl.where(i[:, None] + j[None, :] < BLOCK_J, near, far)
        by_key = tl.gather(by_column, (j[None, :] - i[:, None]) & (BLOCK_J - 1), axis=1)
        far = near

        known = ((j0 + j) < J)[:, None] & (k < K)
        keys = tl.load(key + (j0 + j)[:, None] * K + k, mask=known, other=0.0)
        values = tl.load(value + (j0 + j)[:, None] * K + k, mask=known, other=0.0)
        scores = tl.dot(content, tl.trans(keys), input_precision="ieee") + by_key
        d = d0 + i[:, None] - j[None, :]
        seen = _visible(d, (position + i)[:, None], (t0 + i)[:, None], M, FULL_MASK, NEAREST, INITIAL_MASKED)
        highest, total, mixed = _mix(
            highest, total, mixed, tl.where(seen, scores * LOG2E, float("-inf")), values
        )

    at = _first_row(row, T) + t0 + i
    tl.store(mixed_out + at[:, None] * K + k, mixed / tl.where(total > 0, total, 1.0)[:, None], mask=here)
    tl.store(level + at, _level(highest, total), mask=(t0 + i) < T)


@triton.jit
def token_attention(
    query, key, value, first, u, v, position_table, bias_table, persistent_key, persistent_value, T, J, mixed_out, level,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BIAS_R: tl.constexpr, N: tl.constexpr,
    TABLE_PER_HEAD: tl.constexpr, BIAS_PER_HEAD: tl.constexpr,
    FULL_MASK: tl.constexpr, NEAREST: tl.constexpr, INITIAL_MASKED: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One query of one row and head (BLOCK_T is 1), for single tokens: what counts is how fast keys, values and table are read.

    The keys are split over BLOCK_J lanes. Each has a softmax of its own over every BLOCK_J-th key, so threads meet only
    once, at the end, where the lanes' softmaxes become one.
    """
    row = tl.program_id(0)
    h = row % H
    t = tl.program_id(1)
    M = J - T
    lane = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    key += row.to(tl.int64) * J * K
    value += row.to(tl.int64) * J * K
    table = position_table + TABLE_PER_HEAD * h * R * K
    bias = bias_table + BIAS_PER_HEAD * h * BIAS_R
    position = tl.load(first + row // H) + t

    asking = tl.load(query + (row.to(tl.int64) * T + t) * K + k, mask=k < K, other=0.0)
    content = (asking + tl.load(u + h * K + k, mask=k < K, other=0.0)).to(tl.float32)
    positional = (asking + tl.load(v + h * K + k, mask=k < K, other=0.0)).to(tl.float32)

    highest = tl.full([BLOCK_J], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_J], tl.float32)
    mixed = tl.zeros([BLOCK_J, BLOCK_K], tl.float32)
    start, stop = _part(0, PERSISTENT, BLOCK_J)
    for n0 in range(start, stop, BLOCK_J):
        n = n0 + lane
        known = (n < PERSISTENT)[:, None] & (k < K)
        keys = tl.load(persistent_key + (h * N + n)[:, None] * K + k, mask=known, other=0.0)
        values = tl.load(persistent_value + (h * N + n)[:, None] * K + k, mask=known, other=0.0)
        scores = tl.sum(keys * asking.to(tl.float32)[None, :], axis=1)
        scores = tl.where(n < PERSISTENT, scores * LOG2E, float("-inf"))
        highest, total, mixed = _mix_lanes(highest, total, mixed, scores, values)

    start, stop = _span(t, 1, position, M, J, FULL_MASK, NEAREST, INITIAL_MASKED)
    start, stop = _part(start // BLOCK_J * BLOCK_J, stop, BLOCK_J)
    for j0 in range(start, stop, BLOCK_J):
        j = j0 + lane
        d = M + t - j
        known = (j < J)[:, None] & (k < K)
        keys = tl.load(key + j[:, None] * K + k, mask=known, other=0.0)
        values = tl.load(value + j[:, None] * K + k, mask=known, other=0.0)
        rows = tl.load(table + _clip(d, R)[:, None] * K + k, mask=(k < K)[None, :], other=0.0)
        scores = tl.sum(keys * content[None, :] + rows * positional[None, :], axis=1) + tl.load(
            bias + _clip(d, BIAS_R)
        )
        seen = _visible(d, position, t, M, FULL_MASK, NEAREST, INITIAL_MASKED)
        highest, total, mixed = _mix_lanes(
            highest, total, mixed, tl.where(seen, scores * LOG2E, float("-inf")), values
        )

    peak = tl.max(highest, axis=0)
    share = tl.exp2(highest - peak)
    whole = tl.sum(total * share, axis=0)
    result = tl.sum(mixed * share[:, None], axis=0) / tl.where(whole > 0, whole, 1.0)
    at = _first_row(row, T) + t
    tl.store(mixed_out + at * K + k, result, mask=k < K)
    tl.store(level + at, _level(peak, whole))


@triton.jit
def join_parts(query, mixed, level, rows, parts, answer, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr,
               BLOCK_K: tl.constexpr):  # fmt: skip
    """The answer of BLOCK_T of all B·H·T rows from what their parts give, BLOCK_J parts at a time.

    `query` is not read: TensorRT takes the answer's shape and type from it.
    """
    i = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    highest = tl.full([BLOCK_T], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    whole = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for part in range(0, parts, BLOCK_J):
        at = (part + j)[None, :].to(tl.int64) * rows + i[:, None]
        known = (i < rows)[:, None] & (part + j < parts)[None, :]
        levels = tl.load(level + at, mask=known, other=float("-inf"))
        values = tl.load(mixed + at[:, :, None] * K + k, mask=known[:, :, None] & (k < K), other=0.0)
        peak = tl.maximum(highest, tl.max(levels, axis=1))
        fade = tl.exp2(highest - peak)
        weights = tl.exp2(levels - peak[:, None])
        whole = whole * fade[:, None] + tl.sum(weights[:, :, None] * values, axis=1)
        highest, total = peak, total * fade + tl.sum(weights, axis=1)
    result = whole / tl.where(total > 0, total, 1.0)[:, None]  # zero where nothing was seen
    tl.store(
        answer + i[:, None].to(tl.int64) * K + k,
        result.to(answer.dtype.element_ty),
        mask=(i < rows)[:, None] & (k < K),
    )


@triton.jit
def _part(start, stop, BLOCK: tl.constexpr):
    """This program's share, in whole tiles but for the last, of the columns from start to stop."""
    each = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), tl.num_programs(2)), BLOCK) * BLOCK
    start += tl.program_id(2) * each
    return start, tl.minimum(start + each, stop)


@triton.jit
def _first_row(row, T):
    """Where this program's part of a row and head begins in `mixed` and `level`."""
    return (tl.program_id(2) * tl.num_programs(0) + row).to(tl.int64) * T


@triton.jit
def _level(highest, total):
    return tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def _span(
    t0, count, position, M, J, FULL_MASK: tl.constexpr, NEAREST: tl.constexpr, INITIAL_MASKED: tl.constexpr
):
    """Columns from the first to behind the last that any of `count` queries from t0 on may see; `position`: of the first."""
    start = 0 if FULL_MASK else t0
    if INITIAL_MASKED:  # query i sees no further than column M + i - max(position of i, 0)
        start = tl.maximum(start, M + tl.minimum(t0 - position, t0))
    return start, tl.minimum(M + t0 + count - NEAREST, J)


@triton.jit
def _visible(d, position, t, M, FULL_MASK: tl.constexpr, NEAREST: tl.constexpr, INITIAL_MASKED: tl.constexpr):
    """`MemoryRule.visible`; d is negative for keys beyond the last, which are thereby invisible."""
    window = M + t if FULL_MASK else M
    seen = (d >= NEAREST) & (d <= window)
    if INITIAL_MASKED:
        seen = seen & (d <= tl.maximum(position, 0))
    return seen


@triton.jit
def _clip(d, rows: tl.constexpr):
    return tl.minimum(tl.maximum(d, 0), rows - 1)


@triton.jit
def _position_scores(positional, table, bias, d, k, K: tl.constexpr, R: tl.constexpr, BIAS_R: tl.constexpr):
    """Scores of queries [BLOCK_T, BLOCK_K] with the rows of distances d [BLOCK_J], and those distances' biases."""
    rows = tl.load(table + _clip(d, R)[:, None] * K + k, mask=(k < K)[None, :], other=0.0)
    return (
        tl.dot(positional, tl.trans(rows), input_precision="ieee")
        + tl.load(bias + _clip(d, BIAS_R)).to(tl.float32)[None, :]
    )


@triton.jit
def _mix(highest, total, mixed, scores, values):
    """Takes a tile of scores (in units of log 2) and values into the running maximum, sum and weighted values of each query."""
    peak = tl.maximum(highest, tl.max(scores, axis=1))
    fade = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak[:, None])
    mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return peak, total * fade + tl.sum(weights, axis=1), mixed


@triton.jit
def _mix_lanes(highest, total, mixed, scores, values):
    """The same where every lane has its own key and its own softmax."""
    peak = tl.maximum(highest, scores)
    fade = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak)
    return peak, total * fade + weights, mixed * fade[:, None] + weights[:, None] * values
