"""What a spec says about the model: its kind, its sizes and the number of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from runtimes.base.errors import ConfigError
from runtimes.base.ranges import Range
from runtimes.base.records import refuse_out_of_range
from runtimes.base.sealed import Count

MAX_SIZE = 1 << 24  # of any one dimension; an absurd size becomes a sentence and not an allocation
MAX_LAYERS = 4096
FROM_SEGMENT_END = "-from-segment-end"
SELECTIVE_FROM = 8192  # tokens; the graph of a larger vocabulary computes only the requested logits

Size = Annotated[int, Range(0, MAX_SIZE, whole=True)]
Positive = Annotated[int, Range(1, MAX_SIZE, whole=True)]
Sublayers = Literal["feed-forward", "all-attention", "attn-split", "head-split", "single-head", "ff-attn"]
AnySublayers = Literal[Sublayers, "own"]  # `own`: of a module that this project did not define

SIZES = ("layers", "heads", "head_dim", "d_model", "vocab_size")  # that every model of this project has


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The kind of a model, its sizes, and the number of its parameters."""

    positions: str
    """Kind of positions, as in `trainer.model.config.ModelConfig`; `own` for a traced module that this
    project did not define. Positions that count from the last token of a segment end in FROM_SEGMENT_END.
    """
    sublayers: AnySublayers
    """Kind of sublayers, as in `ModelConfig`, or `own`."""
    layers: Annotated[int, Range(0, MAX_LAYERS, whole=True)]
    heads: Size
    head_dim: Size
    d_model: Size
    d_ff: Size
    persistent: Size  # the number of persistent vectors of a layer (N)
    vocab_size: Size  # 0 if the step is no language model
    cutoffs: tuple[Positive, ...]  # the first token of each tail cluster of an adaptive softmax
    reaches: tuple[tuple[Positive, ...], ...]
    """[L][H]: the longest distance at which each head has any weight; empty if spans were not learned."""
    pre_norm: bool
    parameters: Count

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        for name in SIZES:  # a traced module may leave its sizes out
            if getattr(self, name) == 0 and self.sublayers != "own":
                raise ConfigError(f"{name} is 0; expected 1 or more.")
        if self.reaches and (
            len(self.reaches) != self.layers or any(len(heads) != self.heads for heads in self.reaches)
        ):
            raise ConfigError(f"reaches does not have {self.layers} layers of {self.heads} heads.")

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
