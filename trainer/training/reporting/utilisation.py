"""The share of a device's peak that training reaches: model FLOPs utilisation (MFU, Chowdhery et al. 2022).

The numerator is arithmetic (`trainer.model.arithmetic`): three forward passes of a step, over all keys of the
memory, whether the mask hides them or not. With adaptive spans it is the part of the memory that each layer
computes with its current spans. The denominator is the peak of the device for matrix products in the
precision of training.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import torch

from trainer.model.arithmetic import training_multiply_adds
from trainer.run.config import TrainConfig
from trainer.training.parallel import Ranks
from trainer.training.schedule import training_rule

# Peaks of dense matrix products in 10^12 operations a second, from NVIDIA's data sheets: 16-bit numbers on
# tensor cores with sums in fp32, and fp32 without them. The first name that a device's name contains counts.
GPUS = {
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.5, 51.2),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "L40S": (362.1, 91.6),
    "L4": (121.0, 30.3),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
}
# Of the product that is timed on a CPU.
MATRIX_SIZE = 768
MATRIX_TRIALS = 6


def multiply_adds_per_token(config: TrainConfig, step: int, lengths: Sequence[int] | None = None) -> float:
    """The multiply-adds of one token of a step.

    lengths: for each layer, the tokens of the memory that it reads at most; None for all.
    """
    rule = training_rule(config, step)
    return training_multiply_adds(config.model, rule, 1, lengths) / rule.segment


def peak_multiply_adds(config: TrainConfig, ranks: Ranks) -> float | None:
    """The multiply-adds a second that the devices of all processes could do; None if that is unknown.

    It is `peak_tflops` of the configuration for each process, or a known GPU's, or measured on the CPU.
    """
    if config.peak_tflops is not None:
        each: float | None = config.peak_tflops
    elif ranks.device.type == "cuda":
        each = peak_of(torch.cuda.get_device_name(ranks.device), halves=config.autocast != "none")
    elif ranks.device.type == "cpu":
        each = _measured_tflops(torch.bfloat16 if config.autocast == "bf16" else torch.float32)
    else:
        each = None
    return None if each is None else each * 1e12 / 2 * ranks.count


def peak_of(name: str, *, halves: bool) -> float | None:
    """The peak of a GPU in TFLOPS by its name; None for one that is not in the table.

    halves: of 16-bit numbers; otherwise of fp32.
    """
    for known, (half, full) in GPUS.items():
        if all(re.search(rf"\b{word}\b", name) for word in known.split()):
            return half if halves else full
    return None


def _measured_tflops(dtype: torch.dtype) -> float:
    """The rate of the fastest of several matrix products. It draws no random numbers."""
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    with torch.inference_mode():
        times = []
        for _ in range(MATRIX_TRIALS):
            began = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - began)
    return float(2 * MATRIX_SIZE**3 / min(times) / 1e12)
