"""The step graph for TensorRT: float16, memory in a ring or as `shift`, and attention in one of two ways.

With `native` attention is made of standard operators, for TensorRT's own kernels. With `plugin` it is one
node `xl_export::RelativeAttention`, or the same over a ring, and the model holds the operator's body too
(`operator.py`). ONNX Runtime runs both.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import onnx_ir as ir

from runtimes.contract.engine import Attention
from runtimes.contract.spec import Spec
from trainer.model.config import ModelConfig
from xl_export.graph.half import to_half
from xl_export.graph.head import selected_densely
from xl_export.graph.layers import Weights
from xl_export.graph.memory import Group
from xl_export.graph.ops import TYPES
from xl_export.graph.persistent import persistent_tables
from xl_export.graph.qdq import FORMATS, dequantised
from xl_export.graph.step import StepGraph
from xl_export.tensorrt.operator import DOMAIN, NAME, RING_NAME, VERSION, Attributes, function_body


def tensorrt_graph(spec: Spec, config: ModelConfig, weights: Weights, *, attention: Attention) -> ir.Model:
    """The ONNX model of one step for TensorRT, in the spec's precision."""
    # The graph is first made in float32 throughout; `to_half` is one pass over all of it.
    single = dataclasses.replace(spec, precision="fp32", memory_precision="fp32").completed()
    model = (_EngineStep if attention == "native" else _OperatorStep)(single, config, weights).build()
    if attention == "plugin":
        model.graph.opset_imports[DOMAIN] = VERSION
    if spec.precision in FORMATS:
        model = dequantised(model, spec.precision)
    if spec.precision != "fp32":
        model = to_half(model, {fact.name: TYPES[fact.dtype] for fact in (*spec.inputs, *spec.outputs)})
    if attention == "plugin":
        ring = spec.circular
        persistent = config.sublayers == "all-attention"
        body = ir.serde.deserialize_function(function_body(spec.opset, ring=ring, persistent=persistent))
        model.functions[body.identifier()] = body
    return model


class _EngineStep(StepGraph):
    """The step whose shapes depend only on batch, segment and rows, never on the tokens."""

    @property
    def gated(self) -> bool:
        """An epsilon of 1e-8 is 0 in float16, so engines leave it out; the export's validation measures what
        that costs.
        """
        return False

    def selected(self, x: ir.Value) -> list[ir.Value]:
        return list(selected_densely(self, x, self.inputs["targets"], self.inputs["logit_rows"]))


class _OperatorStep(_EngineStep):
    """The step whose attention is one node for each layer and group of heads."""

    def context_attention(self, group: Group, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        count = self.spec.model.persistent if self.config.sublayers == "all-attention" else 0
        inputs = [query, key, value, self.first, *self.term_inputs(group), *self.persistent(group, count)]
        attributes = dataclasses.asdict(Attributes.of(group.rule, persistent=count))
        attributes |= {"mem_len": group.rule.mem_len, "heads": len(group.heads)}
        name = NAME
        if self.spec.circular:
            inputs.append(self.op.Cast(self.write_at(group), to=ir.DataType.INT32))
            attributes["slots"] = group.rule.slots
            name = RING_NAME
        inputs.append(self.inputs["position_ids"])
        answer = self.op.custom(DOMAIN, name, inputs, attributes, outputs=1)[0]
        answer.dtype = ir.DataType.FLOAT
        answer.shape = ir.Shape(["batch", len(group.heads), "tokens", self.config.head_dim])
        return answer

    @functools.cached_property
    def first(self) -> ir.Value:
        """Stream positions int32 [B] of the first token, clipped to those that differ for the mask.

        So streams may be longer than an int32 counts.
        """
        op = self.op
        rule = self.rule
        position = op.Gather(self.inputs["position_ids"], op.constant(np.array(0)), axis=1)
        clipped = op.Clip(position, op.constant(np.array(-rule.segment)), op.constant(np.array(rule.slots)))
        return op.Cast(clipped, to=ir.DataType.INT32)

    def term_inputs(self, group: Group) -> list[ir.Value]:
        """u, v, the position table and the bias table of a group, zeros for those that the model does not
        have.
        """
        terms = self.terms_of(group)
        table = terms["position_table"]
        bias = terms["bias_table"]
        if table is not None:
            table = table.transpose(0, 2, 1)
            table = table[:1] if self.terms.layer(group.layer).one_for_all_heads else table
        if bias is not None:
            bias = bias[:, 0]
        by_head = (len(group.heads), 1, self.config.head_dim)
        return [
            *(self.constant_or_zeros(group, terms[kind], kind, by_head) for kind in ("u", "v")),
            self.constant_or_zeros(group, table, "position_table", (1, 1, self.config.head_dim)),
            self.constant_or_zeros(group, bias, "bias_table", (1, 1)),
        ]

    def persistent(self, group: Group, count: int) -> list[ir.Value]:
        """Persistent keys and values of a group's heads, or one of zeros that is not used."""
        if not count:
            return [self.constant_or_zeros(group, None, "", (len(group.heads), 1, self.config.head_dim))] * 2
        pair = persistent_tables(self, group.layer)
        names = (f"blocks.{group.name}.persistent.{kind}" for kind in ("key", "value"))
        return [
            self.op.constant(table[list(group.heads)], name) for table, name in zip(pair, names, strict=True)
        ]
