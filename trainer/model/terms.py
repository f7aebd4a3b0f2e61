"""The terms of a trained model as arrays by distance, which the exporter writes as constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig
from trainer.model.model import Block, LanguageModel


@dataclass(frozen=True, kw_only=True)
class DistanceTables:
    """One layer's `trainer.model.attention.Terms` in float32, with the span mask and its logarithm.

    position [R, H, K], bias, mask and log_mask [R, H]: row d is for distance d; longer distances use the last
    row. u, v [H, K]. Each is None if the model has no such term. Nothing is divided by sqrt(K) yet.
    """

    position: np.ndarray | None
    bias: np.ndarray | None
    u: np.ndarray | None
    v: np.ndarray | None
    mask: np.ndarray | None
    log_mask: np.ndarray | None
    window: int | None  # the longest distance in the softmax before the mask

    @property
    def one_for_all_heads(self) -> bool:
        """Whether all heads share one position vector for each distance.

        The array then repeats without being copied.
        """
        return self.position is not None and self.position.strides[1] == 0


class ModelTerms:
    """The terms of all layers under one rule.

    What layers share is computed once, and one layer is held at a time.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, np.ndarray], rule: MemoryRule) -> None:
        """weights: float32 arrays with the names of the model's state dict.

        They are read where they lie, not copied.
        """
        with torch.device("meta"):  # allocates no parameter: the arrays take their places
            self._model = LanguageModel(config).eval()
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        self._model.load_state_dict(tensors, assign=True)
        self.rule = rule
        with torch.inference_mode():
            self._vectors = self._model.positions.vectors(self.rows(rule), rule)
        self._last: tuple[int, DistanceTables] | None = None

    def rows(self, rule: MemoryRule) -> int:
        """Rows of the tables under a rule with this or a shorter memory: a span mask needs every distance."""
        has_span = self._model.config.span is not None
        return rule.longest_distance + 1 if has_span else self._model.positions.table_rows(rule)

    def layer(self, layer: int) -> DistanceTables:
        """The tables of one layer, of `rows` of the whole rule.

        The next layer that is asked for replaces them.
        """
        if self._last is not None and self._last[0] == layer:
            return self._last[1]
        self._last = None  # the memory of one layer is free before the next one is computed
        block = self._model.blocks[layer]
        assert isinstance(block, Block)
        with torch.inference_mode():
            terms = self._model.positions.terms(layer, self._vectors)
            mask = None
            if block.span is not None:
                # In float64, because the logarithm magnifies what is lost where a mask is nearly 0.
                mask = block.span.mask(self.rows(self.rule), torch.float64)
            tables = DistanceTables(
                position=_array(terms.position),
                bias=_array(terms.bias),
                u=_array(terms.u),
                v=_array(terms.v),
                mask=_array(mask),
                log_mask=None if mask is None else _array(mask.log()),
                window=None if block.span is None else block.span.window(),
            )
        self._last = layer, tables
        return tables

    def input_table(self, layer: int) -> np.ndarray | None:
        """The vectors [rows, D] that are added to a layer's input by stream position.

        None if nothing is added.
        """
        with torch.inference_mode():
            return _array(self._model.positions.input_table(layer))


def _array(tensor: Tensor | None) -> np.ndarray | None:
    if tensor is None:
        return None
    array: np.ndarray = tensor.float().numpy()
    return array
