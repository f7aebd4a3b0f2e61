"""PyTorch on a GPU: whole models, eager and compiled, and training steps, each compared with the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases.on_gpu.sides import LEAST_TOLERANCE, rule_of, run_folder
from benchmarks.configs import BenchmarkConfig
from runtimes.contract.precision import PRESETS
from runtimes.contract.rule import MemoryRule
from trainer.model.model import LanguageModel
from trainer.model.projected import ProjectedModel
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.training.parallel import Ranks
from trainer.training.state import Training

SEGMENTS = 3  # that are compared
MODELS = {  # whether a side computes in fp16, and whether it is compiled
    "pytorch-fp32": (False, False),
    "pytorch-fp16": (True, False),
    "pytorch-compiled-fp32": (False, True),
    "pytorch-compiled-fp16": (True, True),
}
TRAININGS: dict[str, dict[str, Any]] = {  # changes to a recipe
    "training-fp32": {},
    "training-bf16": {"autocast": "bf16"},
    "training-fp16": {"autocast": "fp16"},
    "training-compiled-bf16": {"autocast": "bf16", "compile": True},
    "training-checkpointed-bf16": {"autocast": "bf16", "checkpoint_activations": True},
}
TRAINING_STEPS = 5  # that are compared
LOSS_TOLERANCES = {"none": 2e-3, "bf16": 5e-2, "fp16": 5e-2}  # nats


class Stream:
    """Streams whose keys and values stay on the device of the model."""

    def __init__(
        self, model: LanguageModel, config: BenchmarkConfig, *, batch: int = 1, compiled: bool = False
    ) -> None:
        self.config = config
        self.rule = rule_of(config)
        weight = next(model.parameters())
        m = config.model
        self.device = weight.device
        shape = (batch, m.heads, self.rule.mem_len, m.head_dim)
        self.memory = [
            torch.zeros(shape, device=self.device, dtype=weight.dtype) for _ in range(2 * m.layers)
        ]
        self.position = torch.zeros(batch, dtype=torch.int64, device=self.device)
        projected = ProjectedModel(model, self.rule)

        def step(tokens: Tensor, memory: list[Tensor], position: Tensor) -> tuple[Tensor, list[Tensor]]:
            hidden, after = projected.step(tokens, memory, position)
            return model.vocabulary.logits(hidden[:, -1:]), after

        self._step: Callable[..., Any] = torch.compile(step, dynamic=False) if compiled else step

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, 1, V] after the last of the tokens [B, T], when the device has computed them."""
        with torch.inference_mode():
            logits, self.memory = self._step(tokens, self.memory, self.position)
            self.position = self.position + tokens.shape[1]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        answer: Tensor = logits
        return answer

    def answers(self) -> Tensor:
        """Log-probabilities on the CPU after each of a few segments and single tokens."""
        draw = np.random.default_rng(0)
        pieces = []
        for length in [self.rule.segment] * SEGMENTS + [1, 1]:
            tokens = torch.from_numpy(draw.integers(0, self.config.model.vocab_size, (1, length)))
            pieces.append(self.step(tokens.to(self.device)).float().log_softmax(-1).cpu())
        return torch.cat(pieces, dim=1)


def model_on(
    name: str, config: BenchmarkConfig, work: Path, device: str
) -> tuple[LanguageModel, float, float]:
    """The model of a side on the device, how many nats it differs from the CPU by, and the tolerance."""
    halves, compiled = MODELS[name]
    model = load_run(run_folder(work, config)).model.eval()
    expected = Stream(model, config).answers()
    moved = copy.deepcopy(model).to(device, torch.float16 if halves else torch.float32)
    worst = float((Stream(moved, config, compiled=compiled).answers() - expected).abs().max())
    return moved, worst, max(PRESETS["fp16" if halves else "fp32"].tolerance, LEAST_TOLERANCE)


def timed_step(
    model: LanguageModel, config: BenchmarkConfig, batch: int, tokens: int, *, compiled: bool
) -> Callable[[], Any]:
    """A step with full memory, to be timed."""
    stream = Stream(model, config, batch=batch, compiled=compiled)
    stream.position += 2 * stream.rule.slots  # all of the memory is visible
    segment = torch.zeros((batch, tokens), dtype=torch.int64, device=stream.device)
    return lambda: stream.step(segment)


def training_difference(name: str, device: str) -> tuple[float, float]:
    """Nats between the first losses of a tiny model on the device and on the CPU in fp32; the tolerance."""
    plain = TrainConfig.load("tiny")
    model = replace(plain.model, vocab_size=256, dropout=0.0, attention_dropout=0.0)  # nothing random
    plain = replace(plain, model=model, vocab="byte")
    losses = []
    for config, where in ((plain, "cpu"), (replace(plain, **TRAININGS[name]), device)):
        step = training_step(config, where)
        losses.append(np.array([step() for _ in range(TRAINING_STEPS)]))
    return float(np.abs(losses[0] - losses[1]).max()), LOSS_TOLERANCES[
        TRAININGS[name].get("autocast", "none")
    ]


def recipe_of(name: str, config: BenchmarkConfig) -> TrainConfig:
    """The recipe of a training side, with the sizes of the configuration."""
    rule = MemoryRule(mem_len=config.segment, segment=config.segment, mask="full")
    plain = TrainConfig(
        model=config.model, training=rule, evaluation=rule, vocab="byte", batch=config.training_batch
    )
    return replace(plain, **TRAININGS[name])


def training_step(config: TrainConfig, device: str) -> Callable[[], float]:
    """A call that trains one step and returns its loss."""
    config = replace(config, device=device, steps=1 << 20)  # type: ignore[arg-type]
    training = Training.start(config, Ranks(device=torch.device(device)))
    shape = (config.batch, 64 * config.training.segment + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    return lambda: float(training.advance(tokens).nats)  # reading the loss waits for the device
