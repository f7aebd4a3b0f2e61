"""The public code of Sukhbaatar et al. 2019a and 2019b (facebookresearch/adaptive-span) as a reference."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.references.model import ReferenceModel
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig

MARKER = "adaptive_span.py"  # the file that tells the code's folder


class AdaptiveSpan(ReferenceModel):
    """Its `TransformerSeq`. Attention reaches `mem_len` tokens back, and never the token itself."""

    def __init__(self, folder: Path, config: ModelConfig, rule: MemoryRule) -> None:
        super().__init__(rule)
        sys.path.insert(0, str(folder))
        span = config.span
        self.width = config.d_model
        self.model = import_module("models").TransformerSeq(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            nb_heads=config.heads,
            nb_layers=config.layers,
            attn_span=rule.mem_len,
            emb_dropout=config.embedding_dropout or 0.0,
            inner_hidden_size=config.d_ff or 1,
            dropout=config.attention_dropout,
            adapt_io_params={"adapt_io_enabled": False},
            adapt_span_params={
                "adapt_span_enabled": span is not None,
                "adapt_span_loss": span.penalty if span else 0.0,
                "adapt_span_ramp": span.ramp if span else 32,
                "adapt_span_init": span.initial if span else 0.0,
                "adapt_span_cache": True,  # as all its launch scripts do
            },
            pers_mem_params={"pers_mem_size": config.persistent},
        )
        layers = self.model.get_submodule("layers").children()
        attentions: list[Any] = [layer.get_submodule("attn.attn") for layer in layers]
        self.attentions = attentions
        self.spans = [attention.adaptive_span for attention in attentions] if span else []

    def empty(self, lanes: int) -> list[Tensor]:
        lengths = [attention.get_cache_size() for attention in self.attentions]
        return [torch.zeros(lanes, length, self.width) for length in lengths]

    def losses(self, tokens: Tensor, targets: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        log_probs, memory, _ = self.model(tokens, memory, target=targets)
        return F.nll_loss(log_probs.transpose(1, 2), targets, reduction="none"), memory

    def penalty(self) -> Tensor:
        return torch.stack([span.get_loss() for span in self.spans]).sum() if self.spans else torch.zeros(())

    def constrain(self) -> None:
        for span in self.spans:
            span.clamp_param()

    def mean_span(self) -> float | None:
        shares = [span._mask.current_val.detach() for span in self.spans]
        return float(torch.stack(shares).mean()) * self.spans[0]._max_span if shares else None
