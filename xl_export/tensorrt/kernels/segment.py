"""`xl_export::RelativeAttention` on the GPU, in Triton: two kernels of one contract (`operator.py`).

Neither holds a matrix of all scores. Both go through the keys tile by tile with the running maximum and sum
of Milakov and Gimelshein (2018) in float32, and skip tiles in which no key is visible. Position scores need
no shift: the distance of a key is its row in the position table.

The grid of programs has three axes: row and head (0), tile of queries (1), and part of the keys (2). Keys are
divided into parts if queries are few and the memory is long, since one program for each head would leave
most of a GPU idle (Dao et al. 2023, Flash-Decoding). Each part is a separate attention. The third kernel,
`join_parts`, joins their answers.

The keys have columns, from the oldest of the memory to the newest of the segment. In a ring, column c is in
slot (slot - M + c) mod J. Each program reads that slot and no other one, so nothing is copied or rotated.

The parameters of the first two kernels are the operator's inputs in order, T and J, and the two outputs of a
part, both float32, in rows (part · B · H + row) · T + t. `mixed` [K] holds the values under the part's own
softmax. `level` is the logarithm (base 2) of the sum of that softmax, and -inf where no key was visible.
Everything else is fixed when a kernel is compiled (`compile.py`). That includes `slot`, which is None without
a ring. `attend`, the work of a segment's program, is also in the node for `cuda`, which fixes no size.
"""

# ruff: noqa: RUF005 (Triton's language has no starred expressions)

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
from xl_export.tensorrt.kernels.skew import skewed

# Of products of float32 on tensor cores, which round factors to 11 bits: three products of two parts of each
# factor are almost as precise as one in float32. It changes nothing for halves.
PRECISION = tl.constexpr("tf32x3")


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
    """The answer of BLOCK_T queries of one row and head in one part of the keys, for segments.

    BLOCK_T is 16 for each warp, so that each warp has its own rows: then the softmax needs no other warp, and
    neither does the relative shift of the position scores (`skew.py`). Warps wait for each other twice for
    every tile of keys, when the tiles of keys, values and table are exchanged in shared memory.

    A tile of BLOCK_J keys from column j0 has the distances d0 - e, where e = j - i runs from -BLOCK_T + 1 to
    BLOCK_J - 1. Those with e < 0 are the columns of the tiles before, so each tile needs one product with the
    position table.
    """
    row = tl.program_id(0)
    h = row % H
    t0 = tl.program_id(1) * BLOCK_T
    M = J - T if slot is None else MEM_LEN
    columns = J if slot is None else M + T
    i = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    in_segment = ((t0 + i) < T)[:, None] & (k < K)
    # int64: a large batch with a long memory has more elements than an int32 counts.
    query += row.to(tl.int64) * T * K
    key += row.to(tl.int64) * J * K
    value += row.to(tl.int64) * J * K
    table = position_table + TABLE_PER_HEAD * h * R * K
    bias = bias_table + BIAS_PER_HEAD * h * BIAS_R

    # The biases u and v are added once; the plain query meets the persistent keys.
    plain = tl.load(query + (t0 + i)[:, None] * K + k, mask=in_segment, other=0.0)
    content = plain + tl.load(u + h * K + k, mask=k < K, other=0.0)[None, :]
    positional = plain + tl.load(v + h * K + k, mask=k < K, other=0.0)[None, :]

    highest, total, mixed = attend(
        (plain, content, positional),
        (key, value, None if slot is None else tl.load(slot + row // H) - M, J),
        None,
        (table, R, bias, BIAS_R),
        (persistent_key + h * N * K, persistent_value + h * N * K, PERSISTENT),
        tl.load(first + row // H) + t0,
        t0,
        M,
        columns,
        K,
        (FULL_MASK, NEAREST, INITIAL_MASKED),
        BLOCK_J,
    )
    at = first_row(row, T) + t0 + i
    store_answers(mixed_out + at[:, None] * K, mixed, total, (t0 + i) < T, K)
    tl.store(level + at, level_of(highest, total), mask=(t0 + i) < T)


@triton.jit
def attend(
    queries,
    memory,
    fresh,
    by_distance,
    own,
    position,
    t0,
    M,
    columns,
    K,
    rule,
    BLOCK_J: tl.constexpr,
):
    """The highest score, the sum and the values of the softmax of a tile of queries over this program's
    part of the keys. The values are in pieces of columns, and not divided by the sum yet.

    Engines compile sizes and rule in; the node for `cuda` (`ring.py`) has them as arguments. All arguments:

    - queries: plain, with the bias u, and with the bias v, each [BLOCK_T, BLOCK_K]
    - memory: keys, values, the slot of column 0 as for `place_of`, and the number of slots
    - fresh: None if the memory has the segment's keys too. Else the segment's keys and values, how far one
      token's are from the next one's, the key and value of every token before the text, the first column that
      may be loaded, and the first column of the text if those before it have that key and value
    - by_distance: the position table, its rows, the biases and how many there are
    - own: persistent keys and values, and how many there are
    - position: of the first query, which is at index t0 of its segment; both are of int32
    - M, columns, K: tokens remembered; these and the tokens of the segment; head width
    - rule: the full mask, the smallest visible distance, whether nothing is visible from before the text
    """
    plain, content, positional = queries
    key, value, oldest, J = memory
    table, R, bias, BIAS_R = by_distance
    own_key, own_value, N = own
    FULL_MASK, NEAREST, INITIAL_MASKED = rule
    BLOCK_T: tl.constexpr = plain.shape[0]
    BLOCK_K: tl.constexpr = plain.shape[1]
    i = tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    highest = tl.full([BLOCK_T], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    # In pieces no wider than BLOCK_T: the compiler would divide a product with more columns than rows among
    # the warps by columns instead of rows.
    PIECES: tl.constexpr = 2 if BLOCK_K > BLOCK_T and BLOCK_T > 16 else 1
    WIDTH: tl.constexpr = BLOCK_K // PIECES
    mixed = (tl.zeros([BLOCK_T, WIDTH], tl.float32),) * PIECES
    if N > 0:
        start, stop = part_of(0, N, BLOCK_J)
        for n0 in range(start, stop, BLOCK_J):
            n = n0 + j
            keys = tl.load(own_key + n[:, None] * K + k, mask=(n < N)[:, None] & (k < K), other=0.0)
            values = _pieces(own_value + n[:, None] * K, n < N, K, WIDTH, PIECES)
            scores = tl.dot(plain, tl.trans(keys), input_precision=PRECISION)
            scores = tl.where((n < N)[None, :], scores, float("-inf"))
            highest, total, mixed = _mix(highest, total, mixed, scores, values)

    # The parts divide the columns that are visible, not all of them, so that they have equal work. They begin
    # at multiples of BLOCK_J, so that loads are aligned.
    start, stop = visible_columns(t0, BLOCK_T, position, M, columns, FULL_MASK, NEAREST, INITIAL_MASKED)
    start, stop = part_of(start // BLOCK_J * BLOCK_J, stop, BLOCK_J)
    # How many distances from NEAREST on are visible to each query. As an unsigned number a distance below
    # NEAREST is larger than any count, so one comparison is enough for both ends.
    farthest_visible = farthest(position + i, t0 + i, M, FULL_MASK, INITIAL_MASKED)
    count = tl.maximum(farthest_visible + 1 - NEAREST, 0).to(tl.uint32)

    _, earlier = skewed(
        _before_the_part(positional, table, bias, M + t0 - start + BLOCK_T - i, k, K, R, BIAS_R), (), True
    )
    for j0 in range(start, stop, BLOCK_J):
        d = M + t0 - j0 - j
        scores = _position_scores(positional, table, bias, d, k, K, R, BIAS_R)
        by_key, earlier = skewed(scores, earlier, False)

        c = j0 + j
        in_range = c < columns
        place = place_of(c, oldest, J)[:, None] * K
        keys_at = key + place
        values_at = value + place
        if fresh is not None:
            new_key, new_value, pitch, initial_key, initial_value, known, of_text = fresh
            in_range &= c >= known
            place = (c - M)[:, None] * pitch
            keys_at = tl.where((c >= M)[:, None], new_key + place, keys_at)
            values_at = tl.where((c >= M)[:, None], new_value + place, values_at)
            early = (c < of_text)[:, None]
            # The compiler forgets what a choice among aligned addresses is a multiple of.
            keys_at = tl.multiple_of(tl.where(early, initial_key, keys_at), [16, 16])
            values_at = tl.multiple_of(tl.where(early, initial_value, values_at), [16, 16])
        keys = tl.load(keys_at + k, mask=in_range[:, None] & (k < K), other=0.0)
        values = _pieces(values_at, in_range, K, WIDTH, PIECES)
        scores = tl.dot(content, tl.trans(keys), by_key, input_precision=PRECISION)
        # From d, like the position scores: so the compiler sees that the product of values follows them, and
        # assigns each warp the same rows in both.
        visible = ((i - NEAREST)[:, None] + d[None, :]).to(tl.uint32) < count[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        highest, total, mixed = _mix(highest, total, mixed, scores, values)
    return highest, total, mixed


@triton.jit
def store_answers(rows, mixed, total, in_range, K):
    """Stores what `attend` returned as answers, in rows of K numbers; 0 where no key was visible."""
    WIDTH: tl.constexpr = mixed[0].shape[1]
    for n in tl.static_range(len(mixed)):
        c = n * WIDTH + tl.arange(0, WIDTH)
        answer = mixed[n] / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(rows + c, answer.to(rows.dtype.element_ty), mask=in_range[:, None] & (c < K))


@triton.jit
def _pieces(rows, in_range, K, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """Rows of K numbers in pieces of WIDTH columns; zero beyond K, and where they are not in range."""
    pieces = ()
    for n in tl.static_range(PIECES):
        c = n * WIDTH + tl.arange(0, WIDTH)
        pieces = pieces + (tl.load(rows + c, mask=in_range[:, None] & (c < K), other=0.0),)
    return pieces


@triton.jit
def _position_scores(positional, table, bias, d, k, K, R, BIAS_R):
    """The position scores [BLOCK_T, BLOCK_J] of queries at distances d [BLOCK_J], with the biases of these
    distances.
    """
    rows = tl.load(table + clip(d, R)[:, None] * K + k, mask=(k < K)[None, :], other=0.0)
    return (
        tl.dot(positional, tl.trans(rows), input_precision=PRECISION)
        + tl.load(bias + clip(d, BIAS_R)).to(tl.float32)[None, :]
    )


@triton.jit
def _before_the_part(positional, table, bias, d, k, K, R, BIAS_R):
    """The same as `_position_scores` for the distances before the first tile.

    One product for each warp, since nothing else makes the compiler divide the rows among the warps here.
    """
    T: tl.constexpr = positional.shape[0]
    BLOCK_K: tl.constexpr = positional.shape[1]
    rows = tl.load(table + clip(d, R)[:, None] * K + k, mask=(k < K)[None, :], other=0.0)
    for_all = tl.broadcast_to(tl.trans(rows)[None], [T // 16, BLOCK_K, d.shape[0]])
    of_warps = tl.dot(tl.reshape(positional, [T // 16, 16, BLOCK_K]), for_all, input_precision=PRECISION)
    return tl.reshape(of_warps, [T, d.shape[0]]) + tl.load(bias + clip(d, BIAS_R)).to(tl.float32)[None, :]


@triton.jit
def _mix(highest, total, mixed, scores, values):
    """The running maximum, sum and weighted values of each query after one more tile, whose keys have these
    values.

    highest: in units of log 2, which scores are not yet. mixed, values: in pieces of the same columns.
    """
    peak = tl.maximum(highest, tl.max(scores, axis=1) * LOG2E)
    rescale = tl.exp2(highest - peak)
    weights = tl.exp2(scores * LOG2E - peak[:, None])
    total = total * rescale + tl.sum(weights, axis=1)
    weights = weights.to(values[0].dtype)
    sums = ()
    for n in tl.static_range(len(values)):
        sum = tl.dot(weights, values[n], mixed[n] * rescale[:, None], input_precision=PRECISION)
        sums = sums + (sum,)
    return peak, total, sums
