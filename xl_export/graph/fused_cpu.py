"""The step graph for the fused operator: one node per layer for ring write, scores, mask, softmax and values.

The operator is part of the C++ library in `runtimes/sessions/fused_cpu/`, which lists its inputs and
attributes. It serves ring memory that is masked before a text begins, and models whose scores depend on
distance.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import onnx_ir as ir

from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Spec
from trainer.model.config import ModelConfig
from trainer.model.terms import ModelTerms
from xl_export.graph.layers import Weights
from xl_export.graph.memory import Group
from xl_export.graph.step import StepGraph
from xl_export.graph.tables import bias_table, position_table, query_bias

DOMAIN = "xl_export"
TABLE = 4  # the index of the position table among the operator's inputs
# By type of the memory tensors. Artefacts of version 0.1 call the operators RelativeAttention and
# RelativeAttentionOverHalves.
OPERATORS = {"float32": "RingRelativeAttention", "float16": "RingRelativeAttentionOverHalves"}


def takes(spec: Spec, config: ModelConfig, weights: Weights) -> bool:
    """Whether the operator computes what this artefact's layers compute."""
    served = spec.form == "ring" and spec.target == "onnxruntime" and spec.rule.initial_memory == "masked"
    if not served or spec.model.sublayers != "feed-forward":
        return False
    if config.span is not None and config.span.epsilon:  # the operator has the mask in its softmax
        return False
    one_row = MemoryRule(mem_len=0, segment=1)
    return ModelTerms(config, weights, one_row).layer(0).position is not None


def fused_step_graph(spec: Spec, config: ModelConfig, weights: Weights) -> ir.Model:
    """The same model as `step_graph` returns, with the fused operator."""
    return _FusedStepGraph(spec, config, weights).build()


class _FusedStepGraph(StepGraph):
    domains: Mapping[str, int] = MappingProxyType({DOMAIN: 1})

    def attention(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        op, config = self.op, self.config
        order = [head for group in groups for head in group.heads]
        products = [product for product, _ in self.projected(layer, x, order, [])]
        query, context = products[0], products[-1]  # the same product, or queries apart from keys and values
        key_at = 0 if len(products) > 1 else len(order) * config.head_dim
        answers = []
        for group in groups:
            terms, rows = self.terms.layer(layer), self.terms.rows(group.rule)
            u, v = (query_bias(vector, group.heads) for vector in (terms.u, terms.v))
            table = position_table(terms, group.heads, rows)
            bias = bias_table(terms, group.heads, rows, head_dim=config.head_dim)
            assert table is not None, "`takes` refuses models without position vectors"
            optional = ((u, "u"), (v, "v"), (bias, "bias_table"))
            name, before = f"blocks.{group.name}.", order.index(group.heads[0]) * config.head_dim
            inputs = [
                query,
                context,
                *(self.inputs[f"past_key_values.{group.name}.{kind}"] for kind in ("key", "value")),
                op.constant(table, name + "position_table"),
                self.inputs["position_ids"],
                *(None if array is None else op.constant(array, name + kind) for array, kind in optional),
            ]
            attributes = {
                "heads": len(group.heads),
                "head_dim": config.head_dim,
                "mem_len": group.rule.mem_len,
                "nearest": group.rule.nearest,
                "full": int(group.rule.mask == "full"),
                "query_at": before,
                "key_at": key_at + before,
                "value_at": key_at + len(order) * config.head_dim + before,
            }
            answer, *kept = op.custom(DOMAIN, OPERATORS[self.spec.state_dtype], inputs, attributes, outputs=3)
            answers.append(answer)
            present += kept
        joined = op.Concat(*answers, axis=2) if len(answers) > 1 else answers[0]
        return op.MatMul(joined, self.output_projection(layer, order))
