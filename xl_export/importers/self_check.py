"""Compares the fast attention of an imported model with the naive attention before its run is written.

The comparison finds weights that float32 arithmetic cannot hold, and terms that the two forms of attention
read differently. It cannot find a rule of the other project that both forms misread in the same way.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MemoryRule
from trainer.model.attention import relative_attention
from trainer.model.model import LanguageModel
from trainer.model.naive import naive_attention
from xl_export.importers.shared.checkpoint import Checkpoint

# In nats, for any one token. The rounding of float32 stayed below 1e-4 in every model that was measured.
TOLERANCE = 1e-3
# The largest sizes, because the naive form is slow.
MEMORY = 10
SEGMENT = 4
SEGMENTS = 4
BATCH = 2


def check_import(checkpoint: Checkpoint) -> float:
    """Returns the largest difference, in nats, between fast float32 and naive float64 attention.

    Both score the same random tokens with a memory that is shortened to 10 tokens. The naive model computes
    all probabilities, and the fast one computes only the targets' probabilities. Raises ArtefactError if one
    token differs by more than 1e-3.
    """
    rule = dataclasses.replace(
        checkpoint.rule,
        mem_len=min(checkpoint.rule.mem_len, MEMORY),
        segment=min(checkpoint.rule.segment, SEGMENT),
    )
    with torch.device("meta"):
        model = LanguageModel(checkpoint.config)
    model.load_state_dict(checkpoint.tensors, assign=True)
    model.eval()
    shape = (BATCH, SEGMENTS * rule.segment)
    draw = torch.Generator().manual_seed(0)
    tokens, targets = (
        torch.randint(0, checkpoint.config.vocab_size, shape, generator=draw) for _ in range(2)
    )
    with torch.inference_mode():
        fast = _scores(model, rule, tokens, targets, naive=False).double()
        naive = _scores(model.double(), rule, tokens, targets, naive=True)
    difference = float((fast - naive).abs().max())
    if not difference <= TOLERANCE:  # NaN is refused too
        raise ArtefactError(
            f"{checkpoint.files['model']} was read, and its model is not computed alike in float32 and in "
            f"float64: one random token differs by {difference:.2g} nats, and at most {TOLERANCE} was "
            "expected; nothing was written: check that the file is whole, or report it with the output of "
            "--describe."
        )
    return difference


def _scores(
    model: LanguageModel, rule: MemoryRule, tokens: Tensor, targets: Tensor, *, naive: bool
) -> Tensor:
    """Returns log p(target) [B, N], computed segment by segment from an empty memory."""
    memory = model.start(len(tokens), rule)
    pieces = []
    for first in range(0, tokens.shape[1], rule.segment):
        part = slice(first, first + rule.segment)
        attention = naive_attention if naive else relative_attention
        positions = torch.full((len(tokens),), first)
        outputs, memory = model.layers(tokens[:, part], memory, positions, rule, attention=attention)
        hidden = outputs[-1].flatten(0, 1)
        wanted = targets[:, part].flatten()
        if naive:
            log_probs = model.vocabulary.logits(hidden).log_softmax(-1).gather(1, wanted[:, None])
        else:
            log_probs = model.vocabulary.log_prob(hidden, wanted)
        pieces.append(log_probs.view(len(tokens), -1))
    return torch.cat(pieces, dim=1)
