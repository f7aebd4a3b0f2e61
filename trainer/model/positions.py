"""The kinds of position that a model can have.

They are terms of the attention scores, or vectors that are added to a layer's input.

A new kind is one subclass of `Positions` in this file. The exporter reads what the class computes
(`terms.py`), so the graph of a new kind needs no code of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtimes.base.errors import ConfigError
from runtimes.contract.rule import MAX_LENGTH, MemoryRule
from trainer.model.attention import Terms
from trainer.model.config import ModelConfig

KEPT_TABLES = 4  # tables of sinusoids that a model keeps: for training and for validation
KEPT_VALUES = 1 << 22  # a table with more values is not kept; only the rows that are needed are computed
KINDS: dict[str, type[Positions]] = {}  # each kind by its name in `ModelConfig.positions`


def frequencies(d_model: int) -> Tensor:
    """10000^(-2i/D), float64 [D/2]."""
    return 10000.0 ** -(torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu") / d_model)


def sinusoids(distances: Tensor, d_model: int, stored: Tensor | None = None) -> Tensor:
    """The position vectors R, float64 [N, D], of the distances [N]: [sin(d f), cos(d f)].

    f are the frequencies above, or `stored` ones from a checkpoint. Sines and cosines are two halves and are
    not interleaved, as in the public code.
    """
    f = frequencies(d_model) if stored is None else stored.double().cpu()
    angles = distances.double().cpu()[:, None] * f
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Positions(nn.Module):
    """A model without positions, and the base class of every kind of position.

    A subclass names itself, `class MyPositions(Positions, kind="mine")`, and overrides `terms` for what it
    contributes to attention scores, or `input_table` for what it adds to a layer's input. The class
    attributes say which options of the configuration the kind takes.
    """

    has_context = False  # `context` counts the rows of a table; otherwise it must be 0
    added_to_input = False  # the vectors are added to a layer's input, and `from_segment_end` may be set
    has_sinusoids = False  # d_model must be even, and `stored_frequencies` may be set
    initial_std = 0.02  # standard deviation of the parameters at the start of training

    frequencies: Tensor | None
    _tables: dict[tuple[object, ...], Tensor]  # sinusoids that were computed before

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        KINDS[kind] = cls

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self._tables = {}
        self.register_buffer(
            "frequencies", frequencies(config.d_model).float() if config.stored_frequencies else None
        )

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises ConfigError if options of the configuration do not fit this kind."""
        if cls.has_sinusoids and config.d_model % 2:
            raise ConfigError(
                f"model.d_model is {config.d_model}; {config.positions} positions need an even number, "
                "because one half of a position vector is sines and the other half is cosines."
            )
        if not (1 if cls.has_context else 0) <= config.context <= (MAX_LENGTH if cls.has_context else 0):
            expected = "0"
            if cls.has_context:
                expected = (
                    f"1 to {MAX_LENGTH:,}, the rows of their table; give --set model.context=N with the "
                    "tokens of memory and segment together"
                )
            raise ConfigError(
                f"model.context is {config.context}; {config.positions} positions take {expected}."
            )
        if config.from_segment_end and not cls.added_to_input:
            raise ConfigError(
                f"model.from_segment_end is true and model.positions is {config.positions}; expected a kind "
                "that is added to the input, which absolute and per-layer are."
            )
        if config.stored_frequencies and not cls.has_sinusoids:
            raise ConfigError(
                f"model.stored_frequencies is true and {config.positions} positions have no sinusoids; "
                "set it to false."
            )
        by_distance = cls.has_context and not cls.added_to_input
        if config.span and by_distance and config.context <= config.span.maximum:
            raise ConfigError(
                f"model.span.maximum is {config.span.maximum}, beyond the {config.context} rows of "
                f"model.context; give {config.span.maximum + 1} rows, for the distances 0 to "
                f"{config.span.maximum}."
            )

    def table_rows(self, rule: MemoryRule) -> int:
        """The number of distances, from 0 on, that have terms of their own.

        Longer ones use the last row.
        """
        own = self.has_context and not self.added_to_input
        return min(rule.position_rows, self.config.context) if own else rule.position_rows

    def vectors(self, count: int, rule: MemoryRule) -> Tensor:
        """Returns R [count, D], or the rows int64 [count] of a learned table."""
        last = count if rule.clamp_len is None else rule.clamp_len
        device = next((parameter.device for parameter in self.parameters()), None)
        return torch.arange(count, device=device).clamp(max=last)

    def _sinusoids(self, count: int, like: Tensor, clamp_len: int | None = None) -> Tensor:
        """The sinusoids [count, D] of the distances 0, 1, … as `like` stores numbers.

        They are computed in float64 once and kept. Stored frequencies may change when weights are loaded, so
        theirs are computed anew.
        """
        last = count if clamp_len is None else clamp_len
        key = (count, last, like.device, like.dtype)
        if key in self._tables:
            return self._tables[key]
        distances = torch.arange(count, device="cpu").clamp(max=last)
        table = sinusoids(distances, self.config.d_model, self.frequencies).to(like)
        # What inference computes cannot be used where gradients are. `torch.compile` cannot ask for it.
        inferred = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        if self.frequencies is None and not inferred:
            if len(self._tables) == KEPT_TABLES:
                self._tables.clear()
            self._tables[key] = table
        return table

    def terms(self, layer: int, vectors: Tensor) -> Terms:
        """One layer's terms of the attention scores, for the answer of `vectors`."""
        return Terms()

    def input_table(self, layer: int) -> Tensor | None:
        """The vectors [rows, D] that are added to a layer's input by stream position.

        None if nothing is added.

        Positions start again after the last row, or count from the segment's end: see `input_rows`.
        """
        return None

    def input_rows(self, position: Tensor) -> Tensor:
        """Returns the rows of `input_table` for stream positions int64 [B, T].

        The shape is [B, T], or [T] where rows are counted from the end of the segment.
        """
        if self.config.from_segment_end:
            distance = torch.arange(position.shape[1] - 1, -1, -1, device=position.device)
            return distance.clamp(max=self.config.context - 1)
        return position % self.config.context

    def embed(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        """The input [B, T, D] of a layer at stream positions int64 [B, T], with position vectors added."""
        table = self.input_table(layer)
        return x if table is None else x + table[self.input_rows(position)]


class RelativePositions(Positions, kind="relative"):
    """W_kR R_d, u and v (Dai et al. 2019, section 3.3)."""

    has_sinusoids = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        pairs = 1 if config.tie_biases else config.layers
        heads = (config.heads, config.head_dim)
        self.u = nn.Parameter(torch.empty(pairs, *heads))
        self.v = nn.Parameter(torch.empty(pairs, *heads))
        self.project = nn.ModuleList(  # W_kR
            nn.Linear(config.d_model, config.heads * config.head_dim, bias=False)
            for _ in range(config.layers)
        )

    def vectors(self, count: int, rule: MemoryRule) -> Tensor:
        """R [count, D]"""
        table = self._sinusoids(count, self.u, rule.clamp_len)
        return F.dropout(table, self.config.dropout, self.training)

    def terms(self, layer: int, vectors: Tensor) -> Terms:
        position = self.project[layer](vectors).unflatten(-1, (self.config.heads, self.config.head_dim))
        pair = 0 if self.config.tie_biases else layer
        return Terms(position=position, u=self.u[pair], v=self.v[pair])


class ShawPositions(Positions, kind="shaw"):
    """A learned vector and bias for each distance, head and layer (Shaw et al.

    2018, as in the code of Dai et al.).
    """

    has_context = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        L, R, H, K = config.layers, config.context, config.heads, config.head_dim
        self.u = nn.Parameter(torch.empty(L, H, K))
        self.table = nn.Parameter(torch.empty(L, R, H, K))
        self.table_bias = nn.Parameter(torch.zeros(L, R, H))

    def terms(self, layer: int, vectors: Tensor) -> Terms:
        rows = vectors.clamp(max=self.table.shape[1] - 1)
        return Terms(position=self.table[layer, rows], bias=self.table_bias[layer, rows], u=self.u[layer])


class LearnedPositions(Positions, kind="learned"):
    """One learned table, shared by all heads and layers (Sukhbaatar et al. 2019b, section 5.1)."""

    has_context = True
    initial_std = 1.0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = config.heads
        self.table = nn.Parameter(torch.empty(config.context, config.head_dim))

    def terms(self, layer: int, vectors: Tensor) -> Terms:
        rows = vectors.clamp(max=len(self.table) - 1)
        return Terms(position=self.table[rows][:, None].expand(-1, self.heads, -1))


class AbsolutePositions(Positions, kind="absolute"):
    """Sinusoids added to the first layer's input (Vaswani et al. 2017, section 3.5)."""

    has_context = True
    added_to_input = True
    has_sinusoids = True

    def input_table(self, layer: int) -> Tensor | None:
        return None if layer else self._of(torch.arange(self.config.context))

    def embed(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        if layer:
            return x
        rows = self.input_rows(position)
        context = self.config.context
        if context * self.config.d_model <= KEPT_VALUES:
            return x + self._sinusoids(context, x)[rows]
        return x + self._of(rows.flatten()).to(x).view(*rows.shape, -1)  # the context may be vast

    def _of(self, rows: Tensor) -> Tensor:
        return sinusoids(rows, self.config.d_model, self.frequencies)


class PerLayerPositions(Positions, kind="per-layer"):
    """Learned positions added to every layer's input (Al-Rfou et al. 2018)."""

    has_context = True
    added_to_input = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(config.layers, config.context, config.d_model))

    def input_table(self, layer: int) -> Tensor | None:
        return self.table[layer]


def make_positions(config: ModelConfig) -> Positions:
    """The positions that the configuration names; raises ConfigError if its options do not fit them."""
    if config.positions not in KINDS:
        raise ConfigError(f"model.positions is {config.positions!r:.40}; expected one of {', '.join(KINDS)}.")
    kind = KINDS[config.positions]
    kind.check(config)
    return kind(config)
