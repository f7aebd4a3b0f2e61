"""Multiply-adds of a step, counted as the models compute them.

A = H·K is the width of all heads together. Softmax, look-ups and norms are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import FORM_FACTS, Form
from trainer.model.config import ModelConfig


def step_multiply_adds(model: ModelConfig, rule: MemoryRule, form: Form, segment: int) -> int:
    """For one step of T tokens with memory; divide by T for one token.

        each layer   D A (2 T + 2 N) + 2 D F T + T A (2 J + R + 2 P)
        output       T D V

    N: tokens whose keys and values are projected, T, or M + T for `hidden`. J: key columns, each scored and
    summed whether visible or not, S for the ring and M + T otherwise. R: rows of the position table. P:
    persistent vectors of a head.
    """
    facts = FORM_FACTS[form]
    D, A, F, T = model.d_model, model.heads * model.head_dim, model.d_ff, segment
    projected = T + (rule.mem_len if facts.holds == "hidden" else 0)
    columns = rule.slots if facts.circular else rule.mem_len + T
    pairs = 2 * columns + rule.position_rows + 2 * model.persistent
    layer = D * A * (2 * T + 2 * projected) + 2 * D * F * T + T * A * pairs
    return model.layers * layer + T * D * model.vocab_size


def training_multiply_adds(
    model: ModelConfig, rule: MemoryRule, batch: int, lengths: Sequence[int] | None = None
) -> int:
    """For one training step of all lanes: three forward passes, because a backward pass costs about two.

    The memory is hidden states, whose keys and values every step projects. Of an adaptive softmax only
    the head is counted. lengths: for each layer, the most tokens of the memory that it reads; None for all.
    """

    def of_layer(mem_len: int) -> int:
        read = dataclasses.replace(rule, mem_len=min(mem_len, rule.mem_len))
        return step_multiply_adds(dataclasses.replace(model, layers=1), read, "hidden", rule.segment)

    step = step_multiply_adds(with_head(model), rule, "hidden", rule.segment)
    for length in lengths or ():
        step -= of_layer(rule.mem_len) - of_layer(length)  # the output layer is in both
    return 3 * batch * step


def with_head(model: ModelConfig) -> ModelConfig:
    """The model with only the head of its softmax: the first cluster, and a column for each other one."""
    cutoffs = model.vocabulary.cutoffs
    if not cutoffs:
        return model
    plain = dataclasses.replace(model.vocabulary, cutoffs=(), tie_projections=())
    return dataclasses.replace(model, vocabulary=plain, vocab_size=cutoffs[0] + len(cutoffs))
