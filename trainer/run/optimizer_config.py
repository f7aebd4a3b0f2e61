"""The two sections of a configuration that say how the weights change: `optimizer` and `schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtimes.base.errors import ConfigError

MAX_RATE = 1e30  # from a larger learning rate, optimisers compute numbers beyond fp32


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a gradient changes the weights. `trainer/training/optimizer.py` says what each kind computes."""

    # `adam`, `adamw` (Adam with decoupled weight decay) or `adagrad`.
    kind: Literal["adam", "adamw", "adagrad"] = "adam"
    lr: float = 2.5e-4  # the highest learning rate, which `schedule` changes
    # How much of the mean and of the mean square of the gradients Adam keeps from one step to the next.
    betas: tuple[float, ...] = (0.9, 0.999)
    # Added to the root that the step is divided by; null for 1e-8, and for 1e-10 with adagrad.
    epsilon: float | None = None
    # A step multiplies weights by 1 - lr * weight_decay (adamw only). It concerns matrices, and no bias, norm
    # or span.
    weight_decay: float = 0.0
    # The largest norm of the gradient of all parameters; with adagrad, of each tensor by itself.
    clip: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.lr <= MAX_RATE:
            raise ConfigError(f"optimizer.lr is {self.lr}; expected above 0 and at most {MAX_RATE:g}.")
        if self.clip <= 0:
            raise ConfigError(f"optimizer.clip is {self.clip}; expected a positive number.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"optimizer.betas is {list(self.betas)!s:.80}; expected two numbers from 0 to below 1, such "
                "as [0.9, 0.999]."
            )
        if self.kind == "adagrad" and tuple(self.betas) != OptimizerConfig.betas:
            raise ConfigError(
                f"optimizer.betas is {list(self.betas)} and optimizer.kind is adagrad, which has none; leave "
                "betas out, or give kind adam or adamw."
            )
        if self.epsilon is not None and not 0 < self.epsilon <= 1:
            raise ConfigError(
                f"optimizer.epsilon is {self.epsilon}; expected a small positive number such as 1e-8, or "
                "null."
            )
        if not 0 <= self.weight_decay <= 1e6:
            raise ConfigError(f"optimizer.weight_decay is {self.weight_decay}; expected 0 or more.")
        if self.weight_decay and self.kind != "adamw":
            raise ConfigError(
                f"optimizer.weight_decay is {self.weight_decay} and optimizer.kind is {self.kind}; give "
                "kind adamw, or a weight_decay of 0."
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate changes during training.

    It rises linearly over `warmup_steps` to `optimizer.lr`, then follows `kind` and is never below `min_lr`,
    except in the fine-tuning.
    """

    # `cosine` falls to min_lr at the last step; `constant` stays; `inverse-sqrt` falls as 1/√step; `plateau`
    # is multiplied by plateau_decay when more than plateau_patience validations in a row were no better than
    # the best.
    kind: Literal["cosine", "plateau", "constant", "inverse-sqrt"] = "cosine"
    warmup_steps: int = 0
    min_lr: float = 0.0
    plateau_patience: int = 0
    plateau_decay: float = 0.5
    # The last steps have a tenth of the rate that `kind` gives them (the public code of Sukhbaatar et al.).
    fine_tune_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "fine_tune_steps"):
            if not 0 <= getattr(self, name) <= 1 << 40:
                raise ConfigError(f"schedule.{name} is {getattr(self, name)}; expected 0 or more steps.")
        if self.min_lr < 0:
            raise ConfigError(f"schedule.min_lr is {self.min_lr}; expected 0 or more.")
        if not 0 < self.plateau_decay < 1:
            raise ConfigError(
                f"schedule.plateau_decay is {self.plateau_decay}; expected above 0 and below 1."
            )
        if self.plateau_patience < 0:
            raise ConfigError(
                f"schedule.plateau_patience is {self.plateau_patience}; expected 0 or more validations."
            )
