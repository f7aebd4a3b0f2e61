"""A training step does not wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from trainer.run.config import TrainConfig
from trainer.training.state import Training


@pytest.mark.gpu
def test_a_step_with_adam_does_not_wait(
    make_config: Callable[..., TrainConfig], started: Callable[[TrainConfig], tuple[Training, np.ndarray]]
) -> None:
    training, tokens_BN = started(make_config(device="cuda"))
    training.advance(tokens_BN)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            training.advance(tokens_BN)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    training.refuse_not_finite()
