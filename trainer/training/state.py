"""All that changes while training, and one step of it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from runtimes.base.errors import UserError
from runtimes.contract.rule import MemoryRule
from trainer.model.model import LanguageModel
from trainer.run.config import TrainConfig
from trainer.training.objective import segment_loss
from trainer.training.optimizer import make_optimizer, set_rate_and_clip
from trainer.training.parallel import ALONE, Ranks, unexchanged
from trainer.training.schedule import learning_rate, training_rule
from trainer.training.validation import Validation, average_start, best, decays, out_of_patience

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_SCALE = 1.0  # of the fp16 loss; gradients that are not finite below it are not a matter of range


class Objective(nn.Module):
    """The model's loss as a `forward`, which is what DistributedDataParallel can wrap."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any, progress: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        loss, memory = segment_loss(self.model, *arguments, progress=progress)
        return loss.objective, loss.nats, memory


@dataclass
class Training:
    """The state of one process. memories: of its lanes, for each of the `accumulate` parts that are computed in turn."""

    config: TrainConfig
    ranks: Ranks
    model: LanguageModel
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: AveragedModel | None
    memories: list[list[Tensor]]
    step: int = 0
    at: int = 0
    position: int = 0
    validations: list[Validation] = field(default_factory=list)

    @classmethod
    def start(cls, config: TrainConfig, ranks: Ranks = ALONE) -> Training:
        """Step 0, from the configuration's seed; raises ConfigError where this machine has too little memory."""
        lanes, device = ranks.lanes(config.batch, config.accumulate), ranks.device
        config.refuse_if_too_large(lanes=lanes, memory_bytes=ranks.memory_bytes())
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        model = LanguageModel(config.model).train().to(device)
        if ranks.rank:  # equal weights everywhere; dropout of its own on every process
            torch.manual_seed(config.seed + ranks.rank)
        rule = training_rule(config, 0)
        return cls(
            config, ranks, model,
            objective=ranks.wrap(Objective(model)),
            optimizer=make_optimizer(config, model),
            scaler=torch.amp.GradScaler(device.type, enabled=config.autocast == "fp16"),
            average=None if config.averaging is None else AveragedModel(model),
            memories=[model.start(lanes // config.accumulate, rule) for _ in range(config.accumulate)],
        )  # fmt: skip

    @property
    def rule(self) -> MemoryRule:
        """The memory rule of the next step."""
        return training_rule(self.config, self.step)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(
            self.config, self.step, decays=decays(self.validations, self.config.plateau_patience)
        )

    @property
    def finished(self) -> bool:
        return self.step >= self.config.steps or out_of_patience(self.validations, self.config.patience)

    @property
    def is_best(self) -> bool:
        """Whether these weights are the best by validation, or there was none to tell."""
        leader = best(self.validations)
        return leader is None or leader.step == self.step

    @property
    def weights(self) -> nn.Module:
        """The model that is validated and exported: the average, once it has begun."""
        return self.model if self.average is None or not self.average.n_averaged else self.average.module

    def advance(self, tokens_BN: np.ndarray) -> float:
        """One step over the next segment of every lane; returns its loss, nats per token, before the update."""
        T = self.rule.segment
        if (
            self.at + T >= tokens_BN.shape[1]
        ):  # the streams start again; at position 0 their memory is invisible
            self.at = self.position = 0
        pieces = self.ranks.share(tokens_BN)[:, self.at : self.at + T + 1].astype(np.int64)
        self.optimizer.zero_grad()
        sums = torch.zeros(2, device=self.ranks.device)
        for part, piece in enumerate(np.split(pieces, self.config.accumulate)):
            sums += self._backward(part, torch.from_numpy(piece).to(self.ranks.device))
        objective, nats = map(float, self.ranks.mean(sums) / self.config.accumulate)
        self._refuse_infinite("loss", objective)
        self._update()
        self.at, self.position, before = self.at + T, self.position + T, self.rule
        self.step += 1
        self._fit_memory(before.mem_len)
        if self.average is not None and self._averages():
            self.average.update_parameters(self.model)
        return nats

    def _backward(self, part: int, piece: Tensor) -> Tensor:
        """Adds the gradient of one part of the lanes, and returns its objective and nats [2]."""
        last, device = part == self.config.accumulate - 1, self.ranks.device
        positions = torch.full((len(piece),), self.position, device=device)
        dtype = AUTOCAST.get(self.config.autocast)
        with nullcontext() if last else unexchanged(self.objective):
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                objective, nats, memory = self.objective(
                    piece[:, :-1],
                    piece[:, 1:],
                    self.memories[part],
                    positions,
                    self.rule,
                    progress=self.step / self.config.steps,
                )
            self.scaler.scale(objective / self.config.accumulate).backward()
        self.memories[part] = [tensor.float() for tensor in memory]
        return torch.stack([objective.detach(), nats])

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        norm = set_rate_and_clip(self.optimizer, self.rate, self.config.clip)
        if not self.scaler.is_enabled() or self.scaler.get_scale() < SMALLEST_SCALE:
            self._refuse_infinite("norm of the gradient", norm)
        self.scaler.step(self.optimizer)  # leaves out an fp16 step whose gradient was out of range
        self.scaler.update()
        self.model.constrain()

    def _fit_memory(self, before: int) -> None:
        """Memory as long as the next step's rule says: the newest part of it, or more that is empty."""
        after = self.rule.mem_len
        if after != before:
            self.memories = [
                [F.pad(tensor, (0, 0, after - before, 0)) for tensor in memory] for memory in self.memories
            ]
        if (
            after > before
        ):  # a stream seems to begin where its memory does, so what was never remembered stays unseen
            self.position = min(self.position, before)

    def _averages(self) -> bool:
        assert self.config.averaging is not None
        start = average_start(self.config.averaging, self.validations)
        return start is not None and self.step > start

    def _refuse_infinite(self, what: str, value: float) -> None:
        refuse_infinite(what, value, self.step + 1, self.ranks)


def refuse_infinite(what: str, value: float, step: int, ranks: Ranks) -> None:
    """Ends all processes where a number that all have is not finite."""
    if not math.isfinite(value):
        ranks.refuse(
            UserError(
                f"the {what} became {value} at step {step}; the last checkpoint is kept: "
                "start again with a lower learning_rate or a longer warmup_steps."
            )
        )
