"""The reference for the vanilla window model: float64, one query at a time, every layer everywhere. Slow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from trainer.model.config import ModelConfig
from trainer.model.positions import sinusoids


def naive_next_logits(
    weights: Mapping[str, np.ndarray], model: ModelConfig, tokens: np.ndarray
) -> np.ndarray:
    """Logits [V] of the token after tokens [W]: a causal post-norm Transformer with absolute positions."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    x = (
        w["vocabulary.table.0"][tokens] * model.d_model**0.5
        + sinusoids(torch.arange(len(tokens)), model.d_model).numpy()
    )
    for layer in range(model.layers):
        name = f"blocks.{layer}."
        query, key, value = (
            _heads(x @ w[f"{name}{kind}.weight"].T, model) for kind in ("query", "key", "value")
        )
        answers = np.stack(
            [_attend(query[:, i], key[:, : i + 1], value[:, : i + 1]) for i in range(len(tokens))]
        )
        x = _norm(x + answers @ w[name + "out.weight"].T, w, name + "attention_norm")
        inner = np.maximum(x @ w[name + "expand.weight"].T + w[name + "expand.bias"], 0)
        x = _norm(
            x + inner @ w[name + "contract.weight"].T + w[name + "contract.bias"],
            w,
            name + "feed_forward_norm",
        )
    logits: np.ndarray = x[-1] @ w["vocabulary.table.0"].T + w["vocabulary.output_bias.0"]
    return logits


def _attend(query_HK: np.ndarray, key_HJK: np.ndarray, value_HJK: np.ndarray) -> np.ndarray:
    """The answer [H·K] of one query to the keys up to its own, which is included."""
    scores_HJ = (key_HJK @ query_HK[:, :, None])[:, :, 0] / query_HK.shape[-1] ** 0.5
    weights_HJ = np.exp(scores_HJ - scores_HJ.max(axis=-1, keepdims=True))
    weights_HJ /= weights_HJ.sum(axis=-1, keepdims=True)
    return (weights_HJ[:, None] @ value_HJK).reshape(-1)


def _heads(x: np.ndarray, model: ModelConfig) -> np.ndarray:
    return x.reshape(len(x), model.heads, model.head_dim).transpose(1, 0, 2)


def _norm(x: np.ndarray, w: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return scaled * w[name + ".weight"] + w[name + ".bias"]
