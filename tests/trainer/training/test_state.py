"""One step of training, in every precision, in parts, and with lengths that change on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtimes.base.errors import ConfigError, UserError
from runtimes.contract.rule import InitialMemory, MemoryRule
from tests.nightly import matrix
from trainer.run.config import Averaging, TrainConfig
from trainer.training.objective import Objective
from trainer.training.parallel import Ranks
from trainer.training.schedule import first_token
from trainer.training.state import Training

Make = Callable[..., TrainConfig]
Started = Callable[[TrainConfig], tuple[Training, np.ndarray]]


def losses(training: Training, tokens_BN: np.ndarray, steps: int) -> list[float]:
    return [float(training.advance(tokens_BN).nats) for _ in range(steps)]


@pytest.mark.parametrize(("parts", "optimizer"), matrix((2, 4), ("adam", "adagrad"), together=1))
def test_accumulated_parts_train_as_the_whole_batch(
    make_config: Make, started: Started, parts: int, optimizer: str
) -> None:
    whole, tokens_BN = started(make_config(optimizer=optimizer))
    split, _ = started(make_config(optimizer=optimizer, accumulate=parts))
    assert losses(split, tokens_BN, 12) == pytest.approx(losses(whole, tokens_BN, 12), abs=1e-5)
    assert [len(memory[0]) for memory in split.memories] == [4 // parts] * parts
    for layer, tensor in enumerate(whole.memories[0]):
        torch.testing.assert_close(
            torch.cat([memory[layer] for memory in split.memories]), tensor, rtol=1e-3, atol=1e-4
        )


def test_a_batch_that_cannot_be_shared_out_is_refused(make_config: Make) -> None:
    with pytest.raises(ConfigError, match=r"batch is 4 with 3 processes; expected a multiple of 3"):
        Training.start(make_config(), Ranks(rank=0, count=3))
    with pytest.raises(
        ConfigError, match=r"batch is 4 with 2 processes and accumulate 4; expected a multiple of 8"
    ):
        Training.start(make_config(accumulate=4), Ranks(rank=0, count=2))


@pytest.mark.parametrize("initial_memory", ["masked", "zeros"])
def test_memory_is_emptied_every_so_many_steps(
    make_config: Make, started: Started, initial_memory: InitialMemory
) -> None:
    rule = MemoryRule(mem_len=8, segment=4, initial_memory=initial_memory)
    training, tokens_BN = started(make_config(training=rule, empty_memory_schedule=((3, 3),)))
    carried, _ = started(make_config(training=rule))
    for step in range(7):
        fresh, _ = started(make_config(training=rule))  # a stream that begins here
        fresh.model.load_state_dict(training.model.state_dict())
        fresh.at = training.at
        begins = float(fresh.advance(tokens_BN).nats)
        carried.model.load_state_dict(training.model.state_dict())
        goes_on = float(carried.advance(tokens_BN).nats)
        mine = float(training.advance(tokens_BN).nats)
        assert (mine == begins) is (step % 3 == 0)
        if step < 5:  # then its memory is full again
            assert (mine == goes_on) is (step < 3)
        assert training.at == carried.at == 4 * (step + 1)  # no token is left out
    halved = make_config(steps=40, empty_memory_schedule=((30, 5),)).with_steps(20)
    assert halved.empty_memory_schedule == ((15, 5),)


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_half_precision_trains_nearly_as_fp32(make_config: Make, started: Started, autocast: str) -> None:
    exact, tokens_BN = started(make_config())
    half, _ = started(make_config(autocast=autocast))
    true, near = losses(exact, tokens_BN, 20), losses(half, tokens_BN, 20)
    assert near != true, "it was not fp32"
    assert near == pytest.approx(true, abs=0.1)  # fp16 may leave out a step while it finds its scale
    assert near[-1] < near[0] - 0.2
    assert {tensor.dtype for tensor in [*half.model.parameters(), *half.memories[0]]} == {torch.float32}


def test_fp16_skips_an_overflowing_step_and_lowers_its_scale(make_config: Make, started: Started) -> None:
    training, tokens_BN = started(make_config(autocast="fp16"))
    training.scaler.load_state_dict(training.scaler.state_dict() | {"scale": 2.0**40})
    before = training.model.vocabulary.table["0"].detach().clone()
    training.advance(tokens_BN)
    assert torch.equal(training.model.vocabulary.table["0"], before)
    assert training.scaler.get_scale() == 2.0**39
    losses(training, tokens_BN, 40)
    assert not torch.equal(training.model.vocabulary.table["0"], before)


def test_fp16_gradients_that_no_scale_mends_end_the_run(make_config: Make, started: Started) -> None:
    training, tokens_BN = started(make_config(autocast="fp16", steps=100))
    training.model.vocabulary.output_bias["0"].register_hook(lambda gradient: gradient * math.nan)
    losses(training, tokens_BN, 17)  # 2^16 halved to 1/2
    training.refuse_not_finite()
    losses(training, tokens_BN, 3)  # the first step that failed is named, not the last
    with pytest.raises(UserError, match=r"gradient became nan at step 18"):
        training.refuse_not_finite()
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


class Feed:
    """What the model is given, step by step."""

    def __init__(self, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[Tensor] = []
        self.positions: list[int] = []
        layers = training.model.inputs_and_outputs

        def spy(
            tokens: Tensor, memory: list[Tensor], positions: Tensor, rule: MemoryRule, **options: Any
        ) -> Any:
            assert tokens.shape[1] == rule.segment
            assert {part.shape[1] for part in memory} == {rule.mem_len}
            assert positions.shape == (1,)  # all lanes are at the same position
            self.tokens.append(tokens)
            self.positions.append(int(positions[0]))
            return layers(tokens, memory, positions, rule, **options)

        monkeypatch.setattr(training.model, "inputs_and_outputs", spy)


def test_a_segment_schedule_reads_on_where_the_last_segment_ended(
    make_config: Make, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, tokens_BN = started(make_config(segment_schedule=((2, 3), (5, 12))))
    feed = Feed(training, monkeypatch)
    losses(training, tokens_BN, 7)
    assert [piece.shape[1] for piece in feed.tokens] == [8, 8, 3, 3, 3, 12, 12]
    assert feed.positions == [0, 8, 16, 19, 22, 25, 37]
    assert np.array_equal(torch.cat(feed.tokens, dim=1).numpy(), tokens_BN[:, :49])


def test_lanes_wrap_around_where_the_next_segment_does_not_fit(
    make_config: Make, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, tokens_BN = started(make_config(batch=90, segment_schedule=((3, 20),)))
    assert tokens_BN.shape[1] == 40
    feed = Feed(training, monkeypatch)
    losses(training, tokens_BN, 6)
    assert feed.positions == [0, 8, 16, 0, 0, 0]  # 24 + 20 and 20 + 20 leave no target for the last token
    starts = [first_token(training.config, epoch, length=40, segment=20) for epoch in (1, 2, 3)]
    assert len({0, *starts}) > 2
    for tokens, start in zip(feed.tokens[3:], starts, strict=True):
        assert np.array_equal(tokens.numpy(), tokens_BN[:, start : start + 20])


@pytest.mark.parametrize("initial_memory", ["masked", "zeros"])
def test_growing_memory_keeps_what_it_held(
    make_config: Make, started: Started, monkeypatch: pytest.MonkeyPatch, initial_memory: str
) -> None:
    rule = MemoryRule(mem_len=8, segment=4, mask="full", initial_memory=initial_memory)
    short, tokens_BN = started(make_config(training=rule))
    grown, _ = started(make_config(training=rule, mem_len_schedule=((5, 20),)))
    assert losses(grown, tokens_BN, 5) == losses(short, tokens_BN, 5)
    held = [tensor.clone() for tensor in grown.memories[0]]
    assert [tensor.shape[1] for tensor in held] == [20, 20]
    for tensor, before in zip(held, short.memories[0], strict=True):
        assert torch.equal(tensor[:, 12:], before)
    if initial_memory == "masked":  # 8 tokens are all that can be seen, as without the growth
        grown.memories = [[torch.cat([tensor[:, :12] + 1e3, tensor[:, 12:]], dim=1) for tensor in held]]
        assert losses(grown, tokens_BN, 1) == pytest.approx(losses(short, tokens_BN, 1), abs=1e-6)
    else:  # zeros that lie before the beginning, whatever the slots hold
        other, _ = started(make_config(training=rule, mem_len_schedule=((5, 20),)))
        losses(other, tokens_BN, 5)
        grown.memories = [[torch.cat([tensor[:, :12] + 1e3, tensor[:, 12:]], dim=1) for tensor in held]]
        assert losses(grown, tokens_BN, 1) == losses(other, tokens_BN, 1)
    feed = Feed(grown, monkeypatch)
    losses(grown, tokens_BN, 3)
    assert feed.positions == [12, 16, 20]  # eight were remembered, then every segment adds four
    assert all(tensor.abs().max() > 0 for tensor in grown.memories[0])


def test_memory_that_shrinks_keeps_its_newest_part(
    make_config: Make, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, tokens_BN = started(make_config())
    cut, _ = started(make_config(mem_len_schedule=((4, 3), (6, 0))))
    assert losses(cut, tokens_BN, 4) == losses(long, tokens_BN, 4)
    for tensor, whole in zip(cut.memories[0], long.memories[0], strict=True):
        assert torch.equal(tensor, whole[:, -3:])
    feed = Feed(cut, monkeypatch)
    losses(cut, tokens_BN, 4)
    assert feed.positions == [32, 40, 48, 56]


def test_the_average_is_the_mean_since_its_start(make_config: Make, started: Started) -> None:
    training, tokens_BN = started(make_config(averaging=Averaging(start_step=3)))
    seen = []
    for step in range(1, 9):
        training.advance(tokens_BN)
        assert (training.weights is training.model) == (step <= 3)
        if step > 3:
            seen.append({name: tensor.clone() for name, tensor in training.model.state_dict().items()})
    for name, average in training.weights.state_dict().items():
        mean = torch.stack([weights[name].double() for weights in seen]).mean(dim=0)
        torch.testing.assert_close(average.double(), mean, rtol=1e-5, atol=1e-6)


def test_progress_is_the_share_of_the_steps_done(
    make_config: Make, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, tokens_BN = started(make_config(steps=4, accumulate=2))
    seen, forward = [], Objective.forward

    def spy(*arguments: Any, progress: float, **options: Any) -> Any:
        seen.append(progress)
        return forward(*arguments, progress=progress, **options)

    monkeypatch.setattr(Objective, "forward", spy)
    losses(training, tokens_BN, 4)
    assert seen == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
