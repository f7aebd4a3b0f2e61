"""Trains a model with segment recurrence: `train(TrainConfig.load("demo"), "run")`. Needs PyTorch."""

from __future__ import annotations

from typing import Any

from runtimes.base.startup import prepare_training

__all__ = ["TrainConfig", "resume", "train"]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: reading a configuration must not load PyTorch."""
    if name == "TrainConfig":
        from trainer.run.config import TrainConfig

        return TrainConfig
    if name in ("resume", "train"):
        prepare_training()  # before PyTorch loads
        import trainer.training.loop as steps

        return getattr(steps, name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
