"""Plain and adaptive softmax: against the definition written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer.model.config import ModelConfig, VocabularyConfig
from trainer.model.vocabulary import Vocabulary

SIZES: dict[str, Any] = {"layers": 1, "d_model": 8, "heads": 1, "head_dim": 2, "d_ff": 2, "vocab_size": 11}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, projected": {"d_embed": 6},
    "plain, untied": {"tie_weights": False, "d_embed": 6, "tie_projections": (False,)},
    "one width": {"cutoffs": (3, 7)},
    "narrowing": {"cutoffs": (3, 7), "div_val": 2},
    "some projections tied": {"cutoffs": (3, 7), "div_val": 2, "tie_projections": (False, True, False)},
    "untied": {
        "cutoffs": (5,),
        "div_val": 4,
        "tie_weights": False,
        "tie_projections": (False, False),
        "scale": False,
    },
}


def build(kind: str) -> Vocabulary:
    vocabulary = Vocabulary(ModelConfig(**SIZES, vocabulary=VocabularyConfig(**KINDS[kind]))).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in vocabulary.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return vocabulary


def definition(vocabulary: Vocabulary, kind: str, hidden: torch.Tensor, token: int) -> float:
    """log p(token | hidden [D]), one table row and one cluster at a time."""
    given = {"cutoffs": (), "tie_weights": True, "tie_projections": (), "div_val": 1, "d_embed": 8} | KINDS[
        kind
    ]
    ends = [0, *given["cutoffs"], 11]
    cluster = next(i for i in range(len(ends) - 1) if token < ends[i + 1])
    names = dict(vocabulary.named_parameters())

    def logits(i: int) -> list[float]:
        table = names[f"{'table' if given['tie_weights'] else 'output_table'}.{i}"]
        projected = given["div_val"] > 1 or given["d_embed"] != 8
        tied = not given["tie_projections"] or given["tie_projections"][i]
        narrow = (
            hidden @ names[f"{'projection' if tied else 'output_projection'}.{i}"] if projected else hidden
        )
        own = [
            (row @ narrow + bias).item() for row, bias in zip(table, names[f"output_bias.{i}"], strict=True)
        ]
        if i == 0 and len(ends) > 2:
            rows = zip(names["cluster_table"], names["cluster_bias"], strict=True)
            own += [(row @ narrow + bias).item() for row, bias in rows]
        return own

    def log_softmax(values: list[float], at: int) -> float:
        return values[at] - math.log(sum(math.exp(value) for value in values))

    if cluster == 0:
        return log_softmax(logits(0), token)
    return log_softmax(logits(0), ends[1] + cluster - 1) + log_softmax(logits(cluster), token - ends[cluster])


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_to_a_probability_equal_the_definition(kind: str) -> None:
    vocabulary = build(kind)
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = vocabulary.logits(hidden)
    if "cutoffs" not in KINDS[kind]:  # an adaptive softmax returns log-probabilities
        whole = whole.log_softmax(-1)
    for row in range(3):
        for token in range(11):
            expected = definition(vocabulary, kind, hidden[row], token)
            assert whole[row, token].item() == pytest.approx(expected, abs=1e-10)
            assert vocabulary.log_prob(hidden[row : row + 1], torch.tensor([token])).item() == pytest.approx(
                expected, abs=1e-10
            )
    assert whole.exp().sum(-1).tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_table_rows_projected_and_scaled(kind: str) -> None:
    vocabulary = build(kind)
    ends = [0, *KINDS[kind].get("cutoffs", ()), 11]
    scale = math.sqrt(8) if KINDS[kind].get("scale", True) else 1.0
    embedded = vocabulary.embed(torch.arange(11).view(1, 11))[0]
    for token in range(11):
        cluster = next(i for i in range(len(ends) - 1) if token < ends[i + 1])
        row = vocabulary.table[str(cluster)][token - ends[cluster]]
        if str(cluster) in vocabulary.projection:
            row = vocabulary.projection[str(cluster)] @ row
        torch.testing.assert_close(embedded[token], row * scale)


def test_gradients_reach_every_parameter_and_agree_between_the_two_ways() -> None:
    vocabulary = build("some projections tied")
    tokens = torch.tensor([0, 2, 4, 8, 10, 3])
    losses = []
    for way in ("logits", "log_prob"):
        vocabulary.zero_grad()
        hidden = 0.1 * vocabulary.embed(tokens)
        scores = vocabulary.log_prob(hidden, tokens)
        if way == "logits":
            scores = vocabulary.logits(hidden).gather(1, tokens[:, None])[:, 0]
        scores.mean().backward()
        losses.append({name: parameter.grad.clone() for name, parameter in vocabulary.named_parameters()})
    for name in losses[0]:
        torch.testing.assert_close(losses[0][name], losses[1][name])
        assert losses[0][name].abs().max() > 1e-6, name


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_log_probabilities_are_fp32(kind: str) -> None:
    vocabulary, hidden = build(kind).float(), torch.randn(11, 8)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, logits = vocabulary.log_prob(hidden, torch.arange(11)), vocabulary.logits(hidden)
    assert log_probs.dtype == logits.dtype == torch.float32
