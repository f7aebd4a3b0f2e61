"""One answer from the answers of the parts of the keys; `segment.py` has the contract."""

from __future__ import annotations

import triton
import triton.language as tl

from xl_export.tensorrt.kernels.common import LOWEST


@triton.jit
def join_parts(
    query,
    key,
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

    `query` and `key` are not read: they give TensorRT the shape and the type of the answer, and the number of
    parts.
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
        # A part without a visible key has no values. Its weight is 0, but 0 times infinity or NaN is NaN.
        values = tl.where((levels > float("-inf"))[:, :, None], values, 0.0)
        peak = tl.maximum(highest, tl.max(levels, axis=1))
        rescale = tl.exp2(highest - peak)
        weights = tl.exp2(levels - peak[:, None])
        whole = whole * rescale[:, None] + tl.sum(weights[:, :, None] * values, axis=1)
        highest = peak
        total = total * rescale + tl.sum(weights, axis=1)
    result = whole / tl.where(total > 0, total, 1.0)[:, None]  # zero where no key was visible
    tl.store(
        answer + i[:, None].to(tl.int64) * K + k,
        result.to(answer.dtype.element_ty),
        mask=(i < rows)[:, None] & (k < K),
    )
