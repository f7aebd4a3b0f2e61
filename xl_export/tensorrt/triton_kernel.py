"""`xl_export::RelativeAttention` on the GPU, in Triton: two kernels of one contract (`operator.py`).

Neither holds a matrix of all scores. Both go through the keys tile by tile with the running maximum and sum
of Milakov and Gimelshein (2018) in float32, and skip tiles in which no key is visible. Position scores need
no shift: the distance of a key says which row of the position table it meets.

The grid of programs has three axes: row and head (0), tile of queries (1), and part of the keys (2). Keys are
divided into parts where queries are few and the memory is long, since one program for each head would leave
most of a GPU idle (Dao et al. 2023, Flash-Decoding). Each part is an attention of its own. The third kernel,
`join_parts`, joins their answers.

The first two kernels take the operator's inputs in order, then T and J, then the two outputs of a part, both
float32, in rows (part · B · H + row) · T + t. `mixed` [K] holds the values under the part's own softmax.
`level` is the logarithm (base 2) of the sum of that softmax, and -inf where no key was visible. Everything
else is fixed when a kernel is compiled (`compile.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# A running maximum starts here. It is finite, since -inf minus -inf is no number.
LOWEST = tl.constexpr(-1.0e30)
# Scores are multiplied by it, because GPUs have an instruction for powers of two and none for powers of e.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def segment_attention(
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
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The answer of BLOCK_T queries of one row and head in one part of the keys, for segments.

    BLOCK_T ≤ BLOCK_J; both are powers of two of at least 16. A tile of BLOCK_T queries and BLOCK_J keys has
    the distances d0 - e, where e = j - i runs from -BLOCK_T + 1 to BLOCK_J - 1. Their position scores are two
    products of the queries with rows of the table: `near` for e ≥ 0, in columns e, and `far` for e < 0, in
    columns e + BLOCK_J. `far` is the `near` of the tile before, so each tile needs one product. The score of
    query i and key j is in column (j - i) mod BLOCK_J.
    """
    row = tl.program_id(0)
    h = row % H
    t0 = tl.program_id(1) * BLOCK_T
    M = J - T
    i = tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    in_segment = ((t0 + i) < T)[:, None] & (k < K)
    # int64: a large batch with a long memory has more elements than an int32 counts.
    query += row.to(tl.int64) * T * K
    key += row.to(tl.int64) * J * K
    value += row.to(tl.int64) * J * K
    table = position_table + TABLE_PER_HEAD * h * R * K
    bias = bias_table + BIAS_PER_HEAD * h * BIAS_R
    position = tl.load(first + row // H) + t0  # of the tile's first query

    # The biases u and v are added once; the plain query meets the persistent keys.
    plain = tl.load(query + (t0 + i)[:, None] * K + k, mask=in_segment, other=0.0)
    content = plain + tl.load(u + h * K + k, mask=k < K, other=0.0)[None, :]
    positional = plain + tl.load(v + h * K + k, mask=k < K, other=0.0)[None, :]

    highest = tl.full([BLOCK_T], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    mixed = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    start, stop = _part(0, PERSISTENT, BLOCK_J)
    for n0 in range(start, stop, BLOCK_J):
        n = n0 + j
        in_range = (n < PERSISTENT)[:, None] & (k < K)
        keys = tl.load(persistent_key + (h * N + n)[:, None] * K + k, mask=in_range, other=0.0)
        values = tl.load(persistent_value + (h * N + n)[:, None] * K + k, mask=in_range, other=0.0)
        scores = tl.dot(plain, tl.trans(keys), input_precision="ieee")
        scores = tl.where((n < PERSISTENT)[None, :], scores * LOG2E, float("-inf"))
        highest, total, mixed = _mix(highest, total, mixed, scores, values)

    # The parts divide the columns that are visible, not all of them, so that they have equal work. They begin
    # at multiples
    # of BLOCK_J, so that loads are aligned.
    start, stop = _visible_columns(t0, BLOCK_T, position, M, J, FULL_MASK, NEAREST, INITIAL_MASKED)
    start, stop = _part(start // BLOCK_J * BLOCK_J, stop, BLOCK_J)
    far = _position_scores(positional, table, bias, M + t0 - start + BLOCK_J - j, k, K, R, BIAS_R)
    for j0 in range(start, stop, BLOCK_J):
        d0 = M + t0 - j0
        near = _position_scores(positional, table, bias, d0 - j, k, K, R, BIAS_R)
        # From columns of distances to columns of keys.
        by_column = tl.where(i[:, None] + j[None, :] < BLOCK_J, near, far)
        by_key = tl.gather(by_column, (j[None, :] - i[:, None]) & (BLOCK_J - 1), axis=1)
        far = near

        in_range = ((j0 + j) < J)[:, None] & (k < K)
        keys = tl.load(key + (j0 + j)[:, None] * K + k, mask=in_range, other=0.0)
        values = tl.load(value + (j0 + j)[:, None] * K + k, mask=in_range, other=0.0)
        scores = tl.dot(content, tl.trans(keys), input_precision="ieee") + by_key
        d = d0 + i[:, None] - j[None, :]
        visible = _visible(
            d, (position + i)[:, None], (t0 + i)[:, None], M, FULL_MASK, NEAREST, INITIAL_MASKED
        )
        highest, total, mixed = _mix(
            highest, total, mixed, tl.where(visible, scores * LOG2E, float("-inf")), values
        )

    # Where no key was visible the total is 0, and so is `mixed`.
    at = _first_row(row, T) + t0 + i
    tl.store(
        mixed_out + at[:, None] * K + k, mixed / tl.where(total > 0, total, 1.0)[:, None], mask=in_segment
    )
    tl.store(level + at, _level(highest, total), mask=(t0 + i) < T)


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
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The answer of one query of one row and head in one part of the keys, for single tokens; BLOCK_T is 1.

    The time goes to reading keys, values and table. So the keys are dealt to BLOCK_J lanes, and each lane has
    a softmax of its own over every BLOCK_J-th key: threads wait for each other once, at the end, where the
    softmaxes are joined.
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

    # The biases u and v are added once; the plain query meets the persistent keys.
    plain = tl.load(query + (row.to(tl.int64) * T + t) * K + k, mask=k < K, other=0.0)
    content = (plain + tl.load(u + h * K + k, mask=k < K, other=0.0)).to(tl.float32)
    positional = (plain + tl.load(v + h * K + k, mask=k < K, other=0.0)).to(tl.float32)

    highest = tl.full([BLOCK_J], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_J], tl.float32)
    mixed = tl.zeros([BLOCK_J, BLOCK_K], tl.float32)
    start, stop = _part(0, PERSISTENT, BLOCK_J)
    for n0 in range(start, stop, BLOCK_J):
        n = n0 + lane
        in_range = (n < PERSISTENT)[:, None] & (k < K)
        keys = tl.load(persistent_key + (h * N + n)[:, None] * K + k, mask=in_range, other=0.0)
        values = tl.load(persistent_value + (h * N + n)[:, None] * K + k, mask=in_range, other=0.0)
        scores = tl.sum(keys * plain.to(tl.float32)[None, :], axis=1)
        scores = tl.where(n < PERSISTENT, scores * LOG2E, float("-inf"))
        highest, total, mixed = _mix_lanes(highest, total, mixed, scores, values)

    start, stop = _visible_columns(t, 1, position, M, J, FULL_MASK, NEAREST, INITIAL_MASKED)
    start, stop = _part(start // BLOCK_J * BLOCK_J, stop, BLOCK_J)
    for j0 in range(start, stop, BLOCK_J):
        j = j0 + lane
        d = M + t - j
        in_range = (j < J)[:, None] & (k < K)
        keys = tl.load(key + j[:, None] * K + k, mask=in_range, other=0.0)
        values = tl.load(value + j[:, None] * K + k, mask=in_range, other=0.0)
        rows = tl.load(table + _clip(d, R)[:, None] * K + k, mask=(k < K)[None, :], other=0.0)
        scores = tl.sum(keys * content[None, :] + rows * positional[None, :], axis=1) + tl.load(
            bias + _clip(d, BIAS_R)
        )
        visible = _visible(d, position, t, M, FULL_MASK, NEAREST, INITIAL_MASKED)
        highest, total, mixed = _mix_lanes(
            highest, total, mixed, tl.where(visible, scores * LOG2E, float("-inf")), values
        )

    # The lanes' softmaxes become one: each is scaled by its maximum against the highest of all.
    peak = tl.max(highest, axis=0)
    share = tl.exp2(highest - peak)
    whole = tl.sum(total * share, axis=0)
    result = tl.sum(mixed * share[:, None], axis=0) / tl.where(whole > 0, whole, 1.0)
    at = _first_row(row, T) + t
    tl.store(mixed_out + at * K + k, result, mask=k < K)
    tl.store(level + at, _level(peak, whole))


@triton.jit
def join_parts(
    query,
    mixed,
    level,
    rows,
    parts,
    answer,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The operator's answer for BLOCK_T of all B·H·T rows, from the answers of their parts, BLOCK_J parts at
    a time.

    `query` is not read: TensorRT takes the shape and the type of the answer from it.
    """
    i = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    highest = tl.full([BLOCK_T], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    whole = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for part in range(0, parts, BLOCK_J):
        at = (part + j)[None, :].to(tl.int64) * rows + i[:, None]
        in_range = (i < rows)[:, None] & (part + j < parts)[None, :]
        levels = tl.load(level + at, mask=in_range, other=float("-inf"))
        values = tl.load(mixed + at[:, :, None] * K + k, mask=in_range[:, :, None] & (k < K), other=0.0)
        peak = tl.maximum(highest, tl.max(levels, axis=1))
        rescale = tl.exp2(highest - peak)
        weights = tl.exp2(levels - peak[:, None])
        whole = whole * rescale[:, None] + tl.sum(weights[:, :, None] * values, axis=1)
        highest, total = peak, total * rescale + tl.sum(weights, axis=1)
    result = whole / tl.where(total > 0, total, 1.0)[:, None]  # zero where no key was visible
    tl.store(
        answer + i[:, None].to(tl.int64) * K + k,
        result.to(answer.dtype.element_ty),
        mask=(i < rows)[:, None] & (k < K),
    )


@triton.jit
def _part(start, stop, BLOCK: tl.constexpr):
    """This program's part of the columns from start to stop: whole tiles, except the last one."""
    each = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), tl.num_programs(2)), BLOCK) * BLOCK
    start += tl.program_id(2) * each
    return start, tl.minimum(start + each, stop)


@triton.jit
def _first_row(row, T):
    """The row of `mixed` and `level` at which this program's part of a row and head begins."""
    return (tl.program_id(2) * tl.num_programs(0) + row).to(tl.int64) * T


@triton.jit
def _level(highest, total):
    """The logarithm (base 2) of a softmax's sum; -inf where no key was visible."""
    return tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def _visible_columns(
    t0, count, position, M, J, FULL_MASK: tl.constexpr, NEAREST: tl.constexpr, INITIAL_MASKED: tl.constexpr
):
    """The columns [start, stop) that hold every key visible to any of `count` queries from t0 on.

    position: the stream position of the first of these queries.
    """
    start = 0 if FULL_MASK else t0
    # the first key visible to query i is in column M + i - max(position of i, 0), or later
    if INITIAL_MASKED:
        start = tl.maximum(start, M + tl.minimum(t0 - position, t0))
    return start, tl.minimum(M + t0 + count - NEAREST, J)


@triton.jit
def _visible(d, position, t, M, FULL_MASK: tl.constexpr, NEAREST: tl.constexpr, INITIAL_MASKED: tl.constexpr):
    """The same as `MemoryRule.visible`. Columns beyond the last key have a negative distance d, so they are
    not visible.
    """
    window = M + t if FULL_MASK else M
    visible = (d >= NEAREST) & (d <= window)
    if INITIAL_MASKED:
        visible = visible & (d <= tl.maximum(position, 0))
    return visible


@triton.jit
def _clip(d, rows: tl.constexpr):
    """The row of a table for distances d; the last row serves all that are larger."""
    return tl.minimum(tl.maximum(d, 0), rows - 1)


@triton.jit
def _position_scores(positional, table, bias, d, k, K: tl.constexpr, R: tl.constexpr, BIAS_R: tl.constexpr):
    """The position scores [BLOCK_T, BLOCK_J] of queries at distances d [BLOCK_J], with the biases of these
    distances.
    """
    rows = tl.load(table + _clip(d, R)[:, None] * K + k, mask=(k < K)[None, :], other=0.0)
    return (
        tl.dot(positional, tl.trans(rows), input_precision="ieee")
        + tl.load(bias + _clip(d, BIAS_R)).to(tl.float32)[None, :]
    )


@triton.jit
def _mix(highest, total, mixed, scores, values):
    """The running maximum, sum and weighted values of each query after one more tile.

    scores: of the tile, in units of log 2. values: those of the tile's keys.
    """
    peak = tl.maximum(highest, tl.max(scores, axis=1))
    rescale = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak[:, None])
    mixed = mixed * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return peak, total * rescale + tl.sum(weights, axis=1), mixed


@triton.jit
def _mix_lanes(highest, total, mixed, scores, values):
    """The same as `_mix` where every lane has a key and a softmax of its own."""
    peak = tl.maximum(highest, scores)
    rescale = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak)
    return peak, total * rescale + weights, mixed * rescale[:, None] + weights[:, None] * values
