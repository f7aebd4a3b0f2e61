"""What distances contribute to the scores of one layer and some of its heads. Training is over, so they are constant tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig
from xl_export.graph.layers import Weights


def sinusoids(count: int, d_model: int, stored: np.ndarray | None = None) -> np.ndarray:
    """Position vectors of 0 … count - 1, float64 [count, D]: sines, then cosines; `stored`: frequencies of the checkpoint."""
    frequencies = (
        10000.0 ** -(np.arange(0, d_model, 2) / d_model) if stored is None else stored.astype(np.float64)
    )
    angles = np.arange(count)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def table_rows(config: ModelConfig, rule: MemoryRule) -> int:
    """Rows of the tables below; longer distances use the last one. A span mask needs every distance, a position only
    those that have a vector of their own."""
    if config.span:
        return rule.longest_distance + 1
    return min(rule.position_rows, config.context or rule.position_rows)


def position_table(
    weights: Weights, config: ModelConfig, rule: MemoryRule, layer: int, heads: Sequence[int]
) -> np.ndarray | None:
    """r(d) of the heads by distance, float32 [h, K, R]; None where positions are not in the scores."""
    rows = np.arange(table_rows(config, rule))
    if rule.clamp_len is not None:
        rows = np.minimum(rows, rule.clamp_len)
    if config.positions == "relative":
        vectors = sinusoids(int(rows.max()) + 1, config.d_model, weights.get("positions.frequencies")).astype(
            np.float32
        )[rows]
        table = (vectors @ weights[f"positions.project.{layer}.weight"].T).reshape(
            len(rows), config.heads, config.head_dim
        )
        return np.ascontiguousarray(table.transpose(1, 2, 0)[list(heads)])
    if config.positions in ("shaw", "learned"):
        table = weights["positions.table"]
        rows = np.minimum(rows, config.context - 1)
        if config.positions == "learned":
            return np.ascontiguousarray(
                np.broadcast_to(table[rows].T, (len(heads), config.head_dim, len(rows)))
            )
        return np.ascontiguousarray(table[layer][rows].transpose(1, 2, 0)[list(heads)])
    return None


def bias_table(
    weights: Weights,
    config: ModelConfig,
    rule: MemoryRule,
    layer: int,
    heads: Sequence[int],
    *,
    masks: bool = True,
) -> np.ndarray | None:
    """What is added to the scores of each distance, float32 [h, 1, R]: biases / sqrt(K), and log m(d).

    masks: whether log m(d) is part of it. Where it is not, the graph multiplies by m(d) after the softmax.
    """
    rows, table = np.arange(table_rows(config, rule)), None
    if config.positions == "shaw":
        at = np.minimum(
            rows if rule.clamp_len is None else np.minimum(rows, rule.clamp_len), config.context - 1
        )
        table = weights["positions.table_bias"][layer][at] / np.float32(config.head_dim**0.5)
    if config.span and masks:
        with np.errstate(divide="ignore"):
            log_mask = np.log(span_table(weights, config, rule, layer, range(config.heads)).T)
        table = log_mask if table is None else table + log_mask
    return None if table is None else np.ascontiguousarray(table.T[list(heads), None])


def span_table(
    weights: Weights, config: ModelConfig, rule: MemoryRule, layer: int, heads: Sequence[int]
) -> np.ndarray:
    """m(d) of the heads by distance, float32 [h, R]."""
    assert config.span is not None
    rows, share = np.arange(table_rows(config, rule))[:, None], weights[f"blocks.{layer}.span.share"]
    mask = np.clip((1 - rows + share * config.span.maximum) / config.span.ramp + 1, 0, 1)
    return np.where(rows > config.span.maximum, 0, mask).astype(np.float32).T[list(heads)]


def query_bias(
    weights: Weights, config: ModelConfig, kind: str, layer: int, heads: Sequence[int]
) -> np.ndarray | None:
    """u or v of the heads, over sqrt(K), [h, 1, K]; None where the model has none."""
    pairs = weights.get(f"positions.{kind}")
    if pairs is None:
        return None
    chosen: np.ndarray = pairs[min(layer, len(pairs) - 1)][list(heads), None] * np.float32(
        config.head_dim**-0.5
    )
    return chosen
