"""Trains a model with segment recurrence: `train(TrainConfig.load("demo"), "run")`. Needs PyTorch."""

from __future__ import annotations

import os
from typing import Any

# Set before PyTorch loads: threads that wait should sleep. Spinning, they take the cores from each other and
# from every other job; on two busy cores training was six times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = ["TrainConfig", "resume", "train"]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: reading a configuration must not load PyTorch."""
    if name == "TrainConfig":
        from trainer.run.config import TrainConfig

        return TrainConfig
    if name in ("resume", "train"):
        import trainer.training.loop as steps

        return getattr(steps, name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
