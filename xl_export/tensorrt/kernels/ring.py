"""Attention over a ring in one launch, for ONNX Runtime's `cuda` provider.

A kernel writes the segment's keys and values into the ring, and computes scores, softmax and values. There is
one for single tokens, which serves every GPU, and one for segments. All sizes are arguments, so the package
carries their PTX (`ready.py`) and artefacts carry none. The node in `runtimes/sessions/ort_gpu/operator.hpp`
has the contract, and launches the one that reads less.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xl_export.tensorrt.kernels.common import LOG2E, LOWEST, clip, level_of, part_of
from xl_export.tensorrt.kernels.segment import attend, store_answers
from xl_export.tensorrt.kernels.token import _mix_lanes


@triton.jit
def ring_attention(
    queries,
    context,
    ring_keys,
    ring_values,
    positions,
    table,
    bias,
    content_bias,
    position_bias,
    own_keys,
    own_values,
    initial_keys,
    initial_values,
    answers,
    mixed_out,
    level,
    counters,
    H,
    K,
    S,
    M,
    R,
    BIAS_R,
    N,
    query_pitch,
    query_at,
    context_pitch,
    key_at,
    value_at,
    full_mask,
    nearest,
    masked,
    T,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The answer of one query of one row and head; the grid is (B · H, T, parts of the keys).

    All tensors but the partial answers may be of halves, which are widened when they are loaded.

    Keys are dealt to BLOCK_J lanes, as in `token_attention`. Column c of the keys is the token c - M of the
    segment. Memory is read from the ring, and the segment from `context`, rounded as in the ring. So no
    program reads a slot that another one writes, since M + T ≤ S. Nothing is visible from before a text if
    `masked` is 1; otherwise every token before it has the initial key and value.

    If there are several parts, each program writes the answer of its part. The last one that is done joins
    them, in the order of the parts, and sets its query's counter to 0 again.
    """
    row = tl.program_id(0)
    t = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    b = row // H
    h = row % H
    token = (b * T + t).to(tl.int64)
    lane = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    in_head = k < K
    ring_keys += row.to(tl.int64) * S * K
    ring_values += row.to(tl.int64) * S * K
    segment = context + (b * T).to(tl.int64) * context_pitch + h * K
    table += h * R * K
    bias += h * BIAS_R
    first = tl.load(positions + b * T)
    slot = (first % S).to(tl.int32)
    slot = tl.where(slot < 0, slot + S, slot)

    own_slot = (slot + t) % S
    own = segment + t * context_pitch + k
    writes = in_head & (part == 0)
    _copy(ring_keys + own_slot * K + k, own + key_at, writes)
    _copy(ring_values + own_slot * K + k, own + value_at, writes)

    plain = _wide(queries + token * query_pitch + query_at + h * K + k, in_head)
    content = plain + _wide(content_bias + h * K + k, in_head)
    positional = plain + _wide(position_bias + h * K + k, in_head)
    highest = tl.full([BLOCK_J], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_J], tl.float32)
    mixed = tl.zeros([BLOCK_J, BLOCK_K], tl.float32)
    start, stop = part_of(0, N, BLOCK_J)
    for n0 in range(start, stop, BLOCK_J):
        n = n0 + lane
        in_range = (n < N)[:, None] & in_head
        keys = _wide(own_keys + (h * N + n)[:, None] * K + k, in_range)
        values = _wide(own_values + (h * N + n)[:, None] * K + k, in_range)
        scores = tl.sum(keys * plain[None, :], axis=1)
        scores = tl.where(n < N, scores * LOG2E, float("-inf"))
        highest, total, mixed = _mix_lanes(highest, total, mixed, scores, values)

    # A query at position p has p tokens of its text before itself.
    before = tl.minimum(tl.maximum(first + t, 0), M + T).to(tl.int32)
    most = tl.minimum(M + t * full_mask, tl.where(masked != 0, before, M + T))
    # The first column that is of the text.
    of_text = tl.minimum(tl.maximum(M - first, 0), M + T).to(tl.int32)
    of_text = tl.where(masked != 0, 0, of_text)
    has_initial = in_head & (masked == 0)
    initial_key = _wide(initial_keys + h * K + k, has_initial)
    initial_value = _wide(initial_values + h * K + k, has_initial)
    start, stop = part_of((M + t - most) // BLOCK_J * BLOCK_J, M + t - nearest + 1, BLOCK_J)
    for j0 in range(start, stop, BLOCK_J):
        j = j0 + lane
        d = M + t - j
        visible = (d >= nearest) & (d <= most)
        early = (visible & (j < of_text))[:, None]
        of_ring = (visible & (j >= of_text) & (j < M))[:, None] & in_head
        of_segment = (visible & (j >= of_text) & (j >= M))[:, None] & in_head
        place = slot - M + j
        place = tl.where(place < 0, place + S, place)[:, None] * K + k
        new = segment + (j - M)[:, None] * context_pitch + k
        keys = _kept(ring_keys + place, of_ring, new + key_at, of_segment)
        values = _kept(ring_values + place, of_ring, new + value_at, of_segment)
        keys += tl.where(early, initial_key[None, :], 0.0)
        values += tl.where(early, initial_value[None, :], 0.0)
        rows = _wide(table + clip(d, R)[:, None] * K + k, visible[:, None] & in_head)
        scores = tl.sum(keys * content[None, :] + rows * positional[None, :], axis=1)
        scores += _wide(bias + clip(d, BIAS_R), visible)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        highest, total, mixed = _mix_lanes(highest, total, mixed, scores, values)

    # As at the end of `token_attention`.
    peak = tl.max(highest, axis=0)
    share = tl.exp2(highest - peak)
    whole = tl.sum(total * share + 0.0, axis=0)
    result = tl.sum(mixed * share[:, None] + 0.0, axis=0) / tl.where(whole > 0, whole, 1.0)
    answer = answers + (token * H + h) * K + k
    if parts == 1:
        tl.store(answer, result, mask=in_head)
    else:
        query = row * T + t
        at = query * parts
        tl.store(mixed_out + (at + part) * K + k, result, mask=in_head)
        tl.store(level + at + part, level_of(peak, whole))
        tl.debug_barrier()  # all threads have stored before one of them counts this program as done
        done = tl.atomic_add(counters + query, 1, sem="acq_rel", scope="gpu")
        if done == parts - 1:
            tl.store(
                answer, _joined(mixed_out + at * K, level + at, parts, K, BLOCK_J, BLOCK_K), mask=in_head
            )
            tl.store(counters + query, 0)


@triton.jit
def _wide(source, mask):
    """Numbers in float32; 0 where the mask is false."""
    return tl.load(source, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _copy(target, source, mask):
    tl.store(target, tl.load(source, mask=mask, other=0.0).to(target.dtype.element_ty), mask=mask)


@triton.jit
def _kept(in_ring, of_ring, new, of_segment):
    """Vectors of the memory and of the segment as the ring keeps them, in float32."""
    fresh = tl.load(new, mask=of_segment, other=0.0).to(in_ring.dtype.element_ty)
    return _wide(in_ring, of_ring) + fresh.to(tl.float32)


@triton.jit
def _joined(mixed, level, parts, K, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr):
    """One answer [BLOCK_K] from the answers of the parts, as in `join_parts`."""
    j = tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    highest = tl.full([BLOCK_J], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_J], tl.float32)
    lanes = tl.zeros([BLOCK_J, BLOCK_K], tl.float32)
    for part in range(0, parts, BLOCK_J):
        levels = tl.load(level + part + j, mask=part + j < parts, other=float("-inf"))
        in_range = (levels > float("-inf"))[:, None] & (k < K)
        values = tl.load(mixed + (part + j)[:, None] * K + k, mask=in_range, other=0.0)
        highest, total, lanes = _mix_lanes(highest, total, lanes, levels, values)
    peak = tl.max(highest, axis=0)
    share = tl.exp2(highest - peak)
    whole = tl.sum(total * share + 0.0, axis=0)
    return tl.sum(lanes * share[:, None] + 0.0, axis=0) / tl.where(whole > 0, whole, 1.0)


@triton.jit
def ring_segment_attention(
    queries,
    context,
    ring_keys,
    ring_values,
    positions,
    table,
    bias,
    content_bias,
    position_bias,
    own_keys,
    own_values,
    initial_keys,
    initial_values,
    answers,
    mixed_out,
    level,
    counters,
    H,
    K,
    S,
    M,
    R,
    BIAS_R,
    N,
    query_pitch,
    query_at,
    context_pitch,
    key_at,
    value_at,
    full_mask,
    nearest,
    masked,
    T,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same for segments: BLOCK_T queries of one row and head, and tiles of keys, on tensor cores. The
    grid is (B · H, tiles of queries, parts of the keys), and each tile of queries has a counter.

    All tensors have the type of the ring. Each key is read where it is: in the ring, in `context`, or as the
    initial key. A kernel that wrote the ring first would need 4 registers fewer and one launch more.
    """
    row = tl.program_id(0)
    tile = row * tl.num_programs(1) + tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    b = row // H
    h = row % H
    t0 = tl.program_id(1) * BLOCK_T
    i = tl.arange(0, BLOCK_T)
    t = t0 + i
    k = tl.arange(0, BLOCK_K)
    in_head = (k < K)[None, :]
    in_segment = (t < T)[:, None] & in_head
    columns = M + T
    ring_keys += row.to(tl.int64) * S * K
    ring_values += row.to(tl.int64) * S * K
    token = (b * T).to(tl.int64)  # the first of the row
    segment = context + token * context_pitch + h * K
    first = tl.load(positions + token)
    slot = (first % S).to(tl.int32)
    slot = tl.where(slot < 0, slot + S, slot)

    own_slot = slot + t
    own_slot = tl.where(own_slot < S, own_slot, own_slot - S)[:, None] * K + k
    own = segment + t[:, None] * context_pitch + k
    writes = in_segment & (part == 0)
    _copy(ring_keys + own_slot, own + key_at, writes)
    _copy(ring_values + own_slot, own + value_at, writes)

    query = queries + token * query_pitch + query_at + h * K
    plain = tl.load(query + t[:, None] * query_pitch + k, mask=in_segment, other=0.0)
    content = plain + tl.load(content_bias + h * K + k[None, :], mask=in_head, other=0.0)
    positional = plain + tl.load(position_bias + h * K + k[None, :], mask=in_head, other=0.0)
    # All positions beyond these see the same.
    position = tl.minimum(tl.maximum(first, -columns), columns).to(tl.int32)
    of_text = tl.minimum(M - position, columns)  # the first column of the text
    # Slots of the ring from before the text may hold anything, even NaN, which times 0 is NaN.
    known = tl.where(masked != 0, tl.minimum(of_text, M), 0)
    highest, total, mixed = attend(
        (plain, content, positional),
        (ring_keys, ring_values, slot - M, S),
        (
            segment + key_at,
            segment + value_at,
            context_pitch,
            initial_keys + h * K,
            initial_values + h * K,
            known,
            tl.where(masked != 0, 0, of_text),
        ),
        (table + h * R * K, R, bias + h * BIAS_R, BIAS_R),
        (own_keys + h * N * K, own_values + h * N * K, N),
        tl.where(masked != 0, position, columns) + t0,
        t0,
        M,
        columns,
        K,
        (full_mask, nearest, 1),
        BLOCK_J,
    )

    answer = answers + ((token + t) * H + h)[:, None] * K
    if parts == 1:
        store_answers(answer, mixed, total, t < T, K)
    else:
        at = tile * parts * BLOCK_T + i  # in the tile's first part
        here = at + part * BLOCK_T
        store_answers(mixed_out + here[:, None] * K, mixed, total, t < T, K)
        tl.store(level + here, level_of(highest, total), mask=t < T)
        tl.debug_barrier()  # as in `ring_attention`
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if done == parts - 1:
            whole = _joined_tiles(mixed_out, level, at, t < T, parts, K, BLOCK_K)
            tl.store(answer + k, whole.to(answers.dtype.element_ty), mask=in_segment)
            tl.store(counters + tile, 0)


@triton.jit
def _joined_tiles(mixed, level, at, in_range, parts, K, BLOCK_K: tl.constexpr):
    """The answers of a tile of queries [BLOCK_T, BLOCK_K] from those of its parts. at: their rows in the
    first part.
    """
    BLOCK_T: tl.constexpr = at.shape[0]
    k = tl.arange(0, BLOCK_K)
    highest = tl.full([BLOCK_T], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    whole = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for _ in range(0, parts):
        levels = tl.load(level + at, mask=in_range, other=float("-inf"))
        values = tl.load(mixed + at[:, None] * K + k, mask=in_range[:, None] & (k < K), other=0.0)
        peak = tl.maximum(highest, levels)
        rescale = tl.exp2(highest - peak)
        weights = tl.exp2(levels - peak)  # 0 of a part without a visible key, whose values are 0
        whole = whole * rescale[:, None] + weights[:, None] * values
        total = total * rescale + weights
        highest = peak
        at += BLOCK_T
    return whole / tl.where(total > 0, total, 1.0)[:, None]
