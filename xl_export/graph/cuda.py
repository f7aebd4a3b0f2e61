"""The step graph for ONNX Runtime's CUDA provider: each layer's attention is one node of our C++ library,
which launches one kernel (`runtimes/sessions/ort_gpu/operator.hpp`), and so are its products with the norms,
biases, activations and residual additions around them (`product.hpp` there).

A norm is computed by the products that read its result. So a token needs five launches for a layer with a
feed-forward network, and three for one without.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from runtimes.base.errors import ConfigError
from runtimes.contract.spec import Spec
from trainer.model.config import ModelConfig
from xl_export.graph.fused_cpu import ATTENTION, DOMAIN, FusedStepGraph
from xl_export.graph.half import HALF, to_half
from xl_export.graph.head import output_weights
from xl_export.graph.layers import Weights
from xl_export.graph.memory import Group
from xl_export.graph.ops import TYPES
from xl_export.graph.persistent import persistent_constants
from xl_export.graph.quantise import lowered

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
            raise ConfigError(
                f"attention as one node is not possible: {fault}; change that, or leave out --attention-as."
            )


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


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm that the products that read a value compute: its weight and bias, and what it gives if the step
    has many rows.
    """

    weights: list[ir.Value]
    result: ir.Value

    @staticmethod
    def inputs(norm: Norm | None) -> list[ir.Value | None]:
        """The inputs of a product for a norm; None for no norm."""
        return [None] * 3 if norm is None else [*norm.weights, norm.result]


class CudaStepGraph(FusedStepGraph):
    """The same model as `StepGraph`, with one node for each layer and group of heads, and one for each
    product.
    """

    operator = f"{ATTENTION}OnCuda"
    product_operator = "ProductOnCuda"
    multiple = 4  # that the sums of a product must be of: 16 bytes

    def __init__(self, spec: Spec, config: ModelConfig, weights: Weights, tokens: int | None = None) -> None:
        super().__init__(spec, config, weights, tokens)
        self.norms: dict[ir.Value, Norm] = {}  # of the results of products

    @property
    def multiplies(self) -> bool:
        """Whether our node computes the products. ONNX Runtime has faster ones for weights of few bits."""
        config = self.config
        depths = (config.d_model, config.d_ff, config.heads * config.head_dim)
        return (
            self.spec.precision in ("fp32", "fp16")
            and config.sublayers in ("feed-forward", "all-attention")
            and not any(depth % self.multiple for depth in depths)
        )

    def product(
        self,
        x: ir.Value,
        matrix: ir.Value,
        *,
        bias: ir.Value | None = None,
        relu: bool = False,
        residual: ir.Value | None = None,
        norm: Norm | None = None,
        residual_norm: Norm | None = None,
        next_norm: str | None = None,
    ) -> ir.Value:
        """activation(norm(x) · matrixᵀ + bias) + norm(residual), for a matrix [N, K].

        next_norm: the norm with which products read the result, by the name of its weights; see `norms`.
        """
        following = self.norm_weights(next_norm) if next_norm else []
        inputs = [x, matrix, bias, residual, *Norm.inputs(norm), *Norm.inputs(residual_norm), *following]
        while inputs[-1] is None:
            inputs.pop()
        attributes = {"relu": int(relu), "epsilon": self.config.norm_epsilon}
        results = self.op.custom(
            DOMAIN, self.product_operator, inputs, attributes, outputs=2 if following else 1
        )
        assert matrix.shape is not None, "a constant has a shape"
        for result in results:
            result.dtype = ir.DataType.FLOAT
            result.shape = ir.Shape(["batch", "tokens", matrix.shape[0]])
        if following:
            self.norms[results[0]] = Norm(following, results[1])
        return results[0]

    def turned(self, matrix: ir.Value) -> ir.Value:
        """W [K, N] as [N, K]. It is stored once, for all graphs, and turned when the graph is loaded."""
        turned = self.op.Transpose(matrix, perm=[1, 0])
        assert matrix.shape is not None, "a constant has a shape"
        turned.dtype = ir.DataType.FLOAT
        turned.shape = ir.Shape([matrix.shape[1], matrix.shape[0]])
        return turned

    def block(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        if not self.multiplies:
            return super().block(layer, x, groups, present)
        pre_norm, two = self.config.pre_norm, self.config.sublayers == "feed-forward"
        name = f"blocks.{layer}."
        first, second = (name + kind for kind in ("attention_norm", "feed_forward_norm"))
        behind = self.norm_behind(layer)
        answers, order, _ = self.answers(layer, x, groups, present)
        x = self.product(
            self.op.Concat(*answers, axis=2) if len(answers) > 1 else answers[0],
            self.turned(self.output_projection(layer, order)),
            residual=x,
            residual_norm=self.own_norm(x),
            next_norm=(second if pre_norm else first) if two else behind,
        )
        if two:
            inner = self.product(
                x,
                self.turned(self.weight(f"{name}expand.weight", transpose=True)),
                bias=self.weight(f"{name}expand.bias"),
                relu=True,
                norm=self.norms[x],
            )
            x = self.product(
                inner,
                self.turned(self.weight(f"{name}contract.weight", transpose=True)),
                bias=self.weight(f"{name}contract.bias"),
                residual=x,
                residual_norm=self.own_norm(x),
                next_norm=behind,
            )
        return x if pre_norm or behind else self.norm(second if two else first, x)

    def norm_behind(self, layer: int) -> str | None:
        """The norm with which products read a layer's result; None if there is none, or if other nodes read
        the result.
        """
        name = f"blocks.{layer}."
        if layer + 1 == self.config.layers:
            only_products, name_of_next = self.multiplies_logits, None
        else:
            only_products = self.terms.input_table(layer + 1) is None
            name_of_next = f"blocks.{layer + 1}.attention_norm"
        if not only_products:
            return None
        if self.config.pre_norm:
            return name_of_next
        return name + ("feed_forward_norm" if self.config.sublayers == "feed-forward" else "attention_norm")

    def own_norm(self, x: ir.Value) -> Norm | None:
        """The norm with which a residual addition reads x."""
        return None if self.config.pre_norm else self.norms.get(x)

    def projected(
        self, layer: int, x: ir.Value, order: list[int], others: list[int]
    ) -> list[tuple[ir.Value, list[int]]]:
        if not self.multiplies or (self.config.pre_norm and x not in self.norms):
            return super().projected(layer, x, order, others)
        name = f"blocks.{layer}."
        matrices = self.projections(layer, order, others)
        widths = [matrix.shape[1] for matrix in matrices]
        parts = [(name + "query_key_value", matrices, widths, self.norms.get(x))]
        if self.config.pre_norm and not self.config.query_norm:
            parts = [
                (name + "query", matrices[:1], widths[:1], None),
                (name + "key_value", matrices[1:], widths[1:], self.norms[x]),
            ]
        return [
            (
                self.product(
                    x, self.turned(self.op.constant(np.concatenate(some, axis=1), constant)), norm=norm
                ),
                columns,
            )
            for constant, some, columns, norm in parts
        ]

    @property
    def multiplies_logits(self) -> bool:
        """Whether our node computes the logits: all of one table of the model's width."""
        clusters = self.config.clusters
        return (
            self.multiplies
            and len(clusters) == 1
            and not clusters[0].projected
            and not self.spec.model.selective
        )

    def logits(self, x: ir.Value) -> ir.Value:
        if not self.multiplies_logits:
            return super().logits(x)
        table, bias = output_weights(self, 0)
        return self.product(x, table, bias=bias, norm=self.norms.get(x))

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
    product_operator = "ProductOnCudaInHalves"
    multiple = 8
