"""The two sections of a configuration that say how the weights change: `optimizer` and `schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from runtimes.base.errors import ConfigError
from runtimes.base.ranges import Range
from runtimes.base.records import refuse_out_of_range
from trainer.model.config import Share

MAX_COUNT = 1 << 40  # more than any training does
Count = Annotated[int, Range(0, MAX_COUNT, whole=True)]
PositiveCount = Annotated[int, Range(1, MAX_COUNT, whole=True)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a gradient changes the weights. `trainer/training/optimizer.py` says what each kind computes."""

    kind: Literal["adam", "adamw", "muon", "adagrad"] = "adam"
    """`adam`, `adamw` (Adam with decoupled weight decay), `muon` (Muon for the matrices of linear layers,
    AdamW for the rest) or `adagrad`.
    """
    lr: Annotated[float, Range(0, 1e30, exclusive=True)] = 2.5e-4
    """The highest learning rate, which `schedule` changes. From a larger one than 1e30, optimisers compute
    numbers beyond fp32.
    """
    betas: tuple[Share, ...] = (0.9, 0.999)
    """How much of the mean and of the mean square of the gradients Adam keeps from one step to the next."""
    epsilon: Annotated[float, Range(0, 1, exclusive=True)] | None = None
    """Added to the root that the step is divided by; null for 1e-8, and for 1e-10 with adagrad."""
    weight_decay: Annotated[float, Range(0, 1e6)] = 0.0
    """A step multiplies matrices by 1 - lr * weight_decay (adamw and muon), but no bias, norm or span."""
    clip: Annotated[float, Range(0, 1e308, exclusive=True)] = 0.25
    """The largest norm of the gradient of all parameters; with adagrad, of each tensor by itself."""

    def __post_init__(self) -> None:
        refuse_out_of_range(self, "optimizer.")
        if len(self.betas) != 2:
            raise ConfigError(
                f"optimizer.betas is {list(self.betas)!s:.80}; expected two numbers, such as [0.9, 0.999]."
            )
        if self.kind == "adagrad" and tuple(self.betas) != OptimizerConfig.betas:
            raise ConfigError(
                f"optimizer.betas is {list(self.betas)} and optimizer.kind is adagrad, which has none; leave "
                "betas out, or give kind adam or adamw."
            )
        if self.weight_decay and self.kind not in ("adamw", "muon"):
            raise ConfigError(
                f"optimizer.weight_decay is {self.weight_decay} and optimizer.kind is {self.kind}; give "
                "kind adamw or muon, or a weight_decay of 0."
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate changes during training.

    It rises linearly over `warmup_steps` to `optimizer.lr`, then follows `kind` and is never below `min_lr`,
    except in the fine-tuning.
    """

    kind: Literal["cosine", "plateau", "constant", "inverse-sqrt"] = "cosine"
    """`cosine` falls to min_lr at the last step; `constant` stays; `inverse-sqrt` falls as 1/√step; `plateau`
    is multiplied by plateau_decay when more than plateau_patience validations in a row were no better than
    the best.
    """
    warmup_steps: Count = 0
    min_lr: Annotated[float, Range(0, 1e30)] = 0.0
    plateau_patience: Count = 0
    plateau_decay: Annotated[float, Range(0, 1, exclusive=True, below=True)] = 0.5
    fine_tune_steps: Count = 0
    """The last steps have a tenth of the rate that `kind` gives them (the public code of Sukhbaatar et al.).
    """

    def __post_init__(self) -> None:
        refuse_out_of_range(self, "schedule.")
