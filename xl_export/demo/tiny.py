"""A small model of random weights: to try a GPU, not to write text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import ByteVocab, save_vocab
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel
from trainer.run.checkpoint import save_tensors
from trainer.run.config import TrainConfig
from trainer.run.history import MODEL, write_config
from xl_export.artefact.export import export


def export_tiny(folder: Path, **options: Any) -> Path:
    """The artefact, below a folder that exists. options: of `export`."""
    run = folder / "run"
    run.mkdir()
    # Heads are 16 wide: TensorRT-RTX has no fused attention for narrower ones.
    model = ModelConfig(layers=2, d_model=32, heads=2, head_dim=16, d_ff=64, vocab_size=256)
    rule = MemoryRule(mem_len=24, segment=8)
    config = TrainConfig(model=model, training=rule, evaluation=rule, vocab="byte", text=None)
    torch.manual_seed(0)
    write_config(run, config)
    save_vocab(run, ByteVocab())
    save_tensors(run / MODEL, LanguageModel(model).state_dict())
    return export(run, folder / "artefact", **options)
