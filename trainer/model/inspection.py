"""What a trained model attends to, and how far its heads have learned to look: the numbers of the attention
pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError, TextError
from runtimes.base.machine import refuse_beyond_memory
from runtimes.contract.rule import MemoryRule
from trainer.model.attention import NO_TERMS, Terms, attention_weights, position_scores, relative_attention
from trainer.model.model import LanguageModel

FIGURE_7 = ("a", "b", "d")
HIGHLIGHTED = 0.2  # the share of the tokens before a target that Figure 6 marks


@dataclass(frozen=True)
class Observation:
    """What the heads of a model looked at in one text, by distance: R columns, 0 … R - 1 tokens back.

    Arrays of float64.

    positions: tokens averaged over. average [L, H, R]: mean weights (Dai et al. 2019, Figure 5). persistent
    [L, H]: the mean share that persistent vectors took of the same softmax, or None. terms: `a`, `b` and `d`
    (Figure 7), [L, H, R] each, or None. stretch: the targets of Figure 6; weights [L, H, targets, R], and
    seen bool [targets, R], what the mask let each see.
    """

    positions: int
    average: np.ndarray
    persistent: np.ndarray | None
    terms: dict[str, np.ndarray] | None
    stretch: range
    weights: np.ndarray
    seen: np.ndarray

    @property
    def mean_distances(self) -> np.ndarray:
        """How far back each head looks on average, [L, H] in tokens; 0 for a head that sees nothing."""
        total = self.average.sum(-1)
        distances: np.ndarray = (
            self.average @ np.arange(self.average.shape[-1]) / np.where(total > 0, total, 1.0)
        )
        return distances

    def widest(self, layer: int | None = None, head: int | None = None) -> tuple[int, int]:
        """Layer and head that look furthest back on average, among all or where one of the two is given."""
        L, H = self.mean_distances.shape
        layers, heads = (range(n) if i is None else [i] for i, n in ((layer, L), (head, H)))
        return max(((i, j) for i in layers for j in heads), key=lambda at: float(self.mean_distances[at]))


def observe(
    model: LanguageModel, tokens: np.ndarray, rule: MemoryRule, *, stretch: range, terms: bool = False
) -> Observation:
    """Feeds tokens [N] segment by segment with memory, and says what every head looked at.

    Averages are over the positions that have a whole memory before them, M … N - 1, as those of Dai et al.
    2019, Appendix D, are over a validation set; a distance that the mask hides counts as 0. Figure 7, as
    there, is not of scores: of each term, (a) q·k, (b) q·r(d) and (d) v·r(d), the softmax of it alone is
    taken over what a token sees, and these distributions are averaged. Terms are divided by sqrt(K), as in
    the score; a learned span's mask is left out. So is (c) u·k, as in the paper: it knows no distance.
    `head-split` has context heads in the first half only. The model must be in evaluation mode. Raises
    TextError for a text without room for `stretch`, ConfigError for terms that the model does not have.
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
    _refuse_if_too_large(model, rule, len(stretch), len(tokens))
    recorder = _Recorder(model, rule, stretch, terms)
    memory = model.start(1, rule)
    with torch.inference_mode():
        for start in range(0, len(tokens), rule.segment):
            piece = torch.from_numpy(tokens[start : start + rule.segment])[None]
            recorder.begin(start)
            _, memory = model.layers(piece, memory, torch.tensor([start]), rule, attention=recorder)
    return recorder.observation(len(tokens) - rule.mem_len)


class _Recorder:
    """`relative_attention`, called once for each layer in order, that also keeps what the heads look at."""

    def __init__(self, model: LanguageModel, rule: MemoryRule, stretch: range, terms: bool) -> None:
        L, H, R = model.config.layers, model.facts().context_heads, rule.longest_distance + 1
        self.first, self.stretch = rule.mem_len, stretch
        self.average = torch.zeros(L, H, R, dtype=torch.float64)
        self.persistent = (
            torch.zeros(L, H, dtype=torch.float64) if model.config.sublayers == "all-attention" else None
        )
        self.terms = {name: torch.zeros_like(self.average) for name in FIGURE_7} if terms else None
        self.weights = torch.zeros(L, H, len(stretch), R, dtype=torch.float64)
        self.seen = torch.zeros(len(stretch), R, dtype=torch.bool)

    def begin(self, start: int) -> None:
        """A segment begins at this position."""
        self.start, self.layer = start, 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        visible: Tensor,
        terms: Terms = NO_TERMS,
        persistent: tuple[Tensor, Tensor] | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        own = None if persistent is None else persistent[0]
        weights = attention_weights(query, key, visible=visible, terms=terms, persistent=own)[
            0
        ]  # [H, T, J + N]
        counted = slice(max(0, self.first - self.start), None)  # of the segment's tokens
        J, R = key.shape[1], self.average.shape[-1]
        context = by_distance(weights[..., :J], R)
        self.average[self.layer] += context[:, counted].double().sum(1)
        if self.persistent is not None:
            self.persistent[self.layer] += weights[:, counted, J:].double().sum((1, 2))
        if self.terms is not None:
            scores = score_terms(query, key, terms)
            for name, total in self.terms.items():
                alone = (
                    (scores[name][0] * query.shape[-1] ** -0.5)
                    .masked_fill(~visible, float("-inf"))
                    .softmax(-1)
                )
                alone = alone.masked_fill(~visible, 0.0)  # the softmax of a target that sees nothing is NaN
                total[self.layer] += by_distance(alone, R)[:, counted].double().sum(1)
        self._keep(context, by_distance(visible[0], R))
        self.layer += 1
        return relative_attention(
            query, key, value, visible=visible, terms=terms, persistent=persistent, dropout=dropout
        )

    def _keep(self, context: Tensor, seen: Tensor) -> None:
        """Keeps those targets of the stretch that are in this segment."""
        first, last = max(self.stretch.start, self.start), min(self.stretch.stop, self.start + len(seen))
        if first < last:
            here, kept = (
                slice(first - self.start, last - self.start),
                slice(first - self.stretch.start, last - self.stretch.start),
            )
            self.weights[self.layer, :, kept] = context[:, here].double()
            self.seen[kept] = seen[here]

    def observation(self, positions: int) -> Observation:
        """The sums over this many positions as means; raises ArtefactError where they are not numbers."""
        if not self.average.isfinite().all():
            raise ArtefactError(
                "the attention of this run is not finite: its training diverged; train again at a lower rate."
            )
        return Observation(
            positions=positions,
            average=(self.average / positions).numpy(),
            persistent=None if self.persistent is None else (self.persistent / positions).numpy(),
            terms=None
            if self.terms is None
            else {name: (total / positions).numpy() for name, total in self.terms.items()},
            stretch=self.stretch,
            weights=self.weights.numpy(),
            seen=self.seen.numpy(),
        )


def by_distance(x: Tensor, distances: int) -> Tensor:
    """[…, T, J] with a column for each key as […, T, distances] with one for each distance.

    0 where there is no such key.
    """
    T, J = x.shape[-2:]
    columns = (J - T + torch.arange(T))[:, None] - torch.arange(distances)
    taken = x.gather(-1, columns.clamp(min=0).expand(*x.shape[:-2], T, distances))
    return taken.masked_fill(columns < 0, 0)


def score_terms(query: Tensor, key: Tensor, terms: Terms) -> dict[str, Tensor]:
    """The four terms of relative positions, [B, H, T, J] each (Dai et al.

    2019, section 3.3): they add up to the score.

    (a) q·k, (b) q·r(d), (c) u·k and (d) v·r(d), before division by sqrt(K). query [B, T, H, K], key [B, J, H,
    K].
    """
    assert terms.u is not None, "these are not relative positions"
    assert terms.v is not None, "these are not relative positions"
    alone = Terms(position=terms.position)
    return {
        "a": torch.einsum("bthk,bjhk->bhtj", query, key),
        "b": position_scores(query, alone),
        "c": torch.einsum("bthk,bjhk->bhtj", terms.u.expand_as(query), key),
        "d": position_scores(terms.v.expand_as(query), alone),
    }


def highlighted(weights: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Which of the tokens before each target have the highest weights of it: a fifth of those that it sees,
    bool [targets, R].

    (Dai et al. 2019, Figure 6.) weights, seen [targets, R]. The target itself is no memory; what has no
    weight is not marked.
    """
    before = np.where(seen, weights, 0.0)
    before[:, 0] = 0.0
    count = np.ceil(HIGHLIGHTED * seen[:, 1:].sum(-1))
    rank = (-before).argsort(axis=-1, kind="stable").argsort(axis=-1)
    marked: np.ndarray = (rank < count[:, None]) & (before > 0)
    return marked


@dataclass(frozen=True)
class LearnedSpans:
    """Spans z in tokens, [L][H], and the longest distance that each head gives any weight, of at most
    `maximum` each.

    (Sukhbaatar et al. 2019a, section 3.2.) Of `head-split` the heads that look at the context.
    """

    maximum: int
    spans: tuple[tuple[float, ...], ...]
    longest_distances: tuple[tuple[int, ...], ...]


def learned_spans(model: LanguageModel) -> LearnedSpans:
    """The adaptive spans of a model; raises ConfigError where it has none."""
    if model.config.span is None:
        raise ConfigError("the model has no learned spans; give a run whose configuration has model.span.")
    H, maximum = model.facts().context_heads, model.config.span.maximum
    return LearnedSpans(
        maximum=maximum,
        spans=tuple(tuple((span.share.detach().double() * maximum).tolist()[:H]) for span in model.spans()),
        longest_distances=tuple(span.longest_distances()[:H] for span in model.spans()),
    )


def _refuse_if_too_large(model: LanguageModel, rule: MemoryRule, targets: int, length: int) -> None:
    """Raises StreamError where what is kept, or the scores of one segment, would not fit this machine."""
    L, H, R, T = model.config.layers, model.config.heads, rule.longest_distance + 1, min(rule.segment, length)
    needed = (
        8 * L * H * R * (4 + targets)
        + 4 * 12 * H * T * (rule.mem_len + T)
        + 8 * L * (rule.mem_len + T) * model.config.d_model
    )
    refuse_beyond_memory(
        needed,
        what=f"the attention of {H} heads over memory {rule.mem_len} and segments of {T}",
        mend="lower evaluation.segment or evaluation.mem_len in the run's config.json",
    )
