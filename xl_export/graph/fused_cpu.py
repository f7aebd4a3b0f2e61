"""The step graph for the fused operator: one node per layer for ring write, scores, mask, softmax and values.

The operator is part of the C++ library in `runtimes/sessions/fused_cpu/`, which lists its inputs and
attributes. It serves every model with ring memory. Persistent vectors that have a softmax of their own are
written in standard operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from runtimes.contract.precision import MemoryType
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import SCALE
from trainer.model.config import ModelConfig
from xl_export.graph.layers import Weights
from xl_export.graph.memory import Group
from xl_export.graph.persistent import attend_persistent, persistent_constants
from xl_export.graph.step import StepGraph
from xl_export.graph.tables import bias_table, position_table, query_bias, span_table

DOMAIN = "xl_export"
# The operator's inputs that may be of halves or bytes, by index: the position table, and persistent keys and
# values. Each has the index of its scales, which bytes need.
SCALES_OF = {4: 12, 13: 15, 14: 16}
# By type of the memory tensors.
OPERATORS: dict[MemoryType, str] = {
    "float32": "RingRelativeAttention",
    "float16": "RingRelativeAttentionOverHalves",
    "int8": "RingRelativeAttentionOverBytes",
}


def takes(spec: Spec) -> bool:
    """Whether the operator computes what this artefact's layers compute."""
    return spec.form == "ring" and spec.target == "onnxruntime"


def fused_step_graph(spec: Spec, config: ModelConfig, weights: Weights) -> ir.Model:
    """The same model as `step_graph` returns, with the fused operator."""
    return _FusedStepGraph(spec, config, weights).build()


class _FusedStepGraph(StepGraph):
    domains: Mapping[str, int] = MappingProxyType({DOMAIN: 1})

    def attention(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        op = self.op
        config = self.config
        order = [head for group in groups for head in group.heads]
        others = [head for head in range(config.heads) if head not in order]
        packed = self.projected(layer, x, order, others)
        # One product for all, or queries apart from keys and values.
        query = packed[0][0]
        context = packed[-1][0]
        key_at = 0 if len(packed) > 1 else config.heads * config.head_dim
        answers = []
        for group in groups:
            before = order.index(group.heads[0]) * config.head_dim
            attributes: dict[str, int | float] = {
                "heads": len(group.heads),
                "head_dim": config.head_dim,
                "mem_len": group.rule.mem_len,
                "nearest": group.rule.nearest,
                "full": int(group.rule.mask == "full"),
                "query_at": before,
                "key_at": key_at + before,
                "value_at": key_at + len(order) * config.head_dim + before,
            }
            if self.gated and config.span is not None:
                attributes["epsilon"] = config.span.epsilon
            inputs = self.operator_inputs(group, query, context)
            name = OPERATORS[self.spec.state_dtype]
            in_bytes = self.spec.state_dtype == "int8"
            answer, *kept = op.custom(DOMAIN, name, inputs, attributes, outputs=5 if in_bytes else 3)
            # ONNX Runtime knows no shapes behind an operator of another library. Where they are declared, it
            # makes one node of a residual addition, its bias and the LayerNormalization behind it.
            answer.dtype = ir.DataType.FLOAT
            answer.shape = ir.Shape(["batch", "tokens", len(group.heads) * config.head_dim])
            answers.append(answer)
            # The operator gives keys, values and the scales of both; the spec has scales behind their bytes.
            present += [kept[at] for at in (0, 2, 1, 3)] if in_bytes else kept
        if config.sublayers not in ("head-split", "attn-split", "single-head"):
            return self.output(layer, answers, [*order, *others])
        # Persistent vectors have a softmax of their own, in standard operators.
        first, widths = packed[0]
        queries = self.split_heads(op.split(first, widths, axis=2)[0] if len(widths) > 1 else first)
        if others:
            alone = attend_persistent(self, config, layer, self.cut(queries, [len(order), len(others)])[1])
            answers.append(self.join_heads(alone))
        return self.output(layer, answers, [*order, *others], queries)

    def operator_inputs(self, group: Group, query: ir.Value, context: ir.Value) -> list[ir.Value | None]:
        """The operator's inputs for a group of heads; the last of them that it does not need are left out."""
        config = self.config
        heads = group.heads
        terms = self.terms.layer(group.layer)
        rows = self.terms.rows(group.rule)
        initial: list[np.ndarray | None] = [None, None]
        if group.rule.initial_memory == "zeros":
            initial = [self.initial(group, kind) for kind in ("key", "value")]
        persistent: list[ir.Value | None] = [None, None]
        if config.sublayers == "all-attention":
            persistent = list(persistent_constants(self, group.layer, heads))
        bias = bias_table(terms, heads, rows, head_dim=config.head_dim, masks=not self.gated)
        inputs = [
            query,
            context,
            *(self.inputs[f"past_key_values.{group.name}.{kind}"] for kind in ("key", "value")),
            self.named_constant(group, position_table(terms, heads, rows), "position_table"),
            self.inputs["position_ids"],
            self.named_constant(group, query_bias(terms.u, heads), "u"),
            self.named_constant(group, query_bias(terms.v, heads), "v"),
            self.named_constant(group, bias, "bias_table"),
            *(
                self.named_constant(group, x, f"initial_{kind}")
                for x, kind in zip(initial, ("key", "value"), strict=True)
            ),
            self.named_constant(group, span_table(terms, heads, rows) if self.gated else None, "span_table"),
            None,
            *persistent,
        ]
        if self.spec.state_dtype == "int8":
            names = [f"past_key_values.{group.name}.{kind}{SCALE}" for kind in ("key", "value")]
            inputs += [None, None, *(self.inputs[name] for name in names)]
        while inputs[-1] is None:
            inputs.pop()
        return inputs

    def named_constant(self, group: Group, array: np.ndarray | None, kind: str) -> ir.Value | None:
        return None if array is None else self.op.constant(array, f"blocks.{group.name}.{kind}")
