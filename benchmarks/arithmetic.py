"""Multiply-adds and bytes of a step, counted as the graphs compute them, and the ratio that follows from
them.

A = H·K is the width of all heads together. Softmax, look-ups, norms and the cost of starting an operator are
left out; they weigh most where models are narrow and steps short, so small sizes measure less than is
predicted.
"""

from __future__ import annotations

from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import Form
from trainer.model.arithmetic import step_multiply_adds, training_multiply_adds, with_head
from trainer.model.config import ModelConfig
from trainer.run.config import TrainConfig

__all__ = [
    "needed_multiply_adds",
    "predicted_ratio",
    "query_blocks",
    "step_bytes",
    "step_multiply_adds",
    "training_multiply_adds",
    "validation_multiply_adds",
    "validation_share",
    "window_multiply_adds",
]
BLOCK = 256  # queries that a recomputed window computes together; faster than 128, 512 and all at once
FLOAT = 4  # bytes


def query_blocks(window: int) -> list[tuple[int, int]]:
    """(first, end) of each block of queries; the block's scores are computed against keys 0 … end - 1."""
    return [(first, min(first + BLOCK, window)) for first in range(0, window, BLOCK)]


def window_multiply_adds(model: ModelConfig, window: int) -> int:
    """For one prediction of the vanilla model over a window of W tokens, all recomputed.

        layers but the last   W (4 D A + 2 D F) + 2 A Σ_blocks (end - first) end
        last layer            W 2 D A (keys, values) + 2 D A (query, out) + 2 D F + 2 A W
        output                D V

    The sum over blocks is W² for one block and nears W²/2 for many: keys after a block are never touched.
    The last layer answers only for the last position.
    """
    D = model.d_model
    A = model.heads * model.head_dim
    F = model.d_ff
    pairs = sum((end - first) * end for first, end in query_blocks(window))
    full = window * (4 * D * A + 2 * D * F) + 2 * A * pairs
    last = window * 2 * D * A + 2 * D * A + 2 * D * F + 2 * A * window
    return (model.layers - 1) * full + last + D * model.vocab_size


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
    memory = D * rule.mem_len if form == "hidden" else 2 * A * (rule.mem_len + 1)
    layer = weights + A * rule.position_rows + streams * memory
    return FLOAT * (model.layers * layer + D * model.vocab_size + model.vocab_size)


def predicted_ratio(model: ModelConfig, rule: MemoryRule, window: int) -> float:
    """Multiply-adds of a token by a recomputed window over those by ring segments of rule.segment tokens."""
    return (
        window_multiply_adds(model, window)
        * rule.segment
        / step_multiply_adds(model, rule, "ring", rule.segment)
    )


def validation_multiply_adds(config: TrainConfig, tokens: int) -> int:
    """For a validation of so many tokens, over projected keys and values."""
    rule = config.validation
    return tokens * step_multiply_adds(with_head(config.model), rule, "shift", rule.segment) // rule.segment


def validation_share(config: TrainConfig, held_out: int) -> float:
    """Multiply-adds of all validations of a run over those of its training steps.

    held_out: tokens of the held-out text. The last of the scores is that of all of them.
    """
    each = min(held_out, config.validate_tokens or held_out)
    count = -(-config.steps // config.validate_every)
    scored = count * each + (held_out if each < held_out else 0)
    step = training_multiply_adds(config.model, config.training, config.batch)
    return validation_multiply_adds(config, scored) / (config.steps * step)
