"""The training loop: what it reads, computes, validates and writes. Resuming is in `test_resume.py`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runtimes.base.errors import TextError, UserError
from runtimes.contract.rule import MemoryRule
from tests.trainer.training.runs import state
from trainer.model.model import LanguageModel
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.training.loop import train
from trainer.training.schedule import first_token, learning_rate
from trainer.training.state import Training

Make = Callable[..., TrainConfig]
Started = Callable[[TrainConfig], tuple[Training, np.ndarray]]
GOLDEN = Path(__file__).with_name("golden_losses.json")


def metrics(run: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def test_the_loss_falls_well_below_that_of_guessing(make_config: Make, tmp_path: Path) -> None:
    run = train(make_config(steps=80, validate_every=80), tmp_path / "run", progress=False)
    losses, guess = metrics(run, "loss_nats"), math.log(load_run(run).vocab.size)
    assert losses[0] == pytest.approx(guess, abs=0.15)
    assert np.mean(losses[-10:]) < guess - 0.5
    assert metrics(run, "validation_bits_per_token")[-1] < (guess - 0.5) / math.log(2)


def test_golden_losses_of_twenty_steps(make_config: Make, tmp_path: Path) -> None:
    """A refactoring leaves every loss as it was. After a change that is meant to alter them, write them anew
    with

    REGENERATE=1 .venv/bin/python -m pytest tests/trainer/training/test_loop.py -k golden
    """
    losses = metrics(train(make_config(steps=20), tmp_path / "run", progress=False), "loss_nats")
    if os.environ.get("REGENERATE"):
        GOLDEN.write_text(json.dumps([round(value, 6) for value in losses], indent=1) + "\n")
    assert len(losses) == 20
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), abs=1e-4)


def test_the_seed_decides_the_run(make_config: Make, tmp_path: Path) -> None:
    runs = [
        train(make_config(steps=3, seed=seed, dropout=0.2), tmp_path / str(i), progress=False)
        for i, seed in enumerate((5, 5, 6))
    ]
    first, again, other = ((run / "model.safetensors").read_bytes() for run in runs)
    assert first == again != other


def test_lanes_wrap_around_with_positions_restarted(
    make_config: Make, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, tokens_BN = started(make_config(batch=90, warmup_steps=0))
    passes = (tokens_BN.shape[1] - 1) // 8
    assert passes == 4
    seen: list[tuple[Tensor, Tensor]] = []
    layers = training.model.inputs_and_outputs

    def spy(tokens: Tensor, memory: list[Tensor], positions: Tensor, rule: MemoryRule, **options: Any) -> Any:
        seen.append((tokens, positions))
        return layers(tokens, memory, positions, rule, **options)

    monkeypatch.setattr(training.model, "inputs_and_outputs", spy)
    random, starts = torch.get_rng_state(), []
    while len(starts) < 30:
        torch.set_rng_state(random)
        training.advance(tokens_BN)
        if training.position == 8:
            starts.append(training.at - 8)
    assert torch.equal(torch.get_rng_state(), random), "no global random number was drawn"
    at = np.cumsum([0] + [8] * len(seen))  # where a pass that never ends would be
    begins = [step for step, (_, positions) in enumerate(seen) if positions[0] == 0]
    for number, (first, last) in enumerate(itertools.pairwise(begins)):
        start = first_token(training.config, number, length=40, segment=8)
        assert start == starts[number]
        for step in range(first, last):
            tokens, positions = seen[step]
            assert positions.tolist() == [at[step - first]]  # of all lanes
            assert np.array_equal(tokens.numpy(), tokens_BN[:, start + at[step - first] :][:, :8])
        assert start + at[last - first] + 8 >= 40, "the pass went on as long as a segment fitted"
    assert starts[0] == 0
    assert set(starts) == set(range(8)), "segments of later passes begin anywhere"


@pytest.mark.parametrize("initial_memory", ["masked", "zeros"])
def test_a_new_pass_sees_no_old_memory(make_config: Make, started: Started, initial_memory: str) -> None:
    rule = MemoryRule(mem_len=8, segment=8, initial_memory=initial_memory)
    losses = []
    for garbage in (0.0, 1e3):
        training, tokens_BN = started(make_config(batch=90, training=rule))
        for _ in range(4):
            training.advance(tokens_BN)
        training.memories = [[tensor + garbage for tensor in memory] for memory in training.memories]
        losses.append([float(training.advance(tokens_BN).nats) for _ in range(2)])
    assert losses[0] == losses[1]


def test_memory_is_carried_from_step_to_step(make_config: Make, started: Started) -> None:
    training, tokens_BN = started(make_config())
    training.advance(tokens_BN)
    assert all(tensor.abs().max() > 0 for tensor in training.memories[0])
    memory = [tensor.clone() for tensor in training.memories[0]]
    carried = float(training.advance(tokens_BN).nats)
    other, _ = started(make_config())
    other.advance(tokens_BN)
    other.memories = [[tensor + 1 for tensor in memory]]
    assert float(other.advance(tokens_BN).nats) != carried


def test_the_scheduled_rate_is_the_one_applied_and_logged(
    make_config: Make, started: Started, tmp_path: Path
) -> None:
    config = make_config(steps=4, warmup_steps=2, lr=0.01)
    training, tokens_BN = started(config)
    before = training.model.vocabulary.output_bias["0"].detach().clone()
    training.advance(tokens_BN)
    moved = (training.model.vocabulary.output_bias["0"] - before).abs().max().item()
    assert moved == pytest.approx(0.005, rel=0.01)  # Adam's first step moves by the rate itself
    logged = metrics(train(config, tmp_path / "run", progress=False), "learning_rate")
    assert logged == [learning_rate(config, step) for step in range(4)]


def test_gradients_are_clipped_to_the_given_norm(make_config: Make, started: Started) -> None:
    training, tokens_BN = started(make_config(clip=0.001))
    training.advance(tokens_BN)
    norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in training.model.parameters()))
    assert norm == pytest.approx(0.001, rel=1e-3)


def test_validation_equals_an_independent_computation(make_config: Make, tmp_path: Path) -> None:
    run = train(make_config(steps=20, validate_every=8, dropout=0.3), tmp_path / "run", progress=False)
    logged = metrics(run, "validation_bits_per_token")
    assert len(logged) == 3  # steps 8, 16 and the last

    stored = load_run(run)
    tokens = stored.vocab.encode((run / "valid.txt").read_bytes())
    rule, nats = (
        dataclasses.replace(stored.config.evaluation, segment=1000),
        0.0,
    )  # same-length: one cut is as good as another
    bounds = [(len(tokens) - 1) * lane // 4 for lane in range(5)]
    for first, last in itertools.pairwise(bounds):
        lane = torch.from_numpy(tokens[first : last + 1])[None]
        with torch.no_grad():
            logits, _ = stored.model.eval()(
                lane[:, :-1], stored.model.start(1, rule), torch.tensor([0]), rule
            )
        nats += F.cross_entropy(logits[0].double(), lane[0, 1:], reduction="sum").item()
    assert logged[-1] == pytest.approx(nats / (len(tokens) - 1) / math.log(2), rel=1e-5)


def test_validation_leaves_training_as_it_was(make_config: Make, tmp_path: Path) -> None:
    """Neither the mode of the model, nor its memory, nor the random state of dropout."""
    often, never = (
        train(make_config(steps=6, validate_every=every, dropout=0.3), tmp_path / str(every), progress=False)
        for every in (1, 999)
    )
    assert metrics(often, "loss_nats") == metrics(never, "loss_nats")
    assert (often / "model.safetensors").read_bytes() == (never / "model.safetensors").read_bytes()


def test_an_absurd_learning_rate_keeps_the_last_checkpoint(make_config: Make, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"loss became nan at step 2; the last checkpoint is kept.*optimizer.lr"
    ):
        train(make_config(lr=1e30, warmup_steps=0), tmp_path / "run", progress=False)
    assert all(parameter.isfinite().all() for parameter in load_run(tmp_path / "run").model.parameters())


def test_an_infinite_gradient_is_never_saved(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the step is finite and its gradient is not; nothing is read until a checkpoint is due."""
    start = Training.start

    def broken(*arguments: Any, **options: Any) -> Training:
        training = start(*arguments, **options)
        calls: list[int] = []

        def third(gradient: Tensor) -> Tensor:
            calls.append(1)
            return gradient * math.inf if len(calls) == 3 else gradient

        training.model.vocabulary.output_bias["0"].register_hook(third)
        return training

    monkeypatch.setattr(Training, "start", broken)
    config = make_config(steps=20, log_every=999, validate_every=999, checkpoint_every=2)
    with pytest.raises(UserError, match=r"norm of the gradient became (nan|inf) at step 3"):
        train(config, tmp_path / "run", progress=False)
    tensors, facts = state(tmp_path / "run")
    assert facts["step"] == 2
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_model_that_the_last_step_broke_is_not_saved(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.loop.validate", lambda *_, **__: math.nan)
    with pytest.raises(UserError, match="validation score became nan at step 4"):
        train(make_config(steps=4), tmp_path / "run", progress=False)
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()


@pytest.mark.parametrize("checkpoint_every", [5, 999])
def test_weights_that_are_not_finite_are_never_saved(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int
) -> None:
    """Neither at a checkpoint nor after the last step: the loss of that step was finite, and the next one
    comes too late.
    """
    steps, constrain = [], LanguageModel.constrain

    def breaking(model: LanguageModel) -> None:
        constrain(model)
        steps.append(len(steps) + 1)
        if len(steps) == 10:
            model.blocks[1].query.weight.data[0, 0] = math.nan

    monkeypatch.setattr(LanguageModel, "constrain", breaking)
    config = make_config(steps=10, validate_every=999, checkpoint_every=checkpoint_every)
    monkeypatch.setattr("trainer.training.loop._validate", lambda *_, **__: False)
    with pytest.raises(
        UserError, match=r"model\.blocks\.1\.query\.weight became nan at step 10; the last checkpoint is kept"
    ):
        train(config, tmp_path / "run", progress=False)
    tensors, facts = state(tmp_path / "run")
    assert facts["step"] == (5 if checkpoint_every == 5 else 0)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert all(parameter.isfinite().all() for parameter in load_run(tmp_path / "run").model.parameters())


def test_too_short_a_text_leaves_nothing(make_config: Make, tmp_path: Path) -> None:
    with pytest.raises(TextError, match="too few for 2000 lanes"):
        train(make_config(batch=2000), tmp_path / "run", progress=False)
    assert list(tmp_path.iterdir()) == []
