"""Keys and values for memory give the answers of hidden states for memory, for every architecture and
rule."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from runtimes.contract.rule import MemoryRule
from tests.architectures import ARCHITECTURES, RULE
from tests.nightly import matrix
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel
from trainer.model.projected import ProjectedModel

RULES = {
    "as it is": {},
    "zeros": {"initial_memory": "zeros"},
    "full, clamped": {"mask": "full", "clamp_len": 5},
    "no memory": {"mem_len": 0},
}
SIZES = {"layers": 2, "d_model": 16, "heads": 2, "head_dim": 6, "d_ff": 20, "vocab_size": 50}
KINDS = {"plain": {}, "pre-norm": {"pre_norm": True}, "untied": {"tie_biases": False}, **ARCHITECTURES}


@pytest.mark.parametrize(("kind", "rule"), matrix(tuple(KINDS), tuple(RULES), together=1))
def test_both_memories_give_the_same_answers(kind: str, rule: str) -> None:
    """In segments of several lengths, through more than a memory.

    Rows begin with padding, one starts again on the way.
    """
    options = {**SIZES, **KINDS[kind]}
    chosen: MemoryRule = dataclasses.replace(options.pop("rule", RULE), **RULES[rule])
    options["vocab_size"] = max(50, *options["vocabulary"].cutoffs, 0) + 30 if "vocabulary" in options else 50
    options.pop("shares", None)
    config = ModelConfig(**options)
    torch.manual_seed(0)
    model = LanguageModel(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for span in model.spans():
        torch.nn.init.uniform_(span.share, 0, 1)
    projected = ProjectedModel(model, chosen)
    hidden = model.start(2, chosen)
    pairs = projected.start(2)
    positions = torch.tensor([0, -3])
    for number, length in enumerate([8, 1, 7, 3, 8, 5]):
        tokens = torch.randint(0, config.vocab_size, (2, length))
        if number == 4:
            positions[1] = 0
        with torch.inference_mode():
            outputs, hidden = model.layers(tokens, hidden, positions, chosen)
        answer, pairs = projected.step(tokens, pairs, positions)
        padding = 3 if number == 0 else 0
        assert (answer[0] - outputs[-1][0]).abs().max() < 1e-9
        assert (answer[1, padding:] - outputs[-1][1, padding:]).abs().max() < 1e-9
        positions = positions + length


def test_pytorch_compiles_the_step() -> None:
    torch.manual_seed(0)
    projected = ProjectedModel(LanguageModel(ModelConfig(**SIZES)).eval(), RULE)
    compiled = torch.compile(projected.step, backend="aot_eager", dynamic=False)
    given = torch.arange(3)[None], projected.start(1), torch.tensor([5])
    expected, _ = projected.step(*given)
    found, _ = compiled(*given)
    assert (found - expected).abs().max() < 1e-6
