"""The reference for `xl_export::RelativeAttention`: its equation in NumPy, one stream at a time."""

from __future__ import annotations

import numpy as np

from xl_export.tensorrt.operator import Attributes


def naive_relative_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    first: np.ndarray,
    u: np.ndarray,
    v: np.ndarray,
    position_table: np.ndarray,
    bias_table: np.ndarray,
    persistent_key: np.ndarray,
    persistent_value: np.ndarray,
    slot: np.ndarray | None = None,
    *,
    attributes: Attributes,
    mem_len: int | None = None,
) -> np.ndarray:
    """The answer in float64, [B, H, T, K]; `operator.py` has the contract of the arguments.

    slot, mem_len: of the operator over a ring; None if the keys are a memory followed by the segment.
    """
    B, H, T, _ = query.shape
    J = key.shape[2]
    N = attributes.persistent
    rule = attributes.rule(mem_len=J - T if mem_len is None else mem_len, segment=T)
    i = np.arange(T)[:, None]
    j = np.arange(J)
    query, key, value, u, v, r_GRK, b_GR, own_key, own_value = (
        array.astype(np.float64)
        for array in (
            query,
            key,
            value,
            u,
            v,
            position_table,
            bias_table,
            persistent_key[:, :N],
            persistent_value[:, :N],
        )
    )
    answer = np.empty(query.shape)
    for b in range(B):
        d_TJ = (J - T if slot is None else int(slot[b])) + i - j
        if slot is not None:
            d_TJ %= J
        by_distance_HTR = (query[b] + v) @ r_GRK.swapaxes(1, 2)
        row_HTJ = np.broadcast_to(d_TJ.clip(0, r_GRK.shape[1] - 1), (H, T, J))
        scores_HTJ = (query[b] + u) @ key[b].swapaxes(1, 2)
        scores_HTJ += np.take_along_axis(by_distance_HTR, row_HTJ, axis=2)
        scores_HTJ += b_GR[:, d_TJ.clip(0, b_GR.shape[1] - 1)]
        visible_TJ = rule.visible(d_TJ, int(first[b]) + i, i)
        scores = np.concatenate(
            [np.where(visible_TJ, scores_HTJ, -np.inf), query[b] @ own_key.swapaxes(1, 2)], axis=2
        )
        highest = scores.max(axis=2, keepdims=True)
        weights = np.exp(scores - np.where(np.isneginf(highest), 0.0, highest))
        total = weights.sum(axis=2, keepdims=True)
        weights /= np.where(total > 0, total, 1.0)  # a query that sees nothing has the answer zero
        answer[b] = weights[..., :J] @ value[b] + weights[..., J:] @ own_value
    return answer
