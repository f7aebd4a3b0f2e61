"""A group's share of the model's terms, in the layout of the graph's products.

The model says what the terms are (`trainer.model.terms`). Here some heads and rows of them are taken, divided
by sqrt(K) where the score is, and transposed. Training is over, so the graph has them as constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.model.terms import DistanceTables


def position_table(terms: DistanceTables, heads: Sequence[int], rows: int) -> np.ndarray | None:
    """r(d) of some heads by distance, float32 [h, K, rows]; None if positions are not in the scores."""
    if terms.position is None:
        return None
    return np.ascontiguousarray(terms.position[:rows].transpose(1, 2, 0)[list(heads)])


def bias_table(
    terms: DistanceTables, heads: Sequence[int], rows: int, *, head_dim: int, masks: bool = True
) -> np.ndarray | None:
    """bias(d) / sqrt(K) + log m(d) of some heads, float32 [h, 1, rows]; None if the model has neither.

    masks: whether log m(d) is part of it. Where it is not, the graph multiplies by m(d) after the softmax.
    The table is minus infinity beyond the window of that softmax: long segments see past it under `full`.
    """
    table = None if terms.bias is None else terms.bias / np.float32(head_dim**0.5)
    if terms.log_mask is not None and masks:
        table = terms.log_mask if table is None else table + terms.log_mask
    elif terms.window is not None and terms.mask is not None and rows > terms.window + 1:
        table = np.zeros_like(terms.mask) if table is None else table.copy()
        table[terms.window + 1 :] = -np.inf
    return None if table is None else np.ascontiguousarray(table[:rows].T[list(heads), None])


def span_table(terms: DistanceTables, heads: Sequence[int], rows: int) -> np.ndarray:
    """m(d) of some heads by distance, float32 [h, 1, rows]; the model must have adaptive spans."""
    assert terms.mask is not None, "the model has no span mask"
    return np.ascontiguousarray(terms.mask[:rows].T[list(heads), None])


def query_bias(vector: np.ndarray | None, heads: Sequence[int]) -> np.ndarray | None:
    """u or v of some heads divided by sqrt(K), float32 [h, 1, K]; None if the model has none."""
    if vector is None:
        return None
    chosen: np.ndarray = vector[list(heads), None] * np.float32(vector.shape[-1] ** -0.5)
    return chosen
