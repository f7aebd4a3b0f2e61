"""The models of the first hour: published shapes with seeded random weights, and their exports."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.configs import CONFIGS, BenchmarkConfig
from benchmarks.first_hour.record import Record
from benchmarks.models import random_weights, write_run
from runtimes.contract.engine import Attention
from runtimes.contract.precision import MemoryPrecision, Precision
from runtimes.contract.rule import Mask, MemoryRule
from runtimes.contract.tensors import Form
from trainer.model.config import ModelConfig
from xl_export import export

# Heads are 16 wide at least: TensorRT-RTX has no fused attention for narrower ones.
TINY = ModelConfig(layers=2, d_model=32, heads=2, head_dim=16, d_ff=64, vocab_size=256)
LETTERS = 27  # symbols of text8
Target = Literal["onnxruntime", "tensorrt"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One graph of a model. attention: what the attention of a graph for TensorRT is written as.

    memory: the precision of the memory tensors in a graph for ONNX Runtime; one for TensorRT has its own.
    mask: that of the artefact's rule.
    """

    target: Target
    form: Form
    precision: Precision
    attention: Attention = "plugin"
    memory: MemoryPrecision = "fp32"
    mask: Mask = "same-length"

    @property
    def folder(self) -> str:
        by_target = self.memory if self.target == "onnxruntime" else self.attention
        return f"{self.target}-{self.form}-{self.precision}-{by_target}" + "-full" * (self.mask == "full")


def config_of(size: str, *, quick: bool) -> BenchmarkConfig:
    """The sizes of a model: `small`, `enwik8-base`, `wt103-base` or `text8-large`.

    With `quick` they are tiny, under the same name.
    """
    if quick:
        base = CONFIGS["small"]
        return replace(base, name=size, model=TINY, segment=8, mem_len=24, token_repeats=6, repeats=3)
    if size == "text8-large":  # the same network as that of enwik8, for the 27 symbols of text8
        large = CONFIGS["enwik8-large"]
        return replace(large, name=size, model=replace(large.model, vocab_size=LETTERS))
    return CONFIGS[size]


def rule_of(config: BenchmarkConfig, mask: Mask = "same-length") -> MemoryRule:
    """The memory rule of a model under a mask."""
    return MemoryRule(mem_len=config.mem_len, segment=config.segment, mask=mask)


def run_folder(record: Record, config: BenchmarkConfig, *, seed: int = 0) -> Path:
    """The run folder of a model with seeded random weights; it is written when it is asked for first."""
    run = record.work / config.name / "run"
    whole = run.with_name("run-is-whole")
    if not whole.exists():  # an earlier step may have been killed while it wrote
        shutil.rmtree(run, ignore_errors=True)
        write_run(run, config.model, rule_of(config), random_weights(config.model, seed=seed))
        whole.touch()
    return run


def artefact_of(record: Record, config: BenchmarkConfig, kind: Kind, *, seed: int = 0) -> Path:
    """The artefact of a model in one kind of graph, compared with PyTorch when it is asked for first.

    seed: of its weights, which must be the same for all models of a name.
    """
    run = run_folder(record, config, seed=seed)
    out = run.parent / kind.folder
    if not out.exists():  # an export is whole or absent
        made: Path = export(
            run,
            out,
            memory=kind.form,
            rule=rule_of(config, kind.mask),
            target=kind.target,
            attention=kind.attention,
            precision=kind.precision,
            memory_precision=kind.memory if kind.target == "onnxruntime" else None,
        )
        assert made == out
    return out
