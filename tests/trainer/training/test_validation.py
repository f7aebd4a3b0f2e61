"""What follows from a history of validations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes.base.errors import ConfigError
from trainer.run.config import Averaging
from trainer.run.history import Validation, best
from trainer.training.validation import average_start, decays, out_of_patience


def history(*scores: float) -> list[Validation]:
    return [
        Validation(step=10 * number, bits_per_token=score) for number, score in enumerate(scores, start=1)
    ]


def test_the_best_is_the_first_of_the_lowest() -> None:
    assert best([]) is None
    assert best(history(3, 2, 4, 2)) == Validation(step=20, bits_per_token=2)


@pytest.mark.parametrize(
    ("scores", "patience", "ends"),
    [
        ((), 1, False),
        ((3,), 1, False),
        ((3, 2), 1, False),
        ((3, 3), 1, True),
        ((3, 4), 2, False),
        ((3, 4, 5), 2, True),
        ((3, 4, 2, 5), 2, False),
        ((3, 4, 5, 6, 7), 0, False),
    ],
)
def test_patience(scores: tuple[float, ...], patience: int, ends: bool) -> None:
    assert out_of_patience(history(*scores), patience) == ends


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scores=st.lists(st.integers(1, 9), max_size=20), patience=st.integers(0, 4))
def test_decays_are_those_of_the_librarys_plateau_schedule(scores: list[int], patience: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    library = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=patience, threshold=0.0, eps=0.0
    )
    for score in scores:
        library.step(score)
    assert 0.5 ** decays(history(*scores), patience) == optimizer.param_groups[0]["lr"]


def test_the_average_starts_where_it_is_told_to_or_at_the_first_validation_worse_than_older_ones() -> None:
    assert average_start(Averaging(start_step=7), []) == 7
    trigger = Averaging(patience=2)
    assert (
        average_start(trigger, history(5, 4, 3, 4)) is None
    )  # 4 is no worse than 5, the only one more than two before
    assert average_start(trigger, history(5, 3, 4, 4)) is None
    assert (
        average_start(trigger, history(5, 3, 4, 4, 3.5)) == 50
    )  # worse than 3, and 3 is three validations before
    assert average_start(trigger, history(5, 3, 4, 4, 3.5, 1, 9)) == 50  # and stays so
    assert average_start(Averaging(patience=0), history(3, 4)) == 20


@pytest.mark.parametrize(
    "settings", [{}, {"start_step": 1, "patience": 1}, {"start_step": -1}, {"patience": -1}]
)
def test_averaging_is_told_one_thing(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="averaging"):
        Averaging(**settings)
