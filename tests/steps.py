"""Inputs of `tests.xl_export.tracing.modules.Policy`, for tests that do not import PyTorch."""

from __future__ import annotations

import numpy as np


def observed(rows: int, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of one step."""
    draw = np.random.default_rng(seed)
    return {
        "observation": draw.standard_normal((rows, count, 5), np.float32),
        "previous": draw.integers(3, size=(rows, count)),
        "goal": draw.standard_normal((rows, 2), np.float32),
    }
