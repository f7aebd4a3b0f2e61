"""The step graph: tokens, positions and memory in, logits and memory out, in three forms of memory.

For a query at stream position p and a key at distance d:

    score = (q + u)·k / sqrt(K) + ((q + v)·r(d) + bias(d)) / sqrt(K) + log m(d)

A softmax over the visible keys follows, and its weights multiply the values.

r, bias and m are constants after training. The graph has them as tables by distance, up to the longest
distance that can be seen (`tables.py`). 1/sqrt(K) is multiplied into the query's weights, u and v. The shift
of Appendix B is a gather of the position scores by distance. The soft span mask multiplies the weights after
the softmax in the paper, which is the same as adding log m(d) to the scores. Only standard ONNX operators are
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from runtimes.contract.tensors import FORM_FACTS, head_groups
from xl_export.graph.head import all_logits, embed, selected
from xl_export.graph.memory import Group, MemoryLayers
from xl_export.graph.ops import remove_unused_nodes
from xl_export.graph.persistent import attend_by_parts, attend_persistent, persistent_constants
from xl_export.graph.tables import bias_table, position_table, query_bias, span_table
from xl_export.graph.visibility import StepMask

Terms = dict[str, np.ndarray | None]  # of the scores of a group, as `StepGraph.terms_of` returns them


class StepGraph(MemoryLayers):
    """Writes the step. A graph for another target overrides the methods that differ there."""

    domains: Mapping[str, int] = MappingProxyType({})  # operator sets beyond the standard one

    def build(self) -> ir.Model:
        op = self.op
        x = self.embedded()
        present: list[ir.Value] = []
        for layer, groups in enumerate(head_groups(self.spec.model, self.rule, self.spec.form)):
            x = self.block(layer, self.positioned(layer, x), self.with_rules(layer, groups), present)
        if self.spec.in_place:
            # Past and present are bound to one buffer, which is right only where nothing else reads the past.
            assert all(len(self.inputs[state.name].uses()) == 1 for state in self.spec.state), (
                "a ring tensor has two readers"
            )
        head = self.selected(x) if self.spec.model.selective else [self.logits(x)]
        model = op.model(
            list(self.inputs.values()),
            [*head, *present],
            self.outputs,
            opset=self.spec.opset,
            domains=self.domains,
        )
        remove_unused_nodes(model)  # table rows, if no term depends on distance
        return model

    def embedded(self) -> ir.Value:
        """The embeddings [B, T, D] of the tokens."""
        return embed(self, self.inputs["input_ids"])

    def logits(self, x: ir.Value) -> ir.Value:
        """Logits [B, T, V] of the last layer's output [B, T, D]."""
        return all_logits(self, x)

    def selected(self, x: ir.Value) -> list[ir.Value]:
        """Logits of the chosen rows, and the log-probabilities of the given targets."""
        return list(selected(self, x, self.inputs["targets"], self.inputs["logit_rows"]))

    def positioned(self, layer: int, x: ir.Value) -> ir.Value:
        """Returns a layer's input, with position vectors added where the model has such a table."""
        op = self.op
        vectors = self.terms.input_table(layer)
        if vectors is None:
            return x
        table = op.constant(vectors, f"positions.{layer}")
        if self.config.from_segment_end:
            return op.Add(x, op.Gather(table, self.from_end(len(vectors) - 1)))
        rows = op.constant(np.array(len(vectors)))
        return op.Add(x, op.Gather(table, op.Mod(self.inputs["position_ids"], rows)))

    def from_end(self, most: int) -> ir.Value:
        """How far each token is from the end of the segment, int64 [T]: T - 1, …, 0, and at most `most`."""
        op = self.op
        length = op.Squeeze(op.Shape(self.inputs["input_ids"], start=1))
        back = op.Range(
            op.Sub(length, op.constant(np.array(1))), op.constant(np.array(-1)), op.constant(np.array(-1))
        )
        return op.Min(back, op.constant(np.array(most)))

    def block(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        """One layer on x [B, T, D]; appends its memory outputs to `present`."""
        op = self.op
        name = f"blocks.{layer}."
        two = self.config.sublayers in ("feed-forward", "ff-attn")
        if self.config.pre_norm:
            x = op.Add(x, self.attention(layer, x, groups, present))
            return op.Add(x, self.second(layer, self.norm(name + "feed_forward_norm", x))) if two else x
        x = self.norm(name + "attention_norm", op.Add(x, self.attention(layer, x, groups, present)))
        return self.norm(name + "feed_forward_norm", op.Add(x, self.second(layer, x))) if two else x

    def second(self, layer: int, x: ir.Value) -> ir.Value:
        """The second sublayer: a feed-forward network, or one with softmax in the place of ReLU."""
        if self.config.sublayers == "feed-forward":
            return self.feed_forward(layer, x)
        op = self.op
        axis = self.op.constant(np.array([1]))
        return op.Squeeze(attend_persistent(self, layer, op.Unsqueeze(x, axis)), axis)

    def attention(self, layer: int, x: ir.Value, groups: list[Group], present: list[ir.Value]) -> ir.Value:
        """Returns the answer [B, T, D] of the first sublayer.

        It attends to the context by groups of heads, and to persistent vectors.
        """
        op = self.op
        config = self.config
        # Heads of one group stand side by side, so that each group is one piece of the tensors of all heads.
        order = [head for group in groups for head in group.heads]
        # In head-split, some heads are in no group: they see only persistent vectors, and come last.
        others = [head for head in range(config.heads) if head not in order]
        hidden = FORM_FACTS[self.spec.form].holds == "hidden"
        if hidden:
            query, key, value = self.from_hidden(groups[0], x, order, others, present)
        else:
            query, key, value = self.from_input(layer, x, order, others)
        sizes = [len(group.heads) for group in groups]
        queries = self.cut(query, [*sizes, *([len(others)] if others else [])])
        answers = []
        for group, q, k, v in zip(
            groups, queries, self.cut(key, sizes), self.cut(value, sizes), strict=False
        ):
            if not hidden:  # there, keys and values of the memory are computed already
                k, v = (
                    self.remembered(group, kind, new, present) for kind, new in (("key", k), ("value", v))
                )
            answers.append(self.context_attention(group, q, k, v))
        if others:
            answers.append(attend_persistent(self, layer, queries[-1]))
        joined = self.join_heads(op.Concat(*answers, axis=1) if len(answers) > 1 else answers[0])
        return self.output(layer, [joined], [*order, *others], query)

    def output(
        self, layer: int, answers: Sequence[ir.Value], order: Sequence[int], query: ir.Value | None = None
    ) -> ir.Value:
        """Returns the first sublayer's answer [B, T, D] of the answers [B, T, …] of heads in this order.

        query: [B, H, T, K] of all heads, for the two variants that add the answers of persistent vectors to
        the answers of the context.
        """
        op = self.op
        config = self.config
        joined = op.Concat(*answers, axis=2) if len(answers) > 1 else answers[0]
        if query is not None and config.sublayers == "attn-split":
            joined = op.Add(joined, self.join_heads(attend_persistent(self, layer, query, order)))
        elif query is not None and config.sublayers == "single-head":
            whole = op.Unsqueeze(self.join_heads(query), op.constant(np.array([1])))
            joined = op.Add(joined, self.join_heads(attend_persistent(self, layer, whole, order)))
        return op.MatMul(joined, self.output_projection(layer, order))

    def output_projection(self, layer: int, order: Sequence[int]) -> ir.Value:
        """The weights [H·K, D] of the output projection, for heads in this order."""
        columns = self.weights[f"blocks.{layer}.out.weight"].T.reshape(
            self.config.heads, self.config.head_dim, -1
        )[list(order)]
        return self.op.constant(columns.reshape(-1, self.config.d_model), f"blocks.{layer}.out")

    def context_attention(self, group: Group, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        """Answers [B, h, T, K] of one group's heads to keys and values [B, h, J, K]."""
        op = self.op
        terms = self.terms_of(group)
        u = self.named_constant(group, terms["u"], "u")
        content = query if u is None else op.Add(query, u)
        mask = self.mask_of(group).mask
        scores = self.distance_scores(group, query, terms)
        bias_BHTJ = mask if scores is None else op.Add(scores, mask)
        persistent = None
        if self.config.sublayers == "all-attention":
            persistent = (query, *persistent_constants(self, group.layer, group.heads))
        if persistent is None and not self.gated:
            return self.attend(group, content, key, value, bias_BHTJ)
        gate: dict[str, Any] = {}
        if self.gated and self.config.span is not None:
            gate = {"gate": self.gate(group, query), "epsilon": self.config.span.epsilon}
        return attend_by_parts(
            self, key, value, content=content, bias=bias_BHTJ, persistent=persistent, **gate
        )

    def distance_scores(self, group: Group, query: ir.Value, terms: Terms) -> ir.Value | None:
        """The part of the scores that depends on distances, by key: [B or 1, h, T, J]; None if no part does.

        terms: of `terms_of`.
        """
        op = self.op
        if terms["position_table"] is None:
            return None if terms["bias_table"] is None else self.by_key(group, terms, "bias_table", query)
        v, table, bias = (
            self.named_constant(group, terms[kind], kind) for kind in ("v", "position_table", "bias_table")
        )
        scores = op.MatMul(query if v is None else op.Add(query, v), table)  # [B, h, T, R]
        scores = scores if bias is None else op.Add(scores, bias)
        return op.GatherElements(scores, self.row_of(group), axis=3)

    def by_key(self, group: Group, terms: Terms, kind: str, query: ir.Value) -> ir.Value:
        """A term [h, 1, R] by distance as values [B or 1, h, T, J] by key."""
        op = self.op
        # GatherElements wants the shape of its indices in all dimensions but the last.
        lead = op.Concat(op.Shape(query, start=0, end=3), op.constant(np.array([1])), axis=0)
        by_distance = op.Expand(self.named_constant(group, terms[kind], kind), lead)
        return op.GatherElements(by_distance, self.row_of(group), axis=3)

    def row_of(self, group: Group) -> ir.Value:
        """The row of the tables by distance for every query and key of a group, int32 [B, h, T, J]."""
        mask = self.mask_of(group)
        assert isinstance(mask, StepMask), "the mask of this graph has no rows"
        return mask.row_of(len(group.heads))

    def terms_of(self, group: Group) -> Terms:
        """The terms of a group's scores by the names of their constants; None for what the model lacks."""
        terms = self.terms.layer(group.layer)
        rows = self.terms.rows(group.rule)
        heads = group.heads
        return {
            "u": query_bias(terms.u, heads),
            "v": query_bias(terms.v, heads),
            "position_table": position_table(terms, heads, rows),
            "bias_table": bias_table(terms, heads, rows, head_dim=self.config.head_dim, masks=not self.gated),
            "span_table": span_table(terms, heads, rows) if self.gated else None,
        }

    def named_constant(self, group: Group, array: np.ndarray | None, kind: str) -> ir.Value | None:
        return None if array is None else self.op.constant(array, f"blocks.{group.name}.{kind}")

    def constant_or_zeros(
        self, group: Group, array: np.ndarray | None, kind: str, shape: Sequence[int]
    ) -> ir.Value:
        """A term as a constant; zeros of a shape for what the model lacks."""
        found = self.named_constant(group, array, kind)
        return self.op.constant(np.zeros(shape, np.float32)) if found is None else found

    def attend(
        self, group: Group, query: ir.Value, key: ir.Value, value: ir.Value, bias: ir.Value
    ) -> ir.Value:
        """Answers of queries [B, h, T, K] to keys and values of memory and segment; bias [B, h, T, J]."""
        return self.op.Attention(query, key, value, bias, scale=1.0)

    @property
    def gated(self) -> bool:
        """Whether the span mask multiplies the weights after the softmax, as an epsilon requires."""
        return self.config.span is not None and self.config.span.epsilon > 0

    def gate(self, group: Group, query: ir.Value) -> ir.Value:
        """m(d) of a group's heads for every query and key, [B, h, T, J]; 0 for keys that are not visible."""
        op = self.op
        factors = self.by_key(group, self.terms_of(group), "span_table", query)
        return op.Mul(factors, op.Exp(self.mask_of(group).mask))

    def cut(self, x: ir.Value, sizes: list[int]) -> list[ir.Value]:
        """x [B, H, …] cut along the heads."""
        return self.op.split(x, sizes, axis=1) if len(sizes) > 1 else [x]
