"""Training on the GPU: the losses are those of the CPU, and what a step takes in each precision."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.first_hour.steps.models import TINY
from benchmarks.measure import take_turns
from runtimes.contract.rule import MemoryRule
from trainer.model.arithmetic import training_multiply_adds
from trainer.run.config import TrainConfig
from trainer.training.parallel import Ranks
from trainer.training.state import Training

DEVICE: Literal["cpu", "cuda", "mps"] = "cuda"
RECIPE = "enwik8-base"
COMPARED = 5  # steps
TOLERANCES = {"none": 2e-3, "bf16": 5e-2, "fp16": 5e-2}  # nats between two ways to compute the same loss
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"autocast": "bf16"},
    "fp16": {"autocast": "fp16"},
    "bf16, compiled": {"autocast": "bf16", "compile": True},
    "bf16, checkpointed activations": {"autocast": "bf16", "checkpoint_activations": True},
}
REPEATS, SEVERAL_STEPS = 12, 20
QUICK_RULE = MemoryRule(mem_len=16, segment=16, mask="full")


def run(record: Record) -> None:
    """Compares the first losses of each variant with those of fp32 on the CPU, then times its steps."""
    if not torch.cuda.is_available():
        raise NotHereError("PyTorch sees no GPU; install its CUDA build.")
    small = _without_dropout(_recipe("tiny"))
    expected = losses(small, "cpu")
    for name, changes in VARIANTS.items():
        with record.attempt(name):
            worst = float(np.abs(losses(replace(small, **changes), DEVICE) - expected).max())
            tolerance = TOLERANCES[changes.get("autocast", "none")]
            said = f"the losses of {COMPARED} steps differ from the CPU's by at most {worst:.2e} nats"
            record.check(name, worst <= tolerance, f"{said} (tolerance {tolerance:g})")
            if worst <= tolerance:
                _time(record, name, changes)
        torch.cuda.empty_cache()


def losses(config: TrainConfig, device: Literal["cpu", "cuda", "mps"]) -> np.ndarray:
    """The losses of the first steps, in nats, from the same weights and tokens on either device."""
    training = _start(replace(config, device=device), device)
    tokens = _tokens(training.config)
    return np.array([float(training.advance(tokens).nats) for _ in range(COMPARED)])


def several(record: Record) -> None:
    """Trains a small model in one process for each GPU, which exchange gradients by NCCL."""
    count = torch.cuda.device_count()
    if count < 2:
        raise NotHereError(f"it needs two GPUs or more, and PyTorch sees {count}.")
    for parallel in ("ddp", "fsdp"):
        with record.attempt(parallel):
            out = record.work / f"trained-{parallel}"
            command = [sys.executable, "-m", "xl_export", "train", "tiny", "--device", "cuda", "--force"]
            command += ["--processes", str(count), "--steps", str(SEVERAL_STEPS), "--out", str(out)]
            command += ["--set", f"parallel={parallel}", "--set", f"batch={8 * count}"]
            done = subprocess.run(command)
            said = f"{count} processes, {SEVERAL_STEPS} steps, exit code {done.returncode}"
            record.check(parallel, done.returncode == 0, said)


def _time(record: Record, name: str, changes: dict[str, Any]) -> None:
    config = _recipe(RECIPE)
    if record.quick:
        config = replace(config, model=TINY, training=QUICK_RULE, batch=2)
    config = replace(config, device=DEVICE, steps=1 << 20, **changes)
    training, tokens = _start(config, DEVICE), _tokens(config)

    def step() -> None:
        float(training.advance(tokens).nats)  # reading it waits for the device

    torch.cuda.reset_peak_memory_stats()
    call: Callable[[], None] = step
    timing = take_turns({"step": call}, repeats=3 if record.quick else REPEATS)["step"]
    record.fact(f"device memory, {name}", f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most")
    record.time(
        timing,
        model=f"training {RECIPE}",
        side=name,
        batch=config.batch,
        tokens=config.training.segment,
        multiply_adds=training_multiply_adds(config.model, config.training, config.batch),
        halves=config.autocast != "none",
    )


def _start(config: TrainConfig, device: str) -> Training:
    return Training.start(replace(config, steps=1 << 20), Ranks(device=torch.device(device)))


def _tokens(config: TrainConfig) -> np.ndarray:
    shape = (config.batch, 64 * config.training.segment + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab_size, shape)


def _without_dropout(config: TrainConfig) -> TrainConfig:
    """The same recipe, whose losses do not depend on the random numbers of a device."""
    return replace(config, model=replace(config.model, dropout=0.0, attention_dropout=0.0))


def _recipe(name: str) -> TrainConfig:
    """A built-in recipe over bytes, whose vocabulary needs no text."""
    config = TrainConfig.load(name)
    return replace(config, model=replace(config.model, vocab_size=256), vocab="byte")
