"""Learning rates and lengths by step, against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from trainer.run.config import TrainConfig
from trainer.training.schedule import learning_rate, training_rule

Make = Callable[..., TrainConfig]


def rates(make_config: Make, **changes: Any) -> list[float]:
    config = make_config(steps=12, lr=0.4, **changes)
    return [learning_rate(config, step) for step in range(12)]


def test_cosine_after_a_warm_up(make_config: Make) -> None:
    by_step = rates(make_config, warmup_steps=4)
    assert by_step[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])  # warm-up ends, the cosine begins
    assert by_step[8] == pytest.approx(0.2)  # half-way down
    assert by_step[11] == pytest.approx(0.2 * (1 - 0.9238795325), abs=1e-9)  # cos(7 pi / 8)
    assert rates(make_config, warmup_steps=0)[0] == 0.4
    assert rates(make_config, warmup_steps=12)[11] == pytest.approx(0.4)


def test_a_cosine_falls_to_the_smallest_rate(make_config: Make) -> None:
    by_step = rates(make_config, warmup_steps=0, min_lr=0.1)
    assert by_step[6] == pytest.approx(0.25)
    assert by_step[11] == pytest.approx(0.1 + 0.15 * (1 + math.cos(math.pi * 11 / 12)))


def test_constant(make_config: Make) -> None:
    assert rates(make_config, warmup_steps=2, schedule="constant") == pytest.approx([0.2, *[0.4] * 11])


def test_fine_tuning_has_a_tenth_of_the_rate(make_config: Make) -> None:
    constant = rates(make_config, warmup_steps=0, schedule="constant", fine_tune_steps=3)
    assert constant == pytest.approx([*[0.4] * 9, *[0.04] * 3])
    cosine, plain = (rates(make_config, warmup_steps=0, min_lr=0.1, fine_tune_steps=n) for n in (3, 0))
    assert cosine == pytest.approx([*plain[:9], *(rate / 10 for rate in plain[9:])])
    longer = make_config(steps=12, warmup_steps=0, schedule="constant", fine_tune_steps=3).with_steps(40)
    assert [learning_rate(longer, step) for step in (29, 30)] == pytest.approx(
        [longer.optimizer.lr, longer.optimizer.lr / 10]
    )


def test_inverse_square_root_continues_the_warm_up(make_config: Make) -> None:
    by_step = rates(make_config, warmup_steps=3, schedule="inverse-sqrt", min_lr=0.21)
    assert by_step[:3] == pytest.approx([0.4 / 3, 0.8 / 3, 0.4])
    assert by_step[3:7] == pytest.approx([0.4 * math.sqrt(3 / n) for n in (4, 5, 6, 7)])
    assert by_step[11] == 0.21
    assert rates(make_config, warmup_steps=0, schedule="inverse-sqrt")[3] == pytest.approx(0.2)


def test_plateau(make_config: Make) -> None:
    recipe = {"schedule": "plateau", "plateau_decay": 0.25, "min_lr": 0.01, "warmup_steps": 2}
    config = make_config(steps=12, lr=0.4, **recipe)

    assert [learning_rate(config, 5, decays=n) for n in range(4)] == pytest.approx([0.4, 0.1, 0.025, 0.01])
    assert learning_rate(config, 0, decays=1) == pytest.approx(0.2)


def test_lengths_change_at_their_steps_and_nothing_else_does(make_config: Make) -> None:
    config = make_config(steps=12, mem_len_schedule=((3, 16), (6, 4)), segment_schedule=((0, 2), (6, 5)))
    lengths = [
        (training_rule(config, step).mem_len, training_rule(config, step).segment)
        for step in (0, 2, 3, 5, 6, 11)
    ]
    assert lengths == [(8, 2), (8, 2), (16, 2), (16, 2), (4, 5), (4, 5)]
    assert training_rule(config, 11).mask == config.training.mask
    assert (config.longest.mem_len, config.longest.segment) == (16, 8)
    assert training_rule(make_config(), 3) == make_config().training
