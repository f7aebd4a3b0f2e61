"""The baseline of latency: the same model with a key/value cache to which every token is added and none
dropped.

It uses the best of the engine for one token at a time. All of the cache is visible, so there is no mask. The
position scores are one product with the needed rows of the table, which are stored from the furthest to the
nearest, so that no shift is left to do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from benchmarks.checked_sessions import open_graph
from benchmarks.models import Weights
from runtimes.contract.precision import PRESETS
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH
from runtimes.contract.tensors import TensorSpec
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel
from trainer.model.terms import ModelTerms
from xl_export.graph.head import all_logits, embed
from xl_export.graph.layers import Layers
from xl_export.graph.ops import graph_input, save_model
from xl_export.graph.tables import position_table, query_bias

OPSET = 23
TOLERANCE = PRESETS["fp32"].tolerance  # nats


class Growing:
    """One stream on ONNX Runtime that remembers all of its tokens, up to `longest`."""

    def __init__(
        self, folder: Path, weights: Weights, model: ModelConfig, longest: int, *, threads: int
    ) -> None:
        folder.mkdir(parents=True)
        save_model(growing_graph(weights, model, longest), folder)
        self._session = open_graph(folder / GRAPH, threads=threads)
        empty = np.zeros((1, model.heads, 0, model.head_dim), np.float32)
        self._cache = [onnxruntime.OrtValue.ortvalue_from_numpy(empty) for _ in range(2 * model.layers)]

    def next_logits(self, token: int) -> np.ndarray:
        """Logits [V] after one more token."""
        io = self._session.io_binding()
        io.bind_cpu_input("input_ids", np.array([[token]]))
        for at, value in enumerate(self._cache):
            io.bind_ortvalue_input(f"past.{at}", value)
        for output in self._session.get_outputs():
            io.bind_output(output.name)
        self._session.run_with_iobinding(io)
        logits, *self._cache = io.get_outputs()
        answer: np.ndarray = logits.numpy()[0, -1]
        return answer


def pytorch_logits(weights: Weights, model: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits [N, V] after each of tokens [N] in PyTorch, in one segment without memory, as in training."""
    network = LanguageModel(model).eval()
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    rule = MemoryRule(mem_len=0, segment=len(tokens), mask="full")
    with torch.inference_mode():
        logits, _ = network(
            torch.from_numpy(tokens[None]), network.start(1, rule), torch.zeros(1, dtype=torch.int64), rule
        )
    answer: np.ndarray = logits[0].numpy()
    return answer


def growing_graph(weights: Weights, model: ModelConfig, longest: int) -> ir.Model:
    """The graph of one token. Inputs: input_ids int64 [1, 1], and keys and values [1, H, P, K] of all before.

    Outputs: logits [1, 1, V], and keys and values [1, H, P + 1, K].
    """
    return _GrowingGraph(weights, model, longest).build()


class _GrowingGraph(Layers):
    def __init__(self, weights: Weights, model: ModelConfig, longest: int) -> None:
        assert (model.positions, model.sublayers, model.pre_norm) == ("relative", "feed-forward", False)
        super().__init__(weights, heads=model.heads, head_dim=model.head_dim, norm_epsilon=model.norm_epsilon)
        self.model = model
        self.longest = longest
        self.terms = ModelTerms(model, weights, MemoryRule(mem_len=longest, segment=1))

    def build(self) -> ir.Model:
        op = self.op
        model = self.model
        ids = graph_input(TensorSpec(name="input_ids", dtype="int64", shape=(1, 1)))
        shape = (1, model.heads, "past", model.head_dim)
        past = [
            graph_input(TensorSpec(name=f"past.{at}", dtype="float32", shape=shape))
            for at in range(2 * model.layers)
        ]
        x = embed(self, model, ids)
        present = []
        for layer in range(model.layers):
            answers, cache = self.attention(layer, x, past[2 * layer : 2 * layer + 2])
            present += cache
            name = f"blocks.{layer}."
            out = op.MatMul(answers, self.weight(name + "out.weight", transpose=True))
            x = self.norm(name + "attention_norm", op.Add(x, out))
            x = self.norm(name + "feed_forward_norm", op.Add(x, self.feed_forward(layer, x)))
        facts = [TensorSpec(name="logits", dtype="float32", shape=(1, 1, model.vocab_size))]
        longer = (*shape[:2], "present", shape[3])
        facts += [
            TensorSpec(name=f"present.{at}", dtype="float32", shape=longer) for at in range(2 * model.layers)
        ]
        return op.model([ids, *past], [all_logits(self, model, x), *present], tuple(facts), opset=OPSET)

    def attention(self, layer: int, x: ir.Value, past: list[ir.Value]) -> tuple[ir.Value, list[ir.Value]]:
        """The answers of all heads [1, 1, H·K] to the token, and the longer cache."""
        op = self.op
        name = f"blocks.{layer}."
        heads = range(self.heads)
        width = self.heads * self.head_dim
        matrices = [self.projection(layer, kind) for kind in ("query", "key", "value")]
        packed = op.MatMul(x, op.constant(np.concatenate(matrices, axis=1), name + "query_key_value"))
        query, *own = (self.split_heads(y) for y in op.split(packed, [width] * 3, axis=2))
        keys, values = (op.Concat(before, new, axis=2) for before, new in zip(past, own, strict=True))
        terms = self.terms.layer(layer)
        table = position_table(terms, heads, self.longest + 1)
        assert table is not None
        rows = op.constant(np.array([self.longest + 1]))
        first = op.Sub(rows, op.Shape(keys, start=2, end=3))
        backwards = op.constant(np.ascontiguousarray(table[:, :, ::-1]), name + "positions")  # furthest first
        needed = op.Slice(backwards, first, rows, op.constant(np.array([2])))  # [H, K, P + 1]
        u, v = (query_bias(vector, heads) for vector in (terms.u, terms.v))
        scores = op.MatMul(op.Add(query, op.constant(v, name + "v")), needed)  # [1, H, 1, P + 1]
        answers = op.Attention(op.Add(query, op.constant(u, name + "u")), keys, values, scores, scale=1.0)
        return self.join_heads(answers), [keys, values]
