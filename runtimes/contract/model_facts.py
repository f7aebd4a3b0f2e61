"""What a spec says about the model: its kind, its sizes and the number of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtimes.base.errors import ConfigError

MAX_SIZE = 1 << 24  # of any one dimension; an absurd size becomes a sentence and not an allocation
MAX_LAYERS = 4096
FROM_SEGMENT_END = "-from-segment-end"
SELECTIVE_FROM = 8192  # tokens; the graph of a larger vocabulary computes only the requested logits

Sublayers = Literal["feed-forward", "all-attention", "attn-split", "head-split", "single-head", "ff-attn"]
AnySublayers = Literal[Sublayers, "own"]  # `own`: of a module that this project did not define


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The kind of a model, its sizes, and the number of its parameters."""

    # Positions and sublayers are named as in `trainer.model.config.ModelConfig`, and `own` for a traced
    # module that this project did not define. Positions that count from the last token of a segment end in
    # FROM_SEGMENT_END.
    positions: str
    sublayers: AnySublayers
    layers: int
    heads: int
    head_dim: int
    d_model: int
    d_ff: int
    persistent: int  # the number of persistent vectors of a layer (N)
    vocab_size: int  # 0 of a step that is no language model
    cutoffs: tuple[int, ...]  # the first token of each tail cluster of an adaptive softmax
    # [L][H]: the longest distance at which each head has any weight; empty if spans were not learned.
    reaches: tuple[tuple[int, ...], ...]
    pre_norm: bool
    parameters: int

    def __post_init__(self) -> None:
        least = 0 if self.sublayers == "own" else 1  # a traced module may leave its sizes out
        for name in ("layers", "heads", "head_dim", "d_model", "vocab_size"):
            most = MAX_LAYERS if name == "layers" else MAX_SIZE
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected {least} to {most}.")
        if self.reaches and (
            len(self.reaches) != self.layers or any(len(heads) != self.heads for heads in self.reaches)
        ):
            raise ConfigError(f"reaches does not have {self.layers} layers of {self.heads} heads.")
        if any(not 1 <= reach <= MAX_SIZE for heads in self.reaches for reach in heads):
            raise ConfigError(f"reaches has a distance outside 1 to {MAX_SIZE}.")

    @property
    def context_heads(self) -> int:
        """The number of heads that attend to the context: the first half of them in `head-split`, else
        all.
        """
        return self.heads // 2 if self.sublayers == "head-split" else self.heads

    @property
    def growing_bytes_per_token(self) -> int:
        """What each token would add to a growing cache of keys and values in float32."""
        return 2 * 4 * self.layers * self.context_heads * self.head_dim

    @property
    def selective(self) -> bool:
        """Whether the graph computes only the requested logits, as it does for a large vocabulary."""
        return is_selective(self.cutoffs, self.vocab_size)


def is_selective(cutoffs: tuple[int, ...], vocab_size: int) -> bool:
    """Whether a vocabulary is large enough for `ModelFacts.selective`."""
    return bool(cutoffs) or vocab_size > SELECTIVE_FROM
