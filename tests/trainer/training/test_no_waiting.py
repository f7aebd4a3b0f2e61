"""A training step reads nothing back from the device, so a GPU never waits for the processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig, SpanConfig, VocabularyConfig
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig
from trainer.training.state import Training

# Operators whose result the processor needs before it can go on: a number, or a shape that depends on data.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal")

BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_")


def is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


class Waits(TorchDispatchMode):
    """Collects the names of such operators, also those of backward passes. Copies from a device cannot be
    seen where there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in BY_INDEX and any(is_mask(index) for index in args[1]):
            self.seen.append("index by a mask")
        if name in WAITING:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def training(optimizer: str, **model: Any) -> tuple[Training, np.ndarray]:
    config = TrainConfig(
        model=ModelConfig(
            **{"layers": 2, "d_model": 8, "heads": 2, "head_dim": 4, "d_ff": 16, "vocab_size": 11, **model}
        ),
        training=MemoryRule(mem_len=8, segment=4, include_self=False),
        evaluation=MemoryRule(mem_len=8, segment=4, include_self=False),
        batch=2,
        steps=100,
        threads=1,
        optimizer=OptimizerConfig(kind=optimizer, lr=0.01),  # type: ignore[arg-type]
    )
    return Training.start(config), np.random.default_rng(0).integers(0, 11, (2, 400))


def waits_of_three_steps(optimizer: str, **model: Any) -> list[str]:
    trained, tokens = training(optimizer, **model)
    trained.advance(tokens)
    with Waits() as waits:
        for _ in range(3):
            trained.advance(tokens)
    return waits.seen


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])  # Adagrad reads the norms to clip each tensor
def test_a_step_reads_nothing_back(optimizer: str) -> None:
    assert waits_of_three_steps(optimizer) == []


def test_a_step_with_spans_reads_nothing_back() -> None:
    layers = {"d_ff": 0, "sublayers": "all-attention", "persistent": 3, "positions": "learned", "context": 13}
    assert waits_of_three_steps("adam", **layers, span=SpanConfig(maximum=8, ramp=4)) == []


def test_clusters_of_a_vocabulary_are_the_one_exception() -> None:
    """Which tokens belong to a cluster decides how many rows its output layer computes."""
    clusters = VocabularyConfig(cutoffs=(10, 20), div_val=2, d_embed=8)
    assert set(waits_of_three_steps("adam", vocab_size=40, vocabulary=clusters)) == {"nonzero"}
