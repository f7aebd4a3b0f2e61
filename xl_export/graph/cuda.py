"""The step graph for ONNX Runtime's CUDA provider: each layer's attention is one node of our C++ library,
which launches one kernel (`runtimes/sessions/ort_gpu/operator.hpp`).
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from runtimes.base.errors import ConfigError
from runtimes.contract.spec import Spec
from trainer.model.config import ModelConfig
from xl_export.graph.fused_cpu import ATTENTION, FusedStepGraph
from xl_export.graph.layers import Weights
from xl_export.graph.memory import Group
from xl_export.graph.ops import TYPES
from xl_export.graph.persistent import persistent_constants
from xl_export.graph.quantise import lowered
from xl_export.tensorrt.half import HALF, to_half

MAX_HEAD_WIDTH = 128  # heads of the kernels


def refuse_unfit(spec: Spec, config: ModelConfig) -> None:
    """Raises ConfigError if the node does not compute what this artefact's layers compute."""
    width = config.head_dim
    faults = {
        f"memory is {spec.form}, expected ring": not spec.circular,
        f"the weights are stored as {spec.storage}, expected external": spec.storage != "external",
        f"memory is in {spec.memory_precision}, expected fp32 or fp16": spec.scaled_memory,
        "memory is in fp32 and the weights in fp16, expected both in fp16": spec.cuda_in_halves
        and spec.memory_precision == "fp32",
        f"heads are {width} wide, expected a multiple of 4 up to {MAX_HEAD_WIDTH}": width % 4
        or width > MAX_HEAD_WIDTH,
        "the spans have an epsilon, expected none": config.span is not None and config.span.epsilon,
    }
    for fault, holds in faults.items():
        if holds:
            raise ConfigError(f"attention as one node is not possible: {fault}; leave out --attention-as.")


def cuda_graph(spec: Spec, config: ModelConfig, weights: Weights) -> ir.Model:
    """The ONNX model of one step for `cuda`; with weights in fp16 it computes in fp16.

    ONNX Runtime's norms and products of halves, and the node, have sums in float32.
    """
    if not spec.cuda_in_halves:
        return lowered(CudaStepGraph(spec, config, weights).build(), spec.precision)
    single = dataclasses.replace(spec, precision="fp32", memory_precision="fp32").completed()
    model = _StepInHalves(single, config, weights).build()
    types = {fact.name: TYPES[fact.dtype] for fact in (*spec.inputs, *spec.outputs)}
    return to_half(model, types, norms=HALF)


class CudaStepGraph(FusedStepGraph):
    """The same model as `StepGraph`, with one node for each layer and group of heads."""

    operator = f"{ATTENTION}OnCuda"

    @property
    def small(self) -> bool:
        """No model's layers are one node each."""
        return False

    def operator_inputs(self, group: Group, query: ir.Value, context: ir.Value) -> list[ir.Value | None]:
        """The operator's inputs for a group of heads, zeros for terms that the model does not have."""
        op = self.op
        terms = self.terms_of(group)
        by_head = (len(group.heads), 1, self.config.head_dim)
        table = self.constant_or_zeros(group, terms["position_table"], "position_table", by_head)
        if terms["position_table"] is not None:
            # [h, R, K]. It is stored once, as [h, K, R], and turned when the graph is loaded.
            table = op.Transpose(table, perm=[0, 2, 1])
        table = self.to_memory(table)
        inputs: list[ir.Value | None] = [
            query,
            context,
            *(self.inputs[f"past_key_values.{group.name}.{kind}"] for kind in ("key", "value")),
            table,
            self.inputs["position_ids"],
            *(self.constant_or_zeros(group, terms[kind], kind, by_head) for kind in ("u", "v")),
            self.constant_or_zeros(group, terms["bias_table"], "bias_table", (len(group.heads), 1, 1)),
        ]
        if self.config.sublayers == "all-attention":
            keys, values = persistent_constants(self, group.layer, group.heads)
            inputs += [op.Transpose(keys, perm=[0, 2, 1]), values]
        if group.rule.initial_memory == "zeros":
            inputs += [None] * (11 - len(inputs))
            for kind in ("key", "value"):
                initial = self.initial(group, kind)
                inputs.append(self.named_constant(group, initial, f"initial_{kind}"))
        return inputs


class _StepInHalves(CudaStepGraph):
    """The same step for `to_half`."""

    operator = f"{ATTENTION}OnCudaInHalves"
