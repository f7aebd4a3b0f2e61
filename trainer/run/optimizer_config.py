"""The two sections of a configuration that say how the weights change: `optimizer` and `schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtimes.base.errors import ConfigError
from trainer.model.config import refuse_outside


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
        refuse_outside(
            self,
            "optimizer.",
            lr="above 0 to 1e30",  # from a larger one, optimisers compute numbers beyond fp32
            clip="above 0 to 1e308",
            epsilon="above 0 to 1",
            weight_decay="0 to 1e6",
        )
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
        refuse_outside(
            self,
            "schedule.",
            warmup_steps=f"0 to {1 << 40:,}",
            fine_tune_steps=f"0 to {1 << 40:,}",
            min_lr="0 to 1e30",
            plateau_decay="above 0 to below 1",
            plateau_patience=f"0 to {1 << 40:,}",
        )
