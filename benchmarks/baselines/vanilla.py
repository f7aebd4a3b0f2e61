"""The baseline of sliding-window: a vanilla Transformer that recomputes a whole window for every prediction.

It has the sizes and weights of the Transformer-XL except its position terms, absolute positions, and no
memory. This is the evaluation of Al-Rfou et al. as section 3.1 of Dai et al. (2019) describes it. It uses the
best of the engine: packed projections, the Attention operator (or the fused operator, where the other side
has it), queries in blocks that never touch later keys, and a last layer that computes the last position
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
import torch

from benchmarks.arithmetic import query_blocks
from benchmarks.baselines.naive import naive_next_logits
from benchmarks.checked_sessions import agreed, nats_apart, open_graph
from runtimes.contract.precision import PRESETS
from runtimes.contract.spec import GRAPH
from runtimes.contract.tensors import TensorSpec
from trainer.model.config import ModelConfig
from trainer.model.positions import sinusoids
from xl_export.graph.fused_cpu import ATTENTION, DOMAIN
from xl_export.graph.head import all_logits, embed
from xl_export.graph.layers import Layers, Weights
from xl_export.graph.ops import graph_input, save_model

OPSET = 23
TOLERANCE = PRESETS["fp32"].tolerance  # nats


class Window:
    """The window model on ONNX Runtime: one prediction per call. library: of the fused operator, if used."""

    def __init__(
        self,
        folder: Path,
        weights: Weights,
        model: ModelConfig,
        window: int,
        *,
        threads: int,
        library: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        graph = (
            _FusedWindowGraph(weights, model, window).build()
            if library
            else window_graph(weights, model, window)
        )
        save_model(graph, folder)
        self._session = open_graph(folder / GRAPH, threads=threads, library=library)

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [V] of the token after tokens int64 [W]."""
        logits: np.ndarray = self._session.run(["logits"], {"input_ids": tokens[None]})[0][0]
        return logits


def check_window(window: Window, weights: Weights, model: ModelConfig, tokens: np.ndarray) -> float:
    """The largest difference from the naive model, in nats; raises ArtefactError beyond the tolerance."""
    difference = nats_apart(window.next_logits(tokens), naive_next_logits(weights, model, tokens))
    return agreed(difference, TOLERANCE, f"the window of {len(tokens)} tokens differs from the naive model")


def window_graph(weights: Weights, model: ModelConfig, window: int) -> ir.Model:
    """input_ids int64 [1, W] → logits float32 [1, V] of the next token."""
    return _WindowGraph(weights, model, window).build()


class _WindowGraph(Layers):
    domains: Mapping[str, int] = MappingProxyType({})

    def __init__(self, weights: Weights, model: ModelConfig, window: int) -> None:
        assert not model.pre_norm, "the model of the comparison is post-norm"
        super().__init__(weights, heads=model.heads, head_dim=model.head_dim)
        self.model = model
        self.window = window

    def build(self) -> ir.Model:
        op = self.op
        model = self.model
        ids = graph_input(TensorSpec(name="input_ids", dtype="int64", shape=(1, self.window)))
        positions = sinusoids(torch.arange(self.window), model.d_model).float().numpy()
        x = op.Add(embed(self, model, ids), op.constant(positions, "positions"))
        for layer in range(model.layers - 1):
            x = self.rest_of_block(layer, x, self.attention(layer, x))
        last = self.slice(x, self.window - 1, self.window, axis=1)
        last = self.rest_of_block(model.layers - 1, last, self.attention_of_last(model.layers - 1, x, last))
        logits = all_logits(self, model, op.Squeeze(last, op.constant(np.array([1]))))
        facts = TensorSpec(name="logits", dtype="float32", shape=(1, model.vocab_size))
        return op.model([ids], [logits], (facts,), opset=OPSET, domains=self.domains)

    def attention(self, layer: int, x: ir.Value) -> ir.Value:
        """The answers of all heads [1, W, H·K] at every position, one block of queries after the other."""
        op = self.op
        width = self.model.heads * self.model.head_dim
        packed = op.MatMul(x, self.packed(layer, "query", "key", "value"))
        query, key, value = (self.split_heads(y) for y in op.split(packed, [width] * 3, axis=2))
        answers = []
        for first, end in query_blocks(self.window):
            seen = np.arange(end) <= np.arange(first, end)[:, None]
            mask = op.constant(np.where(seen, np.float32(0), np.float32(-np.inf)), f"mask.{first}")
            keys, values = (self.slice(y, 0, end, axis=2) for y in (key, value))
            answers.append(op.Attention(self.slice(query, first, end, axis=2), keys, values, mask, scale=1.0))
        return self.join_heads(op.Concat(*answers, axis=2))

    def attention_of_last(self, layer: int, x: ir.Value, last: ir.Value) -> ir.Value:
        """The answers of all heads [1, 1, H·K] at the last position, to which the whole window is visible."""
        op = self.op
        width = self.model.heads * self.model.head_dim
        key, value = op.split(op.MatMul(x, self.packed(layer, "key", "value")), [width] * 2, axis=2)
        query = op.MatMul(last, self.packed(layer, "query"))
        return self.join_heads(op.Attention(*(self.split_heads(y) for y in (query, key, value)), scale=1.0))

    def rest_of_block(self, layer: int, x: ir.Value, answers: ir.Value) -> ir.Value:
        """Output projection, residuals, norms and the feed-forward network."""
        op = self.op
        name = f"blocks.{layer}."
        out = op.MatMul(answers, self.weight(name + "out.weight", transpose=True))
        x = self.norm(name + "attention_norm", op.Add(x, out))
        return self.norm(name + "feed_forward_norm", op.Add(x, self.feed_forward(layer, x)))

    def slice(self, x: ir.Value, first: int, end: int, *, axis: int) -> ir.Value:
        return self.op.Slice(x, *(self.op.constant(np.array([at])) for at in (first, end, axis)))

    def packed(self, layer: int, *kinds: str) -> ir.Value:
        """Projections [D, …] side by side, as one matrix."""
        matrices = [self.projection(layer, kind) for kind in kinds]
        return self.op.constant(np.concatenate(matrices, axis=1), f"blocks.{layer}.{'_'.join(kinds)}")


class _FusedWindowGraph(_WindowGraph):
    """The same with the fused operator, which is causal attention with mem_len 0 and the full mask."""

    domains: Mapping[str, int] = MappingProxyType({DOMAIN: 1})

    def attention(self, layer: int, x: ir.Value) -> ir.Value:
        op = self.op
        width = self.model.heads * self.model.head_dim
        packed = op.MatMul(x, self.packed(layer, "query", "key", "value"))
        positions = op.constant(np.arange(self.window)[None])
        attributes = {
            "heads": self.model.heads,
            "head_dim": self.model.head_dim,
            "mem_len": 0,
            "nearest": 0,
            "full": 1,
            "query_at": 0,
            "key_at": width,
            "value_at": 2 * width,
        }
        inputs = [packed, packed, None, None, None, positions]
        return op.custom(DOMAIN, ATTENTION, inputs, attributes, outputs=1)[0]
