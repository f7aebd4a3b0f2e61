"""The step graph: tokens, positions and memory in, logits and memory out, in three forms of memory.

For a query at stream position p and a key at distance d:

    score = (q + u)·k / sqrt(K) + (q + v)·r(d) / sqrt(K)        softmax over visible keys, then values

r(d) = W_kR R_d is a constant once training is over, so the graph carries the table r(0), r(1), … with
1/sqrt(K) folded in, up to the longest visible distance or the clamp. The shift of Appendix B is a gather of
the position scores by distance. Standard ONNX operators only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from runtimes.rule import MemoryRule
from runtimes.spec import Form, ModelFacts, Spec
from xl_export.ops import Ops, graph_input

OPSETS: dict[Form, int] = {"ring": 24, "shift": 23, "hidden": 23}  # Attention is 23, TensorScatter 24
Weights = Mapping[str, np.ndarray]  # the names of trainer.model.TransformerXL's state dict


@dataclass(frozen=True)
class Sight:
    """What all layers share of one step. J: key columns; S for the ring, M + T for the other forms.

    visible bool [B, 1, T, J]: the mask rule. row int32 [B, H, T, J]: position table row of each query and key.
    before bool [B, 1, J, 1]: keys of zero initial memory; None where that is masked instead.
    write_at int64 [B]: first ring slot to write; None for the other forms.
    """

    visible: ir.Value
    row: ir.Value
    before: ir.Value | None
    write_at: ir.Value | None


def step_graph(spec: Spec, weights: Weights) -> ir.Model:
    """The ONNX model of one step for a trained model's weights, under the spec's rule and form."""
    return _StepGraph(spec, weights).build()


class _StepGraph:
    def __init__(self, spec: Spec, weights: Weights) -> None:
        self.spec, self.weights, self.op = spec, weights, Ops()
        self.model: ModelFacts = spec.model
        self.rule: MemoryRule = spec.rule
        self.inputs = {fact.name: graph_input(fact) for fact in spec.inputs}

    def build(self) -> ir.Model:
        op, model = self.op, self.model
        embedding = self.weight("embedding.weight")
        x = op.Mul(op.Gather(embedding, self.inputs["input_ids"]), op.constant(np.float32(model.d_model**0.5)))
        sight = self.sight()
        present: list[ir.Value] = []
        for layer in range(model.layers):
            x = self.block(layer, x, sight, present)
        if self.spec.form == "ring":  # past and present are bound to one buffer: right only where nothing else reads the past
            assert all(len(self.inputs[state.past].uses()) == 1 for state in self.spec.state), "a ring tensor has two readers"
        logits = op.Add(op.MatMul(x, op.Transpose(embedding, perm=[1, 0])), self.weight("output_bias"))
        return op.model(list(self.inputs.values()), [logits, *present], self.spec.outputs, opset=self.spec.opset)

    def block(self, layer: int, x: ir.Value, sight: Sight, present: list[ir.Value]) -> ir.Value:
        """One layer on x [B, T, D]; appends its memory outputs to `present`."""
        op, name = self.op, f"blocks.{layer}."
        if self.model.pre_norm:
            x = op.Add(x, self.attention(layer, x, sight, present))
            return op.Add(x, self.feed_forward(name, self.norm(name + "feed_forward_norm", x)))
        x = self.norm(name + "attention_norm", op.Add(x, self.attention(layer, x, sight, present)))
        return self.norm(name + "feed_forward_norm", op.Add(x, self.feed_forward(name, x)))

    def attention(self, layer: int, x: ir.Value, sight: Sight, present: list[ir.Value]) -> ir.Value:
        op, name = self.op, f"blocks.{layer}."
        if self.spec.form == "hidden":
            query, key, value = self.keys_from_hidden(layer, x, sight, present)
        else:
            query, key, value = self.keys_from_cache(layer, x, sight, present)
        u, v = (self.bias(kind, layer) for kind in ("content_bias", "position_bias"))
        position_BHTR = op.MatMul(op.Add(query, v), op.constant(self.position_table(layer), name + "position_table"))
        position_BHTJ = op.GatherElements(position_BHTR, sight.row, axis=3)
        bias_BHTJ = op.Where(sight.visible, position_BHTJ, op.constant(np.float32(-np.inf)))
        heads_BHTK = op.Attention(op.Add(query, u), key, value, bias_BHTJ)
        joined = op.Reshape(op.Transpose(heads_BHTK, perm=[0, 2, 1, 3]), op.constant(np.array([0, 0, -1])))
        return op.MatMul(joined, self.weight(name + "out.weight", transpose=True))

    def keys_from_hidden(self, layer: int, x: ir.Value, sight: Sight, present: list[ir.Value]) -> tuple[ir.Value, ...]:
        """The paper's own memory: layer inputs, whose keys and values are computed again each step."""
        op, name = self.op, f"blocks.{layer}."
        context = op.Concat(self.inputs[f"past_hidden.{layer}"], x, axis=1)
        present.append(self.last_of(context, axis=1))
        if sight.before is not None:
            context = op.Where(op.Squeeze(sight.before, op.constant(np.array([1]))), op.constant(np.float32(0)), context)
        if self.model.pre_norm:
            context, x = self.norm(name + "attention_norm", context), self.norm(name + "attention_norm", x)
        width = self.model.heads * self.model.head_dim
        key, value = op.split(op.MatMul(context, self.packed(layer, "key", "value")), [width, width], axis=2)
        query = op.MatMul(x, self.weight(name + "query.weight", transpose=True))
        return tuple(self.split_heads(y) for y in (query, key, value))

    def keys_from_cache(self, layer: int, x: ir.Value, sight: Sight, present: list[ir.Value]) -> tuple[ir.Value, ...]:
        """Projected keys and values, kept: written into the ring, or shifted by a segment."""
        op, width = self.op, self.model.heads * self.model.head_dim
        if self.model.pre_norm:
            x = self.norm(f"blocks.{layer}.attention_norm", x)
        packed = op.MatMul(x, self.packed(layer, "query", "key", "value"))
        query, *fresh = (self.split_heads(y) for y in op.split(packed, [width] * 3, axis=2))
        context = []
        for kind, new in zip(("key", "value"), fresh, strict=True):
            past = self.inputs[f"past_key_values.{layer}.{kind}"]
            if self.spec.form == "ring":
                kept = op.TensorScatter(past, new, sight.write_at, axis=2, mode="circular")
                present.append(kept)
            else:
                kept = op.Concat(past, new, axis=2)
                present.append(self.last_of(kept, axis=2))
            if sight.before is not None:
                kept = op.Where(sight.before, op.constant(self.initial(layer, kind)), kept)
            context.append(kept)
        return query, *context

    def sight(self) -> Sight:
        """Distances and visibility of every key for every query: by slot in the ring, by column otherwise."""
        op, rule = self.op, self.rule
        position = op.Unsqueeze(self.inputs["position_ids"], op.constant(np.array([1, 3])))  # [B, 1, T, 1]
        length = op.Squeeze(op.Shape(self.inputs["input_ids"], start=1))
        offset = op.Unsqueeze(self.range(length), op.constant(np.array([1])))  # [T, 1]
        first = op.Gather(self.inputs["position_ids"], op.constant(np.array(0)), axis=1)  # [B]
        write_at = None
        if self.spec.form == "ring":
            slots = op.constant(np.array(rule.slots))
            write_at = op.Mod(first, slots)
            distance = op.Mod(op.Sub(position, op.constant(np.arange(rule.slots))), slots)  # [B, 1, T, S]
        else:
            column = self.range(op.Add(length, op.constant(np.array(rule.mem_len))))
            ahead = op.Sub(op.Add(offset, op.constant(np.array(rule.mem_len))), column)  # M + i - j, [T, M + T]
            distance = op.Unsqueeze(ahead, op.constant(np.array([0, 1])))
        row = op.Clip(distance, op.constant(np.array(0)), op.constant(np.array(rule.position_rows - 1)))
        lead = op.Concat(op.Shape(first), op.constant(np.array([self.model.heads, 1, 1])), axis=0)
        row = op.Expand(op.Cast(row, to=ir.DataType.INT32), lead)
        return Sight(self.visible(distance, position, offset), row, self.before(distance, position), write_at)

    def visible(self, distance: ir.Value, position: ir.Value, offset: ir.Value) -> ir.Value:
        """`MemoryRule.visible` in graph form."""
        op, zero = self.op, self.op.constant(np.array(0))
        window = op.constant(np.array(self.rule.mem_len))
        if self.rule.mask == "full":
            window = op.Add(window, offset)
        seen = op.And(op.GreaterOrEqual(distance, zero), op.LessOrEqual(distance, window))
        if self.rule.initial_memory == "masked":
            seen = op.And(seen, op.LessOrEqual(distance, op.Max(position, zero)))
        return seen

    def before(self, distance: ir.Value, position: ir.Value) -> ir.Value | None:
        """Keys [B, 1, J, 1] that lie before their text began: further from the last token than its position."""
        if self.rule.initial_memory == "masked":
            return None
        op, last = self.op, self.op.constant(np.array([-1]))
        end = op.constant(np.array([np.iinfo(np.int64).max]))
        axis = op.constant(np.array([2]))
        nearest, latest = (op.Slice(x, last, end, axis) for x in (distance, position))
        return op.Transpose(op.Greater(nearest, latest), perm=[0, 1, 3, 2])

    def position_table(self, layer: int) -> np.ndarray:
        """r(d)/sqrt(K) for all heads and distances, float32 [H, K, R]."""
        model, rows = self.model, self.rule.position_rows
        frequencies = 10000.0 ** -(np.arange(0, model.d_model, 2) / model.d_model)
        angles = np.arange(rows)[:, None] * frequencies
        vectors = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
        table = vectors @ (self.weights[f"blocks.{layer}.position.weight"] / np.float32(model.head_dim**0.5)).T
        return table.reshape(rows, model.heads, model.head_dim).transpose(1, 2, 0)

    def initial(self, layer: int, kind: str) -> np.ndarray:
        """Key or value [H, 1, K] of a hidden state of zero: zero, or W·beta behind a LayerNorm."""
        model, name = self.model, f"blocks.{layer}."
        hidden = self.weights[name + "attention_norm.bias"] if model.pre_norm else np.zeros(model.d_model, np.float32)
        return (self.weights[f"{name}{kind}.weight"] @ hidden).reshape(model.heads, 1, model.head_dim)

    def feed_forward(self, name: str, x: ir.Value) -> ir.Value:
        op = self.op
        inner = op.Relu(
            op.Add(op.MatMul(x, self.weight(name + "expand.weight", transpose=True)), self.weight(name + "expand.bias"))
        )
        return op.Add(
            op.MatMul(inner, self.weight(name + "contract.weight", transpose=True)), self.weight(name + "contract.bias")
        )

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        return self.op.LayerNormalization(x, self.weight(name + ".weight"), self.weight(name + ".bias"), axis=-1, epsilon=1e-5)

    def split_heads(self, x: ir.Value) -> ir.Value:
        """[B, T, H·K] → [B, H, T, K]"""
        shape = self.op.constant(np.array([0, 0, self.model.heads, self.model.head_dim]))
        return self.op.Transpose(self.op.Reshape(x, shape), perm=[0, 2, 1, 3])

    def last_of(self, x: ir.Value, *, axis: int) -> ir.Value:
        """The last M entries along an axis that has M + T."""
        op = self.op
        size = op.Shape(x, start=axis, end=axis + 1)
        return op.Slice(x, op.Sub(size, op.constant(np.array([self.rule.mem_len]))), size, op.constant(np.array([axis])))

    def range(self, count: ir.Value) -> ir.Value:
        return self.op.Range(self.op.constant(np.array(0)), count, self.op.constant(np.array(1)))

    def bias(self, kind: str, layer: int) -> ir.Value:
        """u or v of a layer, [H, 1, K]."""
        pairs = self.weights[kind]
        return self.op.constant(pairs[min(layer, len(pairs) - 1)][:, None], f"blocks.{layer}.{kind}")

    def packed(self, layer: int, *kinds: str) -> ir.Value:
        """Several projections [D, H·K] side by side, as one matrix."""
        matrices = [self.weights[f"blocks.{layer}.{kind}.weight"].T for kind in kinds]
        return self.op.constant(np.concatenate(matrices, axis=1), f"blocks.{layer}.{'_'.join(kinds)}")

    def weight(self, name: str, *, transpose: bool = False) -> ir.Value:
        array = self.weights[name]
        return self.op.constant(array.T if transpose else array, name)
