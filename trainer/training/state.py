"""The state that changes while a model trains, and the training step that changes it."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from runtimes.base.errors import ConfigError, UserError
from runtimes.base.machine import refuse_beyond_memory
from runtimes.contract.rule import MemoryRule
from trainer.model.model import LanguageModel, count_parameters
from trainer.run.config import TrainConfig
from trainer.run.history import Validation, best
from trainer.training.allocator import keep_freed_memory
from trainer.training.lane_memory import LaneMemory
from trainer.training.objective import Objective
from trainer.training.optimizer import make_optimizer, set_rate_and_clip
from trainer.training.parallel import ALONE, Ranks, unexchanged
from trainer.training.schedule import begins_empty, first_token, learning_rate, training_rule
from trainer.training.shard import shard
from trainer.training.span_lengths import SpanLengths
from trainer.training.validation import average_start, decays, out_of_patience

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The fp16 loss is scaled so that its gradients fit the range of fp16. With a scale below this one, a gradient
# that is not finite is not a matter of range any more: training has diverged.
SMALLEST_SCALE = 1.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one training step has computed. The tensors lie on the training device and were not read.

    To read one (`float(step.nats)`) waits for the device, so a loop reads only what it shows.
    """

    number: int  # number of this step, from 1
    nats: Tensor  # mean loss of a token before the step, over all processes []
    gradient_norm: Tensor  # norm of the whole gradient before clipping []
    learning_rate: float  # rate of this step
    tokens: int  # number of tokens trained, over all processes


@dataclass
class Training:
    """The state of one process."""

    config: TrainConfig
    ranks: Ranks
    model: LanguageModel
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: AveragedModel | None
    lanes: list[LaneMemory]
    """The memory of this process's lanes, for each of the `accumulate` parts that are computed one after
    another.
    """
    span_lengths: SpanLengths
    step: int = 0  # number of steps done
    at: int = 0  # index in the lanes where the next segment begins
    position: int = 0  # its stream position
    epoch: int = 0  # how often the streams have started again
    validations: list[Validation] = field(default_factory=list)
    validation_extent: tuple[int, int | None] = (1, None)
    """Number of lanes of each validation, and its most tokens; None for all."""
    final: float | None = None
    """The score of the whole held-out text at the end of training, in bits a token."""
    text: str = ""
    """`digest` of the source, for checkpoints, like `held_out`."""
    held_out: str | None = None
    first_not_finite: Tensor = field(default_factory=lambda: torch.zeros(3))
    """[3]: the first step whose objective or gradient norm was not finite, and these two numbers; the step is
    0 while there was none. `refuse_not_finite` reads it.
    """

    @classmethod
    def start(
        cls, config: TrainConfig, ranks: Ranks = ALONE, *, weights: LanguageModel | None = None
    ) -> Training:
        """The state at step 0, from the configuration's seed.

        weights: a model of the same configuration to start from, in place of random weights.
        On a CPU the process keeps freed memory from now on (see `keep_freed_memory`). Raises ConfigError if
        this machine has too little memory.
        """
        lanes = ranks.lanes(config.batch, config.accumulate)
        device = ranks.device
        shards = ranks.count if config.parallel == "fsdp" else 1
        refuse_beyond_memory(
            config.num_bytes(lanes, shards),
            what=f"training {count_parameters(config.model):,} parameters in {lanes} lanes",
            fix="reduce layers, d_model, d_ff, batch, segment or mem_len",
            error=ConfigError,
            available=ranks.memory_bytes(),
        )
        if config.threads:
            torch.set_num_threads(config.threads)
        if device.type == "cpu":
            keep_freed_memory()
        torch.manual_seed(config.seed)
        model = LanguageModel(config.model).train()
        if weights is not None:
            model.load_state_dict(weights.state_dict())
        if shards == 1:
            model.to(device)
        # Until here every process draws the same numbers, so the weights are equal. Dropout must differ from
        # now on.
        if ranks.rank:
            torch.manual_seed(config.seed + ranks.rank)
        rule = training_rule(config, 0)
        parts = [model.start(lanes // config.accumulate, rule) for _ in range(config.accumulate)]
        model.checkpoint_activations = config.checkpoint_activations
        objective: nn.Module = Objective(model)
        average = None if config.averaging is None else AveragedModel(model)
        if shards > 1:  # moves one block after the other to the device, which never holds the whole model
            shard(objective, model, device)
            if average is not None:
                assert isinstance(average.module, LanguageModel)
                shard(Objective(average.module), average.module, device)
        if config.compile:
            _refuse_without_compiler(device)
            # An adaptive softmax looks for the tokens of each cluster; their number is known in the step.
            torch._dynamo.config.capture_dynamic_output_shape_ops = True
            objective.compile()
        optimizer = make_optimizer(config, model)
        return cls(
            config,
            ranks,
            model,
            objective=ranks.wrap(objective),
            optimizer=optimizer,
            scaler=torch.amp.GradScaler(device.type, enabled=config.autocast == "fp16"),
            average=average,
            validation_extent=(config.batch, config.validate_tokens),
            lanes=[LaneMemory([memory.to(device) for memory in part]) for part in parts],
            span_lengths=SpanLengths(model, optimizer, config.optimizer.clip),
            first_not_finite=torch.zeros(3, device=device),
        )

    @property
    def memories(self) -> list[list[Tensor]]:
        """The memory [B, M, D] of each layer, for each part of this process's lanes."""
        return [lanes.whole() for lanes in self.lanes]

    @memories.setter
    def memories(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self.lanes = [LaneMemory(part) for part in parts]

    @property
    def rule(self) -> MemoryRule:
        """The memory rule of the next step."""
        return training_rule(self.config, self.step)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(
            self.config, self.step, decays=decays(self.validations, self.config.schedule.plateau_patience)
        )

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or validations have not improved for too long."""
        return self.step >= self.config.steps or out_of_patience(self.validations, self.config.patience)

    @property
    def is_best(self) -> bool:
        """Whether these weights have the best validation, or there was no validation yet."""
        leader = best(self.validations)
        return leader is None or leader.step == self.step

    @property
    def weights(self) -> LanguageModel:
        """The model that is validated and exported: the average of the weights, once averaging has begun."""
        averaged = None if self.average is None or not self.average.n_averaged else self.average.module
        assert averaged is None or isinstance(averaged, LanguageModel)
        return self.model if averaged is None else averaged

    def advance(self, tokens_BN: np.ndarray) -> Step:
        """The result of one training step, which reads the next segment of every lane.

        tokens_BN: the lanes of all processes. The loss is not read back from the device, so one that is not
        finite raises no error here: call `refuse_not_finite` before anything depends on the weights. A step
        waits for the device only for the clusters of an adaptive softmax, the norms of Adagrad and, now and
        then, spans.
        """
        T = self.rule.segment
        rate = self.rate
        # A segment needs one token more than its length, as the last target. If the lanes are too short for
        # another one, the streams start again. Nothing has to be cleared: what is from before position 0
        # is hidden by the mask, or zero to the model.
        if self.at + T >= tokens_BN.shape[1]:
            self.epoch += 1
            self.position = 0
            self.at = first_token(self.config, self.epoch, length=tokens_BN.shape[1], segment=T)
        elif begins_empty(self.config, self.step):
            self.position = 0  # they begin anew where they are
        pieces = self.ranks.share(tokens_BN)[:, self.at : self.at + T + 1].astype(np.int64)
        self.optimizer.zero_grad()
        sums = torch.zeros(2, device=self.ranks.device)
        for part, piece in enumerate(np.split(pieces, self.config.accumulate)):
            sums += self._backward(part, _on_device(piece, self.ranks.device))
        objective, nats = self.ranks.mean(sums) / self.config.accumulate
        norm = self._update(rate)
        before = self.rule
        self.at += T
        self.position += T
        self.step += 1
        self._note_not_finite(objective, norm)
        self._fit_memory(before.mem_len)
        if self.average is not None and self.config.averaging is not None:
            start = average_start(self.config.averaging, self.validations)
            if start is not None and self.step > start:
                self.average.update_parameters(self.model)
        return Step(
            number=self.step,
            nats=nats,
            gradient_norm=norm,
            learning_rate=rate,
            tokens=self.config.batch * T,
        )

    def refuse_not_finite(self) -> None:
        """Ends all processes with one UserError if a loss or a gradient was not finite since the start.

        This waits for the device. All processes have the same numbers, so all that call it at the same step
        take the same decision. It must come before a validation, a checkpoint and the end.
        """
        step, objective, norm = self.first_not_finite.tolist()
        if step and not math.isfinite(objective):
            refuse_infinite("loss", objective, int(step), self.ranks)
        elif step:
            refuse_infinite("norm of the gradient", norm, int(step), self.ranks)

    def _backward(self, part: int, piece: Tensor) -> Tensor:
        """Objective and nats [2] of one part of the lanes, whose gradient is added to the parameters."""
        last = part == self.config.accumulate - 1
        device = self.ranks.device
        positions = torch.full((1,), self.position, device=device)  # all lanes are there
        dtype = AUTOCAST.get(self.config.autocast)
        longest = self.span_lengths.current()
        # Processes exchange gradients once per step: in the backward pass of the last part, when the sum is
        # complete.
        with nullcontext() if last else unexchanged(self.objective):
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                objective, nats, inputs = self.objective(
                    piece[:, :-1],
                    piece[:, 1:],
                    self.lanes[part].last(longest),
                    positions,
                    self.rule,
                    progress=self.step / self.config.steps,
                    longest=longest,
                )
            # Every part weighs the same in the mean over the whole batch.
            self.scaler.scale(objective / self.config.accumulate).backward()
        self.lanes[part].add(inputs, self.rule.mem_len)
        return torch.stack([objective.detach(), nats])

    def _update(self, rate: float) -> Tensor:
        """Clips the gradients and lets the optimiser change the weights; returns the gradient's norm."""
        self.scaler.unscale_(self.optimizer)
        norm = set_rate_and_clip(self.optimizer, rate, self.config.optimizer.clip)
        # The scaler skips an fp16 step with a gradient out of range, and `update` lowers the scale then.
        self.scaler.step(self.optimizer)
        self.model.constrain()
        self.span_lengths.moved(rate)
        return norm

    def _note_not_finite(self, objective: Tensor, norm: Tensor) -> None:
        """Notes on the device the first step that has failed, and lowers the scale of an fp16 loss."""
        failed = ~norm.isfinite()
        if self.scaler.is_enabled():  # only below the smallest scale it is no matter of range any more
            failed = failed & (self.scaler.scale(torch.ones_like(norm)) < SMALLEST_SCALE)
            self.scaler.update()
        failed = (failed | ~objective.isfinite()) & (self.first_not_finite[0] == 0)
        now = torch.stack([torch.full_like(norm, self.step), objective, norm])
        self.first_not_finite = torch.where(failed, now, self.first_not_finite)

    def _fit_memory(self, before: int) -> None:
        """Gives the memory the length that the next step's rule asks for.

        A shorter memory keeps the newest tokens. A longer one gets empty slots for older tokens.
        """
        after = self.rule.mem_len
        if after != before:
            self.memories = [
                [F.pad(tensor, (0, 0, after - before, 0)) for tensor in memory] for memory in self.memories
            ]
        # The mask shows `position` tokens of memory at most. With a position of `before`, the empty slots
        # stay hidden.
        if after > before:
            self.position = min(self.position, before)


def _on_device(tokens: np.ndarray, device: torch.device) -> Tensor:
    """The tokens on a device. A copy from pinned memory does not wait for what a GPU still computes."""
    tensor = torch.from_numpy(tokens)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _refuse_without_compiler(device: torch.device) -> None:
    """Raises ConfigError if `torch.compile` would find no compiler."""
    if device.type == "cpu":
        there = any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++"))
        needed = "a C++ compiler, g++ or clang++"
    else:
        there = importlib.util.find_spec("triton") is not None
        needed = "the package triton"
    if not there:
        raise ConfigError(
            f"compile is true, and torch.compile needs {needed} for device {device.type}, which is not "
            "there; install it, or set compile to false."
        )


def refuse_infinite(what: str, value: float, step: int, ranks: Ranks) -> None:
    """Ends all processes with one error if a number that all of them have is not finite."""
    if not math.isfinite(value):
        ranks.refuse(
            UserError(
                f"the {what} became {value} at step {step}; the last checkpoint is kept, but continuing it "
                "would end in the same way: start a new run (another --out, or --force) with a lower "
                "optimizer.lr or a longer schedule.warmup_steps."
            )
        )
