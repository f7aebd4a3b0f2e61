"""The memory of a step is used again by the next one, so the system clears no pages for it."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.training import allocator

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# A step of this model writes about 40 MB of tensors. They have 10,000 pages.
STEPS = """
import resource
import numpy as np
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig
from trainer.run.config import TrainConfig
from trainer.training.state import Training

rule = MemoryRule(mem_len=32, segment=32, mask="full")
model = ModelConfig(layers=2, d_model=128, heads=4, head_dim=32, d_ff=512, vocab_size=256)
training = Training.start(
    TrainConfig(model=model, training=rule, evaluation=rule, vocab="byte", batch=32, steps=100, threads=1)
)
tokens = np.random.default_rng(0).integers(0, 256, (32, 64 * 32 + 1))
for _ in range(5):
    training.advance(tokens)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    training.advance(tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


@pytest.mark.slow  # a process that imports PyTorch
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library has no mallopt")
@pytest.mark.skipif(
    HUGE.is_file() and "[always]" in HUGE.read_text(), reason="all pages are huge here, so they are few"
)
def test_a_training_step_takes_its_memory_from_the_process() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(answer.stdout) < 300


@pytest.mark.parametrize("name", allocator.USER_VARIABLES)
def test_what_the_user_has_chosen_for_memory_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: pytest.fail("it was changed"))
    monkeypatch.setenv(name, "1")
    assert not allocator.keep_freed_memory()
