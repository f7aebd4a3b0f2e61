"""What the tests of the exporter share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import ARCHITECTURES

# 48: the last block of a quantised row is half full
SIZES: dict[str, Any] = {"d_model": 48, "heads": 2, "head_dim": 20, "d_ff": 64}


@pytest.fixture(scope="module")
def calm_run(make_run: Callable[..., Path], text: str) -> Callable[..., Path]:
    """`calm_run(kind)`: a run of an architecture with weights as small as trained ones, and its text."""
    from safetensors.torch import load_file, save_file

    def make(kind: str) -> Path:
        sizes = SIZES | {
            name: size for name, size in ARCHITECTURES[kind].items() if name != "d_ff" or not size
        }
        folder = make_run(**sizes)
        file = folder / "model.safetensors"
        save_file({name: 0.4 * tensor for name, tensor in load_file(file).items()}, file)
        (folder / "test.txt").write_text(text[:300], encoding="utf-8")
        return folder

    return make
