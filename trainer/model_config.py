"""What a model is made of: sizes and options, as one JSON object."""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.errors import ConfigError
from runtimes.spec import MAX_LAYERS, MAX_SIZE


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a Transformer-XL (Dai et al. 2019, section 3).

    tie_biases: one u and v for all layers, as the paper writes it, or one pair for each. pre_norm:
    LayerNorm before each block instead of after it. vocab_size: 0 until the text has decided it.
    """

    layers: int
    d_model: int
    heads: int
    head_dim: int
    d_ff: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tie_biases: bool = True
    pre_norm: bool = False
    vocab_size: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "d_model", "heads", "head_dim", "d_ff"):
            most = MAX_LAYERS if name == "layers" else MAX_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; expected 1 to {most}.")
        if self.d_model % 2:
            raise ConfigError(f"model.d_model is {self.d_model}; expected an even number, half sines and half cosines.")
        if not 0 <= self.vocab_size <= MAX_SIZE:
            raise ConfigError(f"model.vocab_size is {self.vocab_size}; expected 0 (taken from the text) to {MAX_SIZE}.")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; expected at least 0 and below 1.")

    @property
    def parameters(self) -> int:
        """Number of trained values, without building the model."""
        width = self.heads * self.head_dim
        attention = 5 * self.d_model * width + 2 * self.d_model
        feed_forward = 2 * self.d_model * self.d_ff + self.d_ff + self.d_model + 2 * self.d_model
        biases = 2 * width * (1 if self.tie_biases else self.layers)
        return self.layers * (attention + feed_forward) + biases + self.vocab_size * (self.d_model + 1)
