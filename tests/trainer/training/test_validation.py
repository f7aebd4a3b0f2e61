"""The score of a validation, and what follows from a history of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes.contract.vocabulary import IdsVocab
from runtimes.tasks.evaluate import evaluate
from tests.architectures import ARCHITECTURES, RULE
from tests.nightly import every
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel
from trainer.run.config import Averaging, TrainConfig
from trainer.run.history import Validation, best
from trainer.run.session import TorchSession
from trainer.training.parallel import Ranks
from trainer.training.validation import average_start, decays, out_of_patience, validate

SIZES = {"layers": 2, "d_model": 16, "heads": 2, "head_dim": 6, "d_ff": 20}


def history(*scores: float) -> list[Validation]:
    return [
        Validation(step=10 * number, bits_per_token=score) for number, score in enumerate(scores, start=1)
    ]


def random_model(config: ModelConfig) -> LanguageModel:
    """Weights so large that a wrong mask or position shows."""
    torch.manual_seed(0)
    model = LanguageModel(config).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for span in model.spans():
        torch.nn.init.uniform_(span.share, 0, 0.5)
    return model


KINDS = (
    "transformer-xl",
    "adaptive-softmax",
    "adaptive-softmax-wide-first",
    "adaptive-span",
    "adaptive-span-full",
    "adaptive-span-epsilon",
    "all-attention",
    "per-layer-from-segment-end",
)


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_validation_equals_evaluate_in_as_many_lanes(kind: str) -> None:
    """Alone, in parts, and shared out to processes; also with fewer tokens than lanes."""
    options = {**SIZES, **ARCHITECTURES[kind.replace("-epsilon", "")]}
    rule = options.pop("rule", RULE)
    if kind.endswith("epsilon"):
        options["span"] = dataclasses.replace(options["span"], epsilon=1e-8)
    model = random_model(ModelConfig(**options | {"vocab_size": 90, "dropout": 0.3}))
    # Training has longer segments, in which a validation under the same-length mask is computed too.
    training = dataclasses.replace(rule, segment=11)
    recipe = {"model": model.config, "training": training, "evaluation": rule}
    tokens = np.random.default_rng(0).integers(0, 90, 250)

    def expected(tokens: np.ndarray) -> float:
        session = TorchSession(model.eval(), IdsVocab(90), rule, weights="test")
        score = evaluate(session, tokens, lanes=min(6, len(tokens) - 1))
        model.train()
        return score.bits_per_token

    for parts in (1, 2, 3, 6):
        config = TrainConfig(**recipe, batch=6, accumulate=parts)
        assert validate(model, config, tokens) == pytest.approx(expected(tokens), abs=1e-5)
    assert validate(model, config, tokens, limit=100) == pytest.approx(expected(tokens[:101]), abs=1e-5)
    assert validate(model, config, tokens[:4]) == pytest.approx(expected(tokens[:4]), abs=1e-5)
    assert model.training
    for text in (tokens, tokens[:3]):  # with two tokens to predict, the third process has none of its own
        shares = [validate(model, config, text, Share(rank=rank, count=3)) for rank in range(3)]
        assert sum(shares) == pytest.approx(expected(text), abs=1e-5)


class Share(Ranks):
    """One of several processes, without the others: its own part of a sum."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def test_the_best_is_the_first_of_the_lowest() -> None:
    assert best([]) is None
    assert best(history(3, 2, 4, 2)) == Validation(step=20, bits_per_token=2)


@pytest.mark.parametrize(
    ("scores", "patience", "ends"),
    [
        ((), 1, False),
        ((3, 2), 1, False),
        ((3, 3), 1, True),
        ((3, 4, 5), 2, True),
        ((3, 4, 2, 5), 2, False),
        ((3, 4, 5, 6, 7), 0, False),
    ],
)
def test_patience(scores: tuple[float, ...], patience: int, ends: bool) -> None:
    assert out_of_patience(history(*scores), patience) == ends


@settings(max_examples=60)
@given(scores=st.lists(st.integers(1, 9), max_size=20), patience=st.integers(0, 4))
def test_decays_are_those_of_the_librarys_plateau_schedule(scores: list[int], patience: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    library = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=patience, threshold=0.0, eps=0.0
    )
    for score in scores:
        library.step(score)
    assert 0.5 ** decays(history(*scores), patience) == optimizer.param_groups[0]["lr"]


def test_the_average_starts_at_its_step_or_trigger() -> None:
    assert average_start(Averaging(start_step=7), []) == 7
    trigger = Averaging(patience=2)
    # 4 is no worse than 5, the only one more than two before.
    assert average_start(trigger, history(5, 4, 3, 4)) is None
    assert average_start(trigger, history(5, 3, 4, 4)) is None
    # Worse than 3, which is three validations before.
    assert average_start(trigger, history(5, 3, 4, 4, 3.5)) == 50
    assert average_start(trigger, history(5, 3, 4, 4, 3.5, 1, 9)) == 50  # and stays so
    assert average_start(Averaging(patience=0), history(3, 4)) == 20
