"""A language model with segment recurrence, written as the papers write it.

It is Transformer-XL (Dai et al. 2019, sections 3.2 and 3.3), an all-attention network (Sukhbaatar et al.
2019b, section 4) or one of their baselines, as the configuration says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from runtimes.contract.model_facts import FROM_SEGMENT_END, ModelFacts
from runtimes.contract.rule import MemoryRule
from trainer.model.attention import AttentionFunction, Terms, relative_attention
from trainer.model.config import ModelConfig
from trainer.model.persistent import PersistentVectors, persistent_attention
from trainer.model.positions import make_positions
from trainer.model.span import AdaptiveSpan
from trainer.model.vocabulary import Vocabulary


@dataclass(frozen=True)
class Visibility:
    """Which keys the tokens of one segment see, and where they are; all layers share it. J = M + T keys.

    B is 1 where all rows are at the same position.
    """

    visible: Tensor  # bool [B, T, J]: whether a query sees a key; the segment's own keys are the last T
    before_start: Tensor | None
    """bool [B, J]: keys before the stream began, which are read as hidden states of zero; None if they are
    masked.
    """
    positions: Tensor  # int64 [B, T]: stream positions
    attention: AttentionFunction  # the function that computes attention, fast or naive
    longest: int | None = None
    """The largest distance that any query may see; None if that is not known."""

    def nearest(self, memory: int, longest: int | None) -> Visibility:
        """The visibility of the last `memory` tokens of the memory and of the segment."""
        unused = self.visible.shape[2] - self.visible.shape[1] - memory
        if not unused and longest is None:
            return self
        before = None if self.before_start is None else self.before_start[:, unused:]
        if longest is None or (self.longest is not None and self.longest < longest):
            longest = self.longest
        return replace(self, visible=self.visible[:, :, unused:], before_start=before, longest=longest)


def visibility_of(
    T: int, positions: Tensor, rule: MemoryRule, attention: AttentionFunction = relative_attention
) -> Visibility:
    """The visibility of a segment of T tokens whose first tokens are at the stream positions int64 [B].

    One position [1] means that all rows are there.
    """
    M = rule.mem_len
    columns = torch.arange(-M, T, device=positions.device)  # keys relative to the first query
    keys = positions[:, None] + columns  # stream positions [B, J]
    queries = keys[:, M:, None]  # [B, T, 1]
    visible = rule.visible(queries - keys[:, None], queries, columns[M:, None])
    before_start = (keys < 0) if rule.initial_memory == "zeros" else None
    longest = None if rule.window_grows else M
    return Visibility(visible, before_start, keys[:, M:], attention, longest)


class Block(nn.Module):
    """One layer: attention over memory and segment, and a feed-forward network or persistent vectors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        D = config.d_model
        width = config.heads * config.head_dim
        self.query = nn.Linear(D, width, bias=False)  # W_q
        self.key = nn.Linear(D, width, bias=False)  # W_kE
        self.value = nn.Linear(D, width, bias=False)  # W_v
        self.out = nn.Linear(width, D, bias=False)
        self.attention_norm = nn.LayerNorm(D, config.norm_epsilon)
        self.dropout = make_dropout(config.dropout, config)
        self.span = AdaptiveSpan(config) if config.span else None
        self.persistent = PersistentVectors(config) if config.persistent else None
        self.two_sublayers = config.sublayers in ("feed-forward", "ff-attn")
        if self.two_sublayers:
            self.feed_forward_norm = nn.LayerNorm(D, config.norm_epsilon)
        if config.d_ff:
            self.expand = nn.Linear(D, config.d_ff)
            self.contract = nn.Linear(config.d_ff, D)
            inside = config.dropout if config.inner_dropout is None else config.inner_dropout
            self.inner_dropout = make_dropout(inside, config)

    def forward(self, x: Tensor, memory: Tensor, terms: Terms, visibility: Visibility) -> Tensor:
        """x [B, T, D] and memory [B, M, D] → [B, T, D]."""
        M = memory.shape[1]
        past = memory.detach()  # SG(m)
        own = x  # h
        if visibility.before_start is not None:  # which may be padding in the segment too
            past = past.masked_fill(visibility.before_start[:, :M, None], 0.0)
            own = own.masked_fill(visibility.before_start[:, M:, None], 0.0)
        if self.config.pre_norm:
            past, own = self.attention_norm(past), self.attention_norm(own)
        query_input = own if self.config.pre_norm and self.config.query_norm else x
        # Memory and segment are not joined before they are projected: the memory needs no gradient.
        query = self.query(query_input)
        key = torch.cat([self.key(past), self.key(own)], dim=1)
        value = torch.cat([self.value(past), self.value(own)], dim=1)
        heads = (self.config.heads, self.config.head_dim)
        query, key, value = (y.unflatten(-1, heads) for y in (query, key, value))
        return self.rest(x, self.attend(query, key, value, terms, visibility))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, terms: Terms, visibility: Visibility
    ) -> Tensor:
        """The first sublayer's output [B, T, D] for query [B, T, H, K], key and value [B, J, H, K]."""
        terms = replace(terms, longest=visibility.longest)
        if self.span is not None:
            terms = replace(
                terms,
                gate=self.span.mask(key.shape[1]),
                window=self.span.softmax_window(),
                epsilon=self.span.span.epsilon,
            )
        dropout = self.config.attention_dropout if self.training else 0.0
        if self.persistent is None or self.two_sublayers:
            answer = visibility.attention(
                query, key, value, visible=visibility.visible, terms=terms, dropout=dropout
            )
        else:
            answer = self.persistent.attend(
                query,
                key,
                value,
                attention=visibility.attention,
                visible=visibility.visible,
                terms=terms,
                dropout=dropout,
            )
        answers: Tensor = self.dropout(self.out(answer.flatten(-2)))
        return answers

    def rest(self, x: Tensor, answers: Tensor) -> Tensor:
        """Returns the layer's output [B, T, D] for its input x and the first sublayer's answers.

        These are residuals, norms and the second sublayer.
        """
        if self.config.pre_norm:
            x = x + answers
            return x + self._second(self.feed_forward_norm(x)) if self.two_sublayers else x
        x = self.attention_norm(x + answers)
        return self.feed_forward_norm(x + self._second(x)) if self.two_sublayers else x

    def _second(self, x: Tensor) -> Tensor:
        """The second sublayer: a feed-forward network, or one with softmax for its ReLU, softmax(x K) V."""
        if self.persistent is not None:
            inner = persistent_attention(x[:, :, None], *self.persistent.scaled())[:, :, 0]
        else:
            inner = self.contract(self.inner_dropout(F.relu(self.expand(x))))
        dropped: Tensor = self.dropout(inner)
        return dropped


class LanguageModel(nn.Module):
    """The whole network: vocabulary, positions and L blocks. Its memory holds the inputs of each block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # see `TrainConfig`
        self.vocabulary = Vocabulary(config)
        self.positions = make_positions(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        embedding = config.dropout if config.embedding_dropout is None else config.embedding_dropout
        self.embedding_dropout = make_dropout(embedding, config)
        output = config.dropout if config.output_dropout is None else config.output_dropout
        self.output_dropout = make_dropout(output, config)
        last = config.layers - 1
        self.auxiliary = nn.ModuleDict(  # LAYER_AHEAD; the next token after the last layer needs none
            {
                f"{layer}_{ahead}": nn.Linear(config.d_model, config.vocab_size)
                for layer in range(0 if config.objective.intermediate else last, config.layers)
                for ahead in (1, 2)
                if (layer < last if ahead == 1 else config.objective.second_target)
            }
        )
        # A meta model has only shapes; drawing values for it would load PyTorch's compiler for seconds.
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives every parameter its value for the start of training, as the public code does.

        Matrices, u and v are drawn from Normal(0, 0.02). Biases are 0 and the scales of norms are 1. Learned
        positions, persistent vectors, and embeddings that are neither scaled nor tied start with unit
        variance. `initialization` of the configuration can give linear layers and embeddings other values.
        """
        unit_embeddings = not self.config.vocabulary.scale and not self.config.vocabulary.tie_weights
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif "bias" in name:
                nn.init.zeros_(parameter)
            else:
                std = self.positions.initial_std if name.startswith("positions.") else 0.02
                unit = unit_embeddings and name.startswith("vocabulary.table")
                nn.init.normal_(parameter, std=1.0 if unit else std)
        for module in self.modules():
            if isinstance(module, PersistentVectors | AdaptiveSpan):
                module.reset_parameters()
        if self.config.initialization == "uniform-fan-in":
            self.vocabulary.reset_to_uniform()
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        memory: list[Tensor],
        positions: Tensor,
        rule: MemoryRule,
        *,
        attention: AttentionFunction = relative_attention,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, T, V] of one segment, and the memory after it: see `layers` for the arguments."""
        outputs, after = self.layers(tokens, memory, positions, rule, attention=attention)
        return self.vocabulary.logits(self.last(outputs)), after

    def layers(
        self,
        tokens: Tensor,
        memory: list[Tensor],
        positions: Tensor,
        rule: MemoryRule,
        *,
        attention: AttentionFunction = relative_attention,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The output [B, T, D] of each layer, and the memory after the segment.

        The arguments are as in `inputs_and_outputs`; the memory after has M tokens too.
        """
        inputs, outputs = self.inputs_and_outputs(tokens, memory, positions, rule, attention=attention)
        T = tokens.shape[1]
        newest = max(0, tokens.shape[1] - rule.mem_len)
        pairs = zip(memory, inputs, strict=True)
        return outputs, [torch.cat([held[:, T:], x[:, newest:]], dim=1).detach() for held, x in pairs]

    def inputs_and_outputs(
        self,
        tokens: Tensor,
        memory: list[Tensor],
        positions: Tensor,
        rule: MemoryRule,
        *,
        attention: AttentionFunction = relative_attention,
        longest: Sequence[int] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The input [B, T, D] of each layer, without gradients, which the memory will hold, and its output.

        tokens int64 [B, T]; memory: the last M inputs of each layer, L tensors [B, M, D]; positions int64
        [B]: stream position of each row's first token, or [1] where all rows are at the same one. Memory from
        before position 0 is masked or read as zeros, as the rule says. No gradient flows into the memory.
        longest: for each layer, a distance beyond which no head has a weight (see `SpanLengths`). It changes
        no answer. The memory beyond it is not read, so it may be left out.
        """
        T, M = tokens.shape[1], rule.mem_len
        visibility = visibility_of(T, positions, rule, attention)
        vectors = self.positions.vectors(M + T, rule)
        x = self.embed(tokens)
        inputs = []
        outputs = []
        for layer, block in enumerate(self.blocks):
            x = self.positions.embed(layer, x, visibility.positions)
            inputs.append(x.detach())
            limit = None if longest is None else longest[layer]
            used = M if limit is None else min(M, limit)
            past = memory[layer][:, memory[layer].shape[1] - used :]
            terms = self.positions.terms(layer, vectors[: used + T])
            arguments = (x, past, terms, visibility.nearest(used, limit))
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, *arguments, use_reentrant=False)  # draws the same dropout again
            else:
                x = block(*arguments)
            outputs.append(x)
        return inputs, outputs

    def embed(self, tokens: Tensor) -> Tensor:
        """The input [B, T, D] of the first layer, before positions are added."""
        embedded: Tensor = self.embedding_dropout(self.vocabulary.embed(tokens))
        return embedded

    def last(self, outputs: list[Tensor]) -> Tensor:
        """The input [B, T, D] of the output layer."""
        last: Tensor = self.output_dropout(outputs[-1])
        return last

    def constrain(self) -> None:
        """Clamps spans that a step of the optimiser took out of their range."""
        for span in self.spans():
            span.constrain()

    def start(self, batch: int, rule: MemoryRule) -> list[Tensor]:
        """The memory of `batch` new streams.

        It holds zeros, which the rule masks or reads as hidden states of zero.
        """
        like = self.vocabulary.table["0"]
        return [like.new_zeros(batch, rule.mem_len, self.config.d_model) for _ in self.blocks]

    def longest_distances(self) -> tuple[tuple[int, ...], ...]:
        """Returns the longest distance that each head must remember, [L][H]; empty without adaptive spans."""
        return tuple(span.remembered() for span in self.spans())

    def spans(self) -> list[AdaptiveSpan]:
        """The adaptive spans of all layers; an empty list where the model has none."""
        return [module for module in self.modules() if isinstance(module, AdaptiveSpan)]

    def facts(self) -> ModelFacts:
        """The part of the configuration that an artefact carries."""
        c = self.config
        return ModelFacts(
            positions=c.positions + FROM_SEGMENT_END * c.from_segment_end,
            sublayers=c.sublayers,
            layers=c.layers,
            heads=c.heads,
            head_dim=c.head_dim,
            d_model=c.d_model,
            d_ff=c.d_ff,
            persistent=c.persistent,
            vocab_size=c.vocab_size,
            cutoffs=c.vocabulary.cutoffs,
            reaches=self.longest_distances(),
            pre_norm=c.pre_norm,
            parameters=count_parameters(c),
        )


class VariationalDropout(nn.Dropout):
    """Dropout of x [B, T, D] with one mask [B, 1, D] for all positions (Gal and Ghahramani 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(torch.ones_like(x[:, :1])) if self.training and self.p else x


def make_dropout(p: float, config: ModelConfig) -> nn.Dropout:
    """Dropout with probability p, of the kind that the configuration says."""
    return VariationalDropout(p) if config.variational_dropout else nn.Dropout(p)


@lru_cache(maxsize=64)
def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The name and shape of every parameter. Nothing is allocated."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in LanguageModel(config).named_parameters()}


@lru_cache(maxsize=64)
def count_parameters(config: ModelConfig) -> int:
    """The number of trained values that scoring uses, without the classifiers of training.

    Nothing is allocated.
    """
    shapes = parameter_shapes(config).items()
    return sum(shape.numel() for name, shape in shapes if not name.startswith("auxiliary."))
