"""The configuration of a model: its sizes and options, as one JSON object."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Literal

from runtimes.base.errors import ConfigError
from runtimes.base.ranges import Range
from runtimes.base.records import refuse_out_of_range
from runtimes.contract.model_facts import MAX_LAYERS, Positive, Size, Sublayers

Share = Annotated[float, Range(0, 1, below=True)]


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig:
    """The input embedding and output softmax, plain or adaptive.

    Source: Grave et al. 2017; Baevski and Auli 2019.
    """

    cutoffs: tuple[int, ...] = ()
    """First token of each tail cluster, ascending; empty for a plain softmax."""
    d_embed: Size = 0
    """Width of the first cluster; 0 for d_model."""
    div_val: Positive = 1
    """Cluster i is d_embed // div_val**i wide. A cluster is projected to d_model unless it has that width and
    div_val is 1.
    """
    project_same_width: bool = True
    """Whether a cluster of width d_model is projected if div_val is not 1; the TensorFlow code of Dai et al.
    can leave this projection out.
    """
    tie_weights: bool = True
    """Input and output share their tables."""
    tie_projections: tuple[bool, ...] = ()
    """For each cluster, whether input and output share its projection; empty when all do."""
    scale: bool = True
    """Embeddings are multiplied by sqrt(d_model)."""

    def __post_init__(self) -> None:
        if any(first >= second for first, second in itertools.pairwise((0, *self.cutoffs))):
            raise ConfigError(
                f"vocabulary.cutoffs is {list(self.cutoffs)!s:.80}; expected positive token ids in "
                "ascending order."
            )
        refuse_out_of_range(self, "vocabulary.")
        if len(self.tie_projections) not in (0, len(self.cutoffs) + 1):
            raise ConfigError(
                f"vocabulary.tie_projections has {len(self.tie_projections)} entries; expected one for each "
                f"of the {len(self.cutoffs) + 1} clusters, or none to tie all."
            )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Tokens first … last - 1 of the vocabulary.

    Their tables are `width` wide and may be `projected` to d_model.
    """

    first: int
    last: int
    width: int
    projected: bool
    tied_projection: bool


@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """Adaptive attention span (Sukhbaatar et al. 2019a, section 3.2; 2019b, section 5.1)."""

    maximum: Positive
    """The longest span that a head can learn, in tokens (S)."""
    ramp: Positive = 32
    """Width of the soft edge, in tokens (R)."""
    penalty: Annotated[float, Range(0, 1e30)] = 0.0
    """The coefficient of the span loss."""
    initial: Annotated[float, Range(0, 1)] = 0.0
    """The spans at the start of training, as a share of the maximum."""
    epsilon: Share = 0.0
    """Added to the sum that masked weights are divided by; the public code of the paper adds 1e-8. A head
    whose softmax lies almost wholly outside its span then answers with less than one full weight, so an
    imported model needs it to give its project's scores.
    """

    def __post_init__(self) -> None:
        refuse_out_of_range(self, "span.")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What training minimises besides the mean negative log-likelihood of every position."""

    half: bool = False
    """Only the second half of each segment counts (the `half` rows of Dai et al. 2019, Table 6)."""
    intermediate: bool = False
    """Every layer predicts the next token too; layer l of L does until l / 2L of the training is done."""
    second_target: bool = False
    """The token after the next one is predicted too, at half weight (both Al-Rfou et al. 2018, section 3).
    The extra classifiers are used in training only.
    """


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A language model with segment recurrence, of either paper or one of their baselines."""

    layers: Annotated[int, Range(1, MAX_LAYERS, whole=True)]
    d_model: Positive
    heads: Positive
    head_dim: Positive
    d_ff: Size = 0
    positions: str = "relative"
    """The kind of position, one of `trainer.model.positions.KINDS`: `relative` (Dai et al. 2019, section
    3.3), `shaw` (Shaw et al. 2018: a learned vector for each distance, layer and head), `learned`
    (Sukhbaatar et al. 2019b: one learned table for all heads and layers), `absolute` (Vaswani et al. 2017:
    sinusoids added to the input) or `per-layer` (Al-Rfou et al. 2018: learned vectors added to every
    layer's input). Options that the kind does not take are refused when the model is made.
    """
    context: Size = 0
    """Rows of the position table; 0 for `relative`. Longer distances use the last row. Positions that are
    added to the input start again after the last row.
    """
    from_segment_end: bool = False
    """Positions that are added to the input count back from the last token of the segment, as in the public
    code, and those beyond `context` use the last row.
    """
    stored_frequencies: bool = False
    """The frequencies of sinusoids are a tensor of the checkpoint, `positions.frequencies`, and are not
    computed.
    """
    tie_biases: bool = True
    """All layers share one u and v."""
    pre_norm: bool = False
    """LayerNorm is before each sublayer instead of after it."""
    query_norm: bool = True
    """Under pre_norm, queries are computed from normalised inputs too."""
    norm_epsilon: Annotated[float, Range(0, 1, exclusive=True, below=True)] = 1e-5
    """Epsilon of every LayerNorm."""
    sublayers: Sublayers = "feed-forward"
    """`feed-forward` for attention and a feed-forward network. The other choices have persistent vectors in
    the place of the network (Sukhbaatar et al. 2019b): `all-attention` (one softmax over context and
    persistent vectors), and the variants of its Figure 2: `attn-split` (persistent vectors have a softmax
    of their own), `head-split` (half of the heads see only persistent vectors), `single-head` (as
    attn-split, but not split into heads) and `ff-attn` (a feed-forward network with softmax in the place
    of ReLU).
    """
    persistent: Size = 0
    """Vectors in each layer and head (N)."""
    span: SpanConfig | None = None
    """Adaptive spans, or null."""
    vocabulary: VocabularyConfig = VocabularyConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    initialization: Literal["normal", "uniform-fan-in"] = "normal"
    """The values that training starts from. `normal`: matrices from Normal(0, 0.02), biases 0, as the public
    code of Dai et al. `uniform-fan-in`: matrices and biases of linear layers from U(±1/√n) with n inputs,
    and embeddings from Normal(0, 1), which are the defaults of PyTorch and of the public code of
    Sukhbaatar et al.
    """
    dropout: Share = 0.0
    """Dropout of sublayers' outputs, position vectors and the last layer's output."""
    attention_dropout: Share = 0.0
    """Dropout of attention weights."""
    embedding_dropout: Share | None = None
    """Dropout of the embedding; `dropout` when null."""
    inner_dropout: Share | None = None
    """Dropout within the feed-forward network; `dropout` when null."""
    output_dropout: Share | None = None
    """Dropout of the last layer's output; `dropout` when null."""
    variational_dropout: bool = False
    """One mask for all positions of a segment."""
    vocab_size: Size = 0
    """0 until the text has decided it."""

    def __post_init__(self) -> None:
        refuse_out_of_range(self, "model.")
        self._check_sublayers()
        narrowest = (self.vocabulary.d_embed or self.d_model) // self.vocabulary.div_val ** len(
            self.vocabulary.cutoffs
        )
        if narrowest < 1:
            raise ConfigError(
                f"model.vocabulary.div_val is {self.vocabulary.div_val}, and the last cluster would have a "
                "width of 0; lower div_val, or give fewer cutoffs."
            )
        if self.vocab_size and self.vocabulary.cutoffs and self.vocabulary.cutoffs[-1] >= self.vocab_size:
            raise ConfigError(
                f"cutoffs is {list(self.vocabulary.cutoffs)!s:.80} and the vocabulary has {self.vocab_size} "
                "tokens; expected cutoffs below the number of tokens. Leave out the last cutoffs, or lower "
                "min_count."
            )

    def _check_sublayers(self) -> None:
        if self.sublayers == "feed-forward":
            fits = self.d_ff >= 1 and self.persistent == 0
            expected = "a d_ff of at least 1 and no persistent vectors"
        else:
            fits = self.persistent >= 1 and self.d_ff == 0
            expected = "at least 1 persistent vector and no d_ff"
        if not fits:
            raise ConfigError(
                f"model.d_ff is {self.d_ff} and model.persistent is {self.persistent}; {self.sublayers} "
                f"layers take {expected}."
            )
        if self.sublayers == "head-split" and self.heads % 2:
            raise ConfigError(f"model.heads is {self.heads}; head-split layers take an even number.")

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The clusters of the vocabulary, the shortlist first. A plain softmax has one cluster."""
        v = self.vocabulary
        widest = v.d_embed or self.d_model
        ends = (0, *v.cutoffs, self.vocab_size)
        return tuple(
            Cluster(
                first=first,
                last=last,
                width=widest // v.div_val**i,
                projected=widest // v.div_val**i != self.d_model or (v.div_val > 1 and v.project_same_width),
                tied_projection=not v.tie_projections or v.tie_projections[i],
            )
            for i, (first, last) in enumerate(itertools.pairwise(ends))
        )
