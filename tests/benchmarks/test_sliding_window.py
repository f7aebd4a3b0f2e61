"""The window graph against PyTorch, at odd sizes."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from benchmarks.cases import sliding_window
from benchmarks.cases.sliding_window import Window, check_window
from benchmarks.models import random_weights
from runtimes.base.errors import ArtefactError
from runtimes.sessions import fused_cpu
from tests.nightly import every, matrix
from trainer.model.config import ModelConfig

TINY = ModelConfig(layers=2, d_model=12, heads=3, head_dim=2, d_ff=7, vocab_size=11)
SIZES = {
    "tiny": TINY,
    "one layer": dataclasses.replace(TINY, layers=1),
    "wide heads": ModelConfig(layers=3, d_model=8, heads=2, head_dim=16, d_ff=32, vocab_size=5),
}


@pytest.mark.parametrize(("size", "window", "block"), matrix(tuple(SIZES), (1, 2, 8, 13), (4, 256)))
def test_graph_equals_pytorch(size, window, block, tmp_path, monkeypatch):
    monkeypatch.setattr(sliding_window, "QUERIES_PER_BLOCK", block)
    model = SIZES[size]
    weights = random_weights(model, seed=window)
    tokens = np.random.default_rng(window).integers(0, model.vocab_size, window)
    graph = Window(tmp_path / "window", weights, model, window, threads=1)
    assert check_window(graph, weights, model, tokens) < 2e-5


def test_another_model_is_refused(tmp_path):
    graph = Window(tmp_path / "window", random_weights(TINY), TINY, 5, threads=1)
    with pytest.raises(ArtefactError, match="differs from PyTorch"):
        check_window(graph, random_weights(TINY, seed=1), TINY, np.arange(5))


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here to build the kernel with")
@pytest.mark.parametrize("window", every(2, [13, 1, 300, 150]))
def test_the_fused_graph_equals_pytorch(window, tmp_path):
    model, library = SIZES["wide heads"], fused_cpu.build()
    weights = random_weights(model, seed=window)
    tokens = np.random.default_rng(window).integers(0, model.vocab_size, window)
    graph = Window(tmp_path / "window", weights, model, window, threads=1, library=library)
    assert check_window(graph, weights, model, tokens) < 2e-5
