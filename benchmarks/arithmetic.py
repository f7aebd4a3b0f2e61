"""Multiply-adds and bytes of a step, counted as the graphs compute them. `trainer.model.arithmetic` has more.

A = H·K is the width of all heads together. Softmax, look-ups, norms and the cost of starting an operator are
left out; they weigh most where models are narrow and steps short, so small sizes measure less than is
predicted.
"""

from __future__ import annotations

from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import FORM_FACTS, Form
from trainer.model.config import ModelConfig

FLOAT = 4  # bytes


def needed_multiply_adds(model: ModelConfig, rule: MemoryRule, segment: int) -> int:
    """What a step of T tokens cannot do without, well into a stream: of the scores only those that the mask
    lets through.

        each layer   D A 4 T + 2 D F T + 3 A Σ_t seen(t)
        output       T D V

    3 A for each key that a token sees: the content's product, the position's and the values'.
    """
    D = model.d_model
    A = model.heads * model.head_dim
    F = model.d_ff
    T = segment
    seen = T * (rule.mem_len + 1 - rule.nearest) + (T * (T - 1) // 2 if rule.mask == "full" else 0)
    return model.layers * (D * A * 4 * T + 2 * D * F * T + 3 * A * seen) + T * D * model.vocab_size


def step_bytes(model: ModelConfig, rule: MemoryRule, form: Form, *, streams: int = 1) -> int:
    """Bytes that a step of one token for each stream cannot avoid reading: weights, visible memory, position
    tables, all fp32.

    each layer   4 D A + 2 D F + F + 5 D + 2 A weights, A R of the position table, and memory:
                 2 A (M + 1) keys and values, or D M hidden states
    output       D V + V
    """
    D = model.d_model
    A = model.heads * model.head_dim
    F = model.d_ff
    weights = 4 * D * A + 2 * D * F + F + 5 * D + 2 * A
    memory = D * rule.mem_len if FORM_FACTS[form].holds == "hidden" else 2 * A * (rule.mem_len + 1)
    layer = weights + A * rule.position_rows + streams * memory
    return FLOAT * (model.layers * layer + D * model.vocab_size + model.vocab_size)
