"""Measures what the heads of a trained model attend to, and how long their learned spans are."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError, TextError
from runtimes.contract.rule import MemoryRule
from trainer.model.attention import NO_TERMS, Terms, attention_weights, position_scores, relative_attention
from trainer.model.model import LanguageModel

FIGURE_7 = ("a", "b", "d")
HIGHLIGHTED = 0.2  # the share of the tokens before a target that Figure 6 marks


@dataclass(frozen=True)
class Observation:
    """What the heads of a model attended to in one text, by distance.

    An array has R columns, for the distances 0 … R - 1. All arrays are float64, except `seen`.
    """

    positions: int  # the number of tokens that the averages are over
    average: np.ndarray
    """[L, H, R]: the mean weights (Dai et al. 2019, Figure 5)."""
    persistent: np.ndarray | None
    """[L, H]: the mean share of persistent vectors in the same softmax, or None."""
    terms: dict[str, np.ndarray] | None
    """The terms `a`, `b` and `d` (Figure 7), [L, H, R] each, or None."""
    stretch: range  # the targets of Figure 6
    weights: np.ndarray  # [L, H, targets, R]: the weights of these targets
    seen: np.ndarray  # bool [targets, R]: the distances that the mask makes visible to each target

    @property
    def mean_distances(self) -> np.ndarray:
        """The mean distance that each head attends to, [L, H] in tokens; 0 without visible keys."""
        total = self.average.sum(-1)
        distances: np.ndarray = (
            self.average @ np.arange(self.average.shape[-1]) / np.where(total > 0, total, 1.0)
        )
        return distances

    def widest(self, layer: int | None = None, head: int | None = None) -> tuple[int, int]:
        """Returns the layer and the head with the largest mean distance.

        layer, head: one of them may be chosen before; None means all.
        """
        L, H = self.mean_distances.shape
        layers, heads = (range(n) if i is None else [i] for i, n in ((layer, L), (head, H)))
        return max(((i, j) for i in layers for j in heads), key=lambda at: float(self.mean_distances[at]))


def observe(
    model: LanguageModel, tokens: np.ndarray, rule: MemoryRule, *, stretch: range, terms: bool = False
) -> Observation:
    """Feeds tokens [N] segment by segment with memory, and returns what every head attended to.

    Averages are over the positions M … N - 1, which have a whole memory before them. (Dai et al. 2019,
    Appendix D, average over a validation set.) A distance that the mask hides counts as 0.

    As in the paper, Figure 7 does not show scores. For each of the terms (a) q·k, (b) q·r(d) and (d) v·r(d),
    the softmax of that term by itself is taken over the visible keys, and these distributions are averaged.
    Terms are divided by sqrt(K), as in the score. The mask of a learned span is left out, and so is the term
    (c) u·k, as in the paper, because it does not depend on the distance.

    Only the first half of the heads of `head-split` attends to the context. The model must be in evaluation
    mode. Raises TextError for a text without room for `stretch`, ConfigError for terms that the model does
    not have, and ArtefactError if the weights are not finite.
    """
    if terms and model.config.positions != "relative":
        raise ConfigError(
            f"the model has {model.config.positions} positions, whose scores have no terms (a) to (d); "
            "give a model with relative positions."
        )
    if not rule.mem_len <= stretch.start < stretch.stop <= len(tokens):
        raise TextError(
            f"targets {stretch.start} to {stretch.stop - 1} were asked for in {len(tokens)} tokens, and the "
            f"first {rule.mem_len} have no whole memory; give a longer text, or other targets."
        )
    L, H, R = model.config.layers, model.facts().context_heads, rule.longest_distance + 1
    average = torch.zeros(L, H, R, dtype=torch.float64)
    shares = torch.zeros(L, H, dtype=torch.float64) if model.config.sublayers == "all-attention" else None
    alone = {name: torch.zeros_like(average) for name in FIGURE_7} if terms else None
    kept = torch.zeros(L, H, len(stretch), R, dtype=torch.float64)
    seen = torch.zeros(len(stretch), R, dtype=torch.bool)
    start = 0  # the position of the segment
    layers = itertools.cycle(range(L))  # attention is called once for each layer, in order

    def recorded(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        visible: Tensor,
        terms: Terms = NO_TERMS,
        persistent: tuple[Tensor, Tensor] | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """`relative_attention`, whose weights are added to the arrays above."""
        layer = next(layers)
        T, J = query.shape[1], key.shape[1]
        own = None if persistent is None else persistent[0]
        weights_HTJ = attention_weights(query, key, visible=visible, terms=terms, persistent=own)[0]
        counted = slice(max(0, rule.mem_len - start), None)  # the tokens of the segment that are averaged
        context = by_distance(weights_HTJ[..., :J], R)
        average[layer] += context[:, counted].double().sum(1)
        if shares is not None:
            shares[layer] += weights_HTJ[:, counted, J:].double().sum((1, 2))
        if alone is not None:
            for name, scores in score_terms(query, key, terms).items():
                scores = scores[0] * query.shape[-1] ** -0.5
                term = scores.masked_fill(~visible, float("-inf")).softmax(-1)
                term = term.masked_fill(~visible, 0.0)  # without visible keys the softmax is NaN
                alone[name][layer] += by_distance(term, R)[:, counted].double().sum(1)
        first = max(stretch.start, start)
        last = min(stretch.stop, start + T)
        if first < last:  # targets of the stretch are in this segment
            here = slice(first - start, last - start)
            row = slice(first - stretch.start, last - stretch.start)
            kept[layer, :, row] = context[:, here].double()
            seen[row] = by_distance(visible[0], R)[here]
        return relative_attention(
            query, key, value, visible=visible, terms=terms, persistent=persistent, dropout=dropout
        )

    memory = model.start(1, rule)
    with torch.inference_mode():
        for start in range(0, len(tokens), rule.segment):
            piece = torch.from_numpy(tokens[start : start + rule.segment])[None]
            _, memory = model.layers(piece, memory, torch.tensor([start]), rule, attention=recorded)
    if not average.isfinite().all():
        raise ArtefactError(
            "the attention of this run is not finite: its training diverged; train again at a lower rate."
        )
    positions = len(tokens) - rule.mem_len
    return Observation(
        positions=positions,
        average=(average / positions).numpy(),
        persistent=None if shares is None else (shares / positions).numpy(),
        terms=alone and {name: (total / positions).numpy() for name, total in alone.items()},
        stretch=stretch,
        weights=kept.numpy(),
        seen=seen.numpy(),
    )


def by_distance(x: Tensor, distances: int) -> Tensor:
    """Returns values by distance, […, T, distances], for values by key, […, T, J].

    The value is 0 where there is no key at a distance.
    """
    T, J = x.shape[-2:]
    columns = (J - T + torch.arange(T))[:, None] - torch.arange(distances)
    taken = x.gather(-1, columns.clamp(min=0).expand(*x.shape[:-2], T, distances))
    return taken.masked_fill(columns < 0, 0)


def score_terms(query: Tensor, key: Tensor, terms: Terms) -> dict[str, Tensor]:
    """Returns the terms (a) q·k, (b) q·r(d) and (d) v·r(d) of relative positions, [B, H, T, J] each.

    They are not divided by sqrt(K) yet (Dai et al. 2019, section 3.3). query [B, T, H, K], key [B, J, H, K].
    """
    assert terms.v is not None, "these are not relative positions"
    alone = Terms(position=terms.position)
    return {
        "a": torch.einsum("bthk,bjhk->bhtj", query, key),
        "b": position_scores(query, alone),
        "d": position_scores(terms.v.expand_as(query), alone),
    }


def highlighted(weights: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Returns which tokens before each target have its highest weights, bool [targets, R].

    A fifth of the visible tokens is marked (Dai et al. 2019, Figure 6). weights, seen: [targets, R]. The
    target itself is not memory, and a token without weight is not marked.
    """
    before = np.where(seen, weights, 0.0)
    before[:, 0] = 0.0
    count = np.ceil(HIGHLIGHTED * seen[:, 1:].sum(-1))
    rank = (-before).argsort(axis=-1, kind="stable").argsort(axis=-1)
    marked: np.ndarray = (rank < count[:, None]) & (before > 0)
    return marked


@dataclass(frozen=True)
class LearnedSpans:
    """The learned spans of a model (Sukhbaatar et al. 2019a, section 3.2).

    With `head-split` only the heads that attend to the context are there.
    """

    maximum: int  # the longest span that the model can learn
    spans: tuple[tuple[float, ...], ...]  # z [L][H] in tokens
    longest_distances: tuple[tuple[int, ...], ...]
    """[L][H]: the longest distance to which each head gives any weight."""


def learned_spans(model: LanguageModel) -> LearnedSpans:
    """Returns the adaptive spans of a model; raises ConfigError if it has none."""
    if model.config.span is None:
        raise ConfigError("the model has no learned spans; give a run whose configuration has model.span.")
    H = model.facts().context_heads
    maximum = model.config.span.maximum
    return LearnedSpans(
        maximum=maximum,
        spans=tuple(tuple((span.share.detach().double() * maximum).tolist()[:H]) for span in model.spans()),
        longest_distances=tuple(span.longest_distances()[:H] for span in model.spans()),
    )
