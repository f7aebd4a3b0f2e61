"""The step graph: tokens, positions and memory in, logits and memory out, in three forms of memory.

For a query at stream position p and a key at distance d:

    score = (q + u)·k / sqrt(K) + ((q + v)·r(d) + bias(d)) / sqrt(K) + log m(d)      softmax over visible keys, then values

r, bias and m are constants once training is over, so the graph carries them as tables by distance, up to the longest that can
be seen (`tables.py`). 1/sqrt(K) is folded into the query's weights, u and v. The shift of Appendix B is a gather of the position
scores by distance. The soft span mask that multiplies after the softmax and normalises again is log m(d) before it.
Standard ONNX operators only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Form, HeadGroup, Spec, head_groups
from trainer.model.config import ModelConfig
from xl_export.graph.gated import gated_attention
from xl_export.graph.head import all_logits, embed, selected
from xl_export.graph.layers import Layers, Weights
from xl_export.graph.ops import graph_input
from xl_export.graph.persistent import attend_persistent, context_and_persistent
from xl_export.graph.tables import bias_table, position_table, query_bias, sinusoids, span_table, table_rows
from xl_export.graph.visibility import Sight, make_sight

OPSETS: dict[Form, int] = {"ring": 24, "shift": 23, "hidden": 23}  # Attention is 23, TensorScatter 24


def step_graph(spec: Spec, config: ModelConfig, weights: Weights) -> ir.Model:
    """The ONNX model of one step for a trained model's weights, under the spec's rule and form."""
    return StepGraph(spec, config, weights).build()


@dataclass(frozen=True)
class Group:
    """Some heads of one layer with the memory they share; `name` is the prefix of their constants and tensors."""

    layer: int
    name: str
    heads: Sequence[int]
    rule: MemoryRule


class StepGraph(Layers):
    """Writes the step; what a target does otherwise is a method of its own here."""

    domains: Mapping[str, int] = MappingProxyType({})  # operator sets beyond the standard one

    def __init__(self, spec: Spec, config: ModelConfig, weights: Weights) -> None:
        super().__init__(
            weights, heads=config.heads, head_dim=config.head_dim, norm_epsilon=config.norm_epsilon
        )
        self.spec, self.config, self.rule = spec, config, spec.rule
        self.inputs = {fact.name: graph_input(fact) for fact in spec.inputs}
        self.sights: dict[int, Sight] = {}

    def build(self) -> ir.Model:
        op = self.op
        x = embed(self, self.config, self.inputs["input_ids"])
        present: list[ir.Value] = []
        for layer, groups in enumerate(head_groups(self.spec.model, self.rule, self.spec.form)):
            x = self.block(layer, self.positioned(layer, x), self.named(layer, groups), present)
        if (
            self.spec.form == "ring"
        ):  # past and present are bound to one buffer: right only where nothing else reads the past
            assert all(len(self.inputs[state.past].uses()) == 1 for state in self.spec.state), (
                "a ring tensor has two readers"
            )
        head = self.selected(x) if self.spec.model.selective else [all_logits(self, self.config, x)]
        return op.model(
            list(self.inputs.values()),
            [*head, *present],
            self.spec.outputs,
            opset=self.spec.opset,
            domains=self.domains,
        )

    def selected(self, x: ir.Value) -> list[ir.Value]:
        """Logits of the chosen rows, and the log-probabilities of the wanted targets."""
        return list(selected(self, self.config, x, self.inputs["targets"], self.inputs["logit_rows"]))

    def positioned(self, layer: int, x: ir.Value) -> ir.Value:
        """A layer's input with absolute positions added, where the model has them.

        They start again every `context` tokens, or count back from the last token of the segment.
        """
        op, config = self.op, self.config
        if config.positions == "absolute" and layer == 0:
            vectors = sinusoids(config.context, config.d_model, self.weights.get("positions.frequencies"))
            table = op.constant(vectors.astype(np.float32), "positions")
        elif config.positions == "per-layer":
            table = op.constant(self.weights["positions.table"][layer], f"positions.{layer}")
        else:
            return x
        if config.from_segment_end:
            one, length = op.constant(np.array(1)), op.Squeeze(op.Shape(self.inputs["input_ids"], start=1))
            back = op.Range(op.Sub(length, one), op.constant(np.array(-1)), op.constant(np.array(-1)))
            return op.Add(x, op.Gather(table, op.Min(back, op.constant(np.array(config.context - 1)))))
        return op.Add(
            x, op.Gather(table, op.Mod(self.inputs["position_ids"], op.constant(np.array(config.context))))
        )

    def named(self, layer: int, groups: Sequence[HeadGroup]) -> list[Group]:
        """The layer's groups of heads with their names and rules."""
        named = []
        for number, group in enumerate(groups):
            rule = dataclasses.replace(self.rule, mem_len=group.mem_len)
            name = f"{layer}" if len(groups) == 1 else f"{layer}.{number}"
            named.append(Group(layer, name, group.heads, rule))
        return named

    def sight(self, group: Group) -> Sight:
        """What the group sees, once for all groups that remember as much."""
        if group.rule.mem_len not in self.sights:
            rows = table_rows(self.config, group.rule)
            self.sights[group.rule.mem_len] = make_sight(
                self.op, self.inputs, group.rule, self.spec.form, rows
            )
        return self.sights[group.rule.mem_len]

    def block(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        """One layer on x [B, T, D]; appends its memory outputs to `present`."""
        op, name = self.op, f"blocks.{layer}."
        two = self.config.sublayers in ("feed-forward", "ff-attn")
        if self.config.pre_norm:
            x = op.Add(x, self.attention(layer, x, groups, present))
            return op.Add(x, self.second(layer, self.norm(name + "feed_forward_norm", x))) if two else x
        x = self.norm(name + "attention_norm", op.Add(x, self.attention(layer, x, groups, present)))
        return self.norm(name + "feed_forward_norm", op.Add(x, self.second(layer, x))) if two else x

    def second(self, layer: int, x: ir.Value) -> ir.Value:
        """The second sublayer: a feed-forward network, or one with softmax for ReLU."""
        if self.config.sublayers == "feed-forward":
            return self.feed_forward(layer, x)
        op, axis = self.op, self.op.constant(np.array([1]))
        return op.Squeeze(attend_persistent(self, self.config, layer, op.Unsqueeze(x, axis)), axis)

    def attention(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        """The first sublayer: attention over the context by groups of heads, with what the layer's persistent vectors add."""
        op, config = self.op, self.config
        order = [head for group in groups for head in group.heads]  # heads of one group side by side
        others = [head for head in range(config.heads) if head not in order]  # of head-split
        if self.spec.form == "hidden":
            query, key, value = self.from_hidden(groups[0], x, order, others, present)
        else:
            query, key, value = self.from_input(layer, x, order, others)
        sizes = [len(group.heads) for group in groups]
        queries = self.cut(query, [*sizes, *([len(others)] if others else [])])
        answers = []
        for group, q, k, v in zip(
            groups, queries, self.cut(key, sizes), self.cut(value, sizes), strict=False
        ):
            if self.spec.form != "hidden":
                k, v = (
                    self.remembered(group, kind, new, present) for kind, new in (("key", k), ("value", v))
                )
            answers.append(self.context_attention(group, q, k, v))
        if others:
            answers.append(attend_persistent(self, config, layer, queries[-1]))
        joined = self.join_heads(op.Concat(*answers, axis=1) if len(answers) > 1 else answers[0])
        if config.sublayers == "attn-split":
            joined = op.Add(joined, self.join_heads(attend_persistent(self, config, layer, query, order)))
        elif config.sublayers == "single-head":
            whole = op.Unsqueeze(self.join_heads(query), op.constant(np.array([1])))
            joined = op.Add(joined, self.join_heads(attend_persistent(self, config, layer, whole, order)))
        return op.MatMul(joined, self.output_projection(layer, [*order, *others]))

    def output_projection(self, layer: int, order: Sequence[int]) -> ir.Value:
        """W of the heads' answers [H·K, D], the heads in this order."""
        columns = self.weights[f"blocks.{layer}.out.weight"].T.reshape(self.heads, self.head_dim, -1)[
            list(order)
        ]
        return self.op.constant(columns.reshape(-1, self.config.d_model), f"blocks.{layer}.out")

    def context_attention(self, group: Group, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        """Answers [B, h, T, K] of one group's heads to keys and values [B, h, J, K]."""
        op, arguments = self.op, (self.weights, self.config)
        u, v = (query_bias(*arguments, kind, group.layer, group.heads) for kind in ("u", "v"))
        table = position_table(*arguments, group.rule, group.layer, group.heads)
        bias = bias_table(*arguments, group.rule, group.layer, group.heads, masks=not self.gated)
        name, sight = f"blocks.{group.name}.", self.sight(group)
        scores = None
        if table is not None:
            asking = query if v is None else op.Add(query, op.constant(v, name + "v"))
            scores = op.MatMul(asking, op.constant(table, name + "position_table"))  # [B, h, T, R]
        if bias is not None:
            bias_table_ = op.constant(bias, name + "bias_table")
            scores = bias_table_ if scores is None else op.Add(scores, bias_table_)
        if scores is None:
            bias_BHTJ = sight.mask
        else:
            row = sight.row_of(len(group.heads))
            if table is None:
                scores = op.Expand(
                    scores, op.Concat(op.Shape(query, start=0, end=3), op.constant(np.array([1])), axis=0)
                )
            bias_BHTJ = op.Add(op.GatherElements(scores, row, axis=3), sight.mask)
        content = query if u is None else op.Add(query, op.constant(u, name + "u"))
        if self.gated:
            return gated_attention(
                self, self.config, group.layer, group.heads, query=query, content=content, key=key, value=value,
                bias=bias_BHTJ, gate=self.gate(group, query),
            )  # fmt: skip
        if self.config.sublayers == "all-attention":
            return context_and_persistent(
                self, group.layer, group.heads, query, content, key, value, bias_BHTJ
            )
        return op.Attention(content, key, value, bias_BHTJ, scale=1.0)

    @property
    def gated(self) -> bool:
        """Whether the span mask multiplies weights after the softmax, which an epsilon in the sum requires."""
        return self.config.span is not None and self.config.span.epsilon > 0

    def gate(self, group: Group, query: ir.Value) -> ir.Value:
        """m(d) of a group's heads for every query and key, [B, h, T, J]; 0 for keys that are not visible."""
        op, sight = self.op, self.sight(group)
        table = span_table(self.weights, self.config, group.rule, group.layer, group.heads)
        constant = op.constant(table[:, None], f"blocks.{group.name}.span_table")
        lead = op.Concat(op.Shape(query, start=0, end=3), op.constant(np.array([1])), axis=0)
        by_key = op.GatherElements(op.Expand(constant, lead), sight.row_of(len(group.heads)), axis=3)
        return op.Mul(by_key, op.Exp(sight.mask))

    def from_input(
        self, layer: int, x: ir.Value, order: list[int], others: list[int]
    ) -> tuple[ir.Value, ...]:
        """Queries [B, H, T, K], and the segment's own keys and values for the heads that look at the context."""
        packed = self.projected(layer, x, order, others)
        pieces = [
            y for x, widths in packed for y in (self.op.split(x, widths, axis=2) if len(widths) > 1 else [x])
        ]
        return tuple(self.split_heads(piece) for piece in pieces)

    def projected(
        self, layer: int, x: ir.Value, order: list[int], others: list[int]
    ) -> list[tuple[ir.Value, list[int]]]:
        """Queries, keys and values side by side in as few products as there can be, each with the widths of its parts."""
        op, asking, name = self.op, x, f"blocks.{layer}."
        if self.config.pre_norm:
            x = self.norm(name + "attention_norm", x)
        matrices = [self.projection(layer, "query", [*order, *others])]
        matrices += [self.projection(layer, kind, order) for kind in ("key", "value")]
        widths = [matrix.shape[1] for matrix in matrices]
        if self.config.pre_norm and not self.config.query_norm:
            query = op.MatMul(asking, op.constant(matrices.pop(0), name + "query"))
            packed = op.MatMul(x, op.constant(np.concatenate(matrices, axis=1), name + "key_value"))
            return [(query, widths[:1]), (packed, widths[1:])]
        return [
            (op.MatMul(x, op.constant(np.concatenate(matrices, axis=1), name + "query_key_value")), widths)
        ]

    def from_hidden(
        self, group: Group, x: ir.Value, order: list[int], others: list[int], present: list[ir.Value]
    ) -> tuple[ir.Value, ...]:
        """The same from the paper's own memory: layer inputs, whose keys and values are computed again each step."""
        op, name = self.op, f"blocks.{group.layer}."
        context = op.Concat(self.inputs[f"past_hidden.{group.layer}"], self.to_memory(x), axis=1)
        present.append(self.last_of(context, group.rule.mem_len, axis=1))
        context = self.from_memory(context)
        if (sight := self.sight(group)).before is not None:
            before = op.Squeeze(sight.before, op.constant(np.array([1])))
            context = op.Where(before, op.constant(np.float32(0)), context)
        if self.config.pre_norm:
            context = self.norm(name + "attention_norm", context)
            x = self.norm(name + "attention_norm", x) if self.config.query_norm else x
        matrices = [self.projection(group.layer, kind, order) for kind in ("key", "value")]
        packed = op.MatMul(context, op.constant(np.concatenate(matrices, axis=1), name + "key_value"))
        query = op.MatMul(
            x, op.constant(self.projection(group.layer, "query", [*order, *others]), name + "query")
        )
        return tuple(
            self.split_heads(y) for y in (query, *op.split(packed, [m.shape[1] for m in matrices], axis=2))
        )

    def remembered(self, group: Group, kind: str, new: ir.Value, present: list[ir.Value]) -> ir.Value:
        """Keys or values of memory and segment: written into the ring, or shifted by a segment."""
        op, sight = self.op, self.sight(group)
        past = self.inputs[f"past_key_values.{group.name}.{kind}"]
        new = self.to_memory(new)
        if self.spec.form == "ring":
            kept = op.TensorScatter(past, new, sight.write_at, axis=2, mode="circular")
            present.append(kept)
        else:
            kept = op.Concat(past, new, axis=2)
            present.append(self.last_of(kept, group.rule.mem_len, axis=2))
        kept = self.from_memory(kept)
        if sight.before is not None:
            kept = op.Where(sight.before, op.constant(self.initial(group, kind)), kept)
        return kept

    def to_memory(self, x: ir.Value) -> ir.Value:
        """x in the type of the memory tensors."""
        return self.op.Cast(x, to=int(ir.DataType.FLOAT16)) if self.spec.state_dtype == "float16" else x

    def from_memory(self, x: ir.Value) -> ir.Value:
        """x from memory in float32, that everything is computed in."""
        return self.op.Cast(x, to=int(ir.DataType.FLOAT)) if self.spec.state_dtype == "float16" else x

    def initial(self, group: Group, kind: str) -> np.ndarray:
        """Key or value [h, 1, K] of a hidden state of zero: zero, or W·beta behind a LayerNorm."""
        beta = self.weights[f"blocks.{group.layer}.attention_norm.bias"]
        hidden = beta if self.config.pre_norm else np.zeros_like(beta)
        return (hidden @ self.projection(group.layer, kind, group.heads)).reshape(
            len(group.heads), 1, self.head_dim
        )

    def cut(self, x: ir.Value, sizes: list[int]) -> list[ir.Value]:
        """[B, H, …] cut along the heads."""
        return self.op.split(x, sizes, axis=1) if len(sizes) > 1 else [x]

    def last_of(self, x: ir.Value, count: int, *, axis: int) -> ir.Value:
        """The last `count` entries along an axis."""
        op = self.op
        size = op.Shape(x, start=axis, end=axis + 1)
        return op.Slice(x, op.Sub(size, op.constant(np.array([count]))), size, op.constant(np.array([axis])))
