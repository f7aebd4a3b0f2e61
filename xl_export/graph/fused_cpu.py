"""The step graph for the fused operators of the C++ library in `runtimes/sessions/fused_cpu/`.

`library.cpp` there lists their inputs and attributes. In a small model, one node computes a whole layer and
one the logits: with more nodes a step would mostly wait for their dispatch. In a large model ONNX Runtime
multiplies, and one node per layer does the rest of attention: ring write, scores, mask, softmax and values.
Persistent vectors that have a softmax of their own are written in standard operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from runtimes.contract.precision import MemoryType
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import SCALE
from xl_export.graph.head import embedding_scale, output_weights, project
from xl_export.graph.memory import Group
from xl_export.graph.persistent import attend_persistent, persistent_constants
from xl_export.graph.step import StepGraph

DOMAIN = "xl_export"
# The operator's inputs that may be of halves or bytes, by index: the position table, and persistent keys and
# values. Each has the index of its scales, which bytes need.
SCALES_OF = {4: 12, 13: 15, 14: 16}
# The ends of the operators' names by type of the memory tensors.
OVER: dict[MemoryType, str] = {"float32": "", "float16": "OverHalves", "int8": "OverBytes"}
ATTENTION = "RingRelativeAttention"
LAYER = "RingRelativeLayer"
PRODUCT = "ConstantProduct"
ROWS = "ConstantRows"
# The inputs that are matrices of products, by index, each with the indices of its scales and zero points.
MATRICES = {
    LAYER: {1: (19, 20), 21: (22, 23), 26: (27, 28), 30: (31, 32)},
    PRODUCT: {1: (2, 3)},
    ROWS: {1: (2, 3)},
}
MAX_LAYER_NODE_PARAMETERS = 10_000_000  # parameters of a model whose layers are one node each


def takes(spec: Spec) -> bool:
    """Whether the operator computes what this artefact's layers compute."""
    return spec.circular and spec.target == "onnxruntime"


def matrices_of(node: ir.Node) -> Mapping[int, tuple[int, int]]:
    """The entry of `MATRICES` for a node of these operators; empty for every other node."""
    return MATRICES.get(node.op_type.partition("Over")[0], {}) if node.domain == DOMAIN else {}


def reads_tables(node: ir.Node) -> bool:
    """Whether a node has the inputs of `SCALES_OF`."""
    return node.domain == DOMAIN and node.op_type.partition("Over")[0] in (ATTENTION, LAYER)


class FusedStepGraph(StepGraph):
    """The same model as `StepGraph`, with the fused operators."""

    domains: Mapping[str, int] = MappingProxyType({DOMAIN: 1})
    operator = ATTENTION  # without the rest of the layer

    @property
    def small(self) -> bool:
        return self.spec.model.parameters <= MAX_LAYER_NODE_PARAMETERS

    def block(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        config = self.config
        one_product = config.query_norm or not config.pre_norm
        one_softmax = config.sublayers in ("feed-forward", "all-attention")
        if not (self.small and len(groups) == 1 and one_product and one_softmax):
            return super().block(layer, x, groups, present)
        op = self.op
        name = f"blocks.{layer}."
        order = list(groups[0].heads)
        matrix = np.concatenate(self.projections(layer, order, []), axis=1)
        inputs = self.operator_inputs(groups[0], x, op.constant(matrix, name + "query_key_value"))
        inputs += [None] * (21 - len(inputs))
        inputs += [self.output_projection(layer, order), None, None]
        inputs += self.norm_weights(name + "attention_norm")
        if config.sublayers == "feed-forward":  # the node computes its ReLU
            for kind in ("expand", "contract"):
                inputs += [self.weight(f"{name}{kind}.weight", transpose=True), None, None]
                inputs.append(self.weight(f"{name}{kind}.bias"))
            inputs += self.norm_weights(name + "feed_forward_norm")
        attributes = self.attributes(
            groups[0], at=0, keys_at=config.heads * config.head_dim, heads=len(order)
        )
        attributes |= {"pre_norm": int(config.pre_norm), "norm_epsilon": self.config.norm_epsilon}
        return self.custom_node(LAYER, inputs, attributes, present, width=config.d_model)

    def embedded(self) -> ir.Value:
        config = self.config
        if not self.small or len(config.clusters) > 1 or config.clusters[0].projected:
            return super().embedded()
        attributes = {"turned": 1, "width": config.d_model, "factor": float(embedding_scale(config))}
        inputs = [self.inputs["input_ids"], self.weight("vocabulary.table.0"), None, None]
        (x,) = self.op.custom(DOMAIN, ROWS, inputs, attributes, outputs=1)
        return x

    def logits(self, x: ir.Value) -> ir.Value:
        if not self.small or len(self.config.clusters) > 1:
            return super().logits(x)
        table, bias = output_weights(self, 0)
        inputs = [project(self, 0, x), table, None, None, bias]
        return self.op.custom(DOMAIN, PRODUCT, inputs, {"turned": 1}, outputs=1)[0]

    def attention(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        return self.output(layer, *self.answers(layer, x, groups, present))

    def answers(
        self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]
    ) -> tuple[list[ir.Value], list[int], ir.Value | None]:
        """What `output` makes the first sublayer's answer of."""
        op = self.op
        config = self.config
        order = [head for group in groups for head in group.heads]
        others = [head for head in range(config.heads) if head not in order]
        packed = self.projected(layer, x, order, others)
        # One product for all, or one for queries and one for keys and values.
        query = packed[0][0]
        context = packed[-1][0]
        key_at = 0 if len(packed) > 1 else config.heads * config.head_dim
        answers = []
        for group in groups:
            at = order.index(group.heads[0]) * config.head_dim
            attributes = self.attributes(group, at=at, keys_at=key_at, heads=len(order))
            inputs = self.operator_inputs(group, query, context)
            width = len(group.heads) * config.head_dim
            answers.append(self.custom_node(self.operator, inputs, attributes, present, width=width))
        if config.sublayers not in ("head-split", "attn-split", "single-head"):
            return answers, [*order, *others], None
        # Persistent vectors have a softmax of their own, in standard operators.
        first, widths = packed[0]
        queries = self.split_heads(op.split(first, widths, axis=2)[0] if len(widths) > 1 else first)
        if others:
            alone = attend_persistent(self, layer, self.cut(queries, [len(order), len(others)])[1])
            answers.append(self.join_heads(alone))
        return answers, [*order, *others], queries

    def attributes(self, group: Group, *, at: int, keys_at: int, heads: int) -> dict[str, int | float]:
        """The attributes of attention for a group of heads.

        at: the group's first column in `heads` heads. keys_at: the first column of all keys.
        """
        attributes: dict[str, int | float] = {
            "heads": len(group.heads),
            "head_dim": self.config.head_dim,
            "mem_len": group.rule.mem_len,
            "nearest": group.rule.nearest,
            "full": int(group.rule.window_grows),
            "query_at": at,
            "key_at": keys_at + at,
            "value_at": keys_at + heads * self.config.head_dim + at,
        }
        if self.gated and self.config.span is not None:
            attributes["epsilon"] = self.config.span.epsilon
        return attributes

    def custom_node(
        self,
        name: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | float],
        present: list[ir.Value],
        *,
        width: int,
    ) -> ir.Value:
        """Returns the first output [B, T, width] of a node with memory; appends the others to `present`."""
        scaled = self.spec.scaled_memory
        answer, *kept = self.op.custom(
            DOMAIN, name + OVER[self.spec.state_dtype], inputs, attributes, outputs=5 if scaled else 3
        )
        # ONNX Runtime knows no shapes behind an operator of another library. If they are declared, it makes
        # one node of a residual addition, its bias and the LayerNormalization behind it.
        answer.dtype = ir.DataType.FLOAT
        answer.shape = ir.Shape(["batch", "tokens", width])
        # The operator gives keys, values and the scales of both; the spec has scales behind their numbers.
        present += [kept[at] for at in (0, 2, 1, 3)] if scaled else kept
        return answer

    def operator_inputs(self, group: Group, query: ir.Value, context: ir.Value) -> list[ir.Value | None]:
        """The operator's inputs for a group of heads; the last of them that it does not need are left out."""
        terms = {kind: self.named_constant(group, x, kind) for kind, x in self.terms_of(group).items()}
        initial: list[np.ndarray | None] = [None, None]
        if group.rule.initial_memory == "zeros":
            initial = [self.initial(group, kind) for kind in ("key", "value")]
        persistent: list[ir.Value | None] = [None, None]
        if self.config.sublayers == "all-attention":
            persistent = list(persistent_constants(self, group.layer, group.heads))
        inputs = [
            query,
            context,
            *(self.inputs[f"past_key_values.{group.name}.{kind}"] for kind in ("key", "value")),
            terms["position_table"],
            self.inputs["position_ids"],
            *(terms[kind] for kind in ("u", "v", "bias_table")),
            *(
                self.named_constant(group, x, f"initial_{kind}")
                for x, kind in zip(initial, ("key", "value"), strict=True)
            ),
            terms["span_table"],
            None,
            *persistent,
        ]
        if self.spec.scaled_memory:
            names = [f"past_key_values.{group.name}.{kind}{SCALE}" for kind in ("key", "value")]
            inputs += [None, None, *(self.inputs[name] for name in names)]
        while inputs[-1] is None:
            inputs.pop()
        return inputs
