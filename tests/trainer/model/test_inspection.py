"""What heads attend to, against one query and one key at a time; and learned spans against shares set by
hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError, TextError
from runtimes.contract.rule import MemoryRule
from tests.trainer.model.test_architectures import build
from trainer.model.attention import NO_TERMS, Terms
from trainer.model.inspection import Observation, highlighted, learned_spans, observe
from trainer.model.naive import _score, naive_attention

LENGTH = 30  # tokens; the rules here remember at most 16
KINDS = ["transformer-xl-untied-pre-norm", "adaptive-span-full", "all-attention", "head-split"]


def text(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 70, length)


class Spy:
    """Naive attention that writes down every weight, and the softmax of every term alone, by layer, position
    and distance.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.calls, self.start = layers, 0, 0
        self.weights: dict[tuple[int, int, int], Tensor] = {}
        self.shares: dict[tuple[int, int], Tensor] = {}
        self.alone: dict[tuple[str, int, int, int], Tensor] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        visible: Tensor,
        terms: Terms = NO_TERMS,
        **rest: Any,
    ) -> Tensor:
        layer, (T, H, K), M = self.calls % self.layers, query.shape[1:], key.shape[1] - query.shape[1]
        self.calls += 1
        own = None if rest.get("persistent") is None else rest["persistent"][0]
        for i in range(T):
            q, distances = query[0, i], [M + i - j for j in range(M + T) if visible[0, i, j]]
            exps = [(_score(q, key[0, M + i - d], d, terms) / K**0.5).exp() for d in distances]
            if (
                terms.gate is not None
            ):  # the softmax times the mask, normalised again, is exp(score) times the mask, normalised
                exps = [exp * terms.gate[d] for exp, d in zip(exps, distances, strict=True)]
            rest_of_it = (
                torch.zeros(H) if own is None else ((own * q[:, None]).sum(-1) / K**0.5).exp().sum(-1)
            )
            total = sum(exps, rest_of_it)
            self.shares[layer, self.start + i] = rest_of_it / total
            for d, exp in zip(distances, exps, strict=True):
                self.weights[layer, self.start + i, d] = exp / total
            if terms.u is not None and terms.v is not None:
                self.write_terms(layer, self.start + i, q, {d: key[0, M + i - d] for d in distances}, terms)
        return naive_attention(query, key, value, visible=visible, terms=terms, **rest)

    def write_terms(
        self, layer: int, position: int, q: Tensor, keys: dict[int, Tensor], terms: Terms
    ) -> None:
        assert terms.position is not None
        for name, left in (("a", q), ("b", q), ("d", terms.v)):
            exps = {
                d: ((left * (k if name == "a" else terms.position[d])).sum(-1) / len(q[0]) ** 0.5).exp()
                for d, k in keys.items()
            }
            for d, exp in exps.items():
                self.alone[name, layer, position, d] = exp / sum(exps.values())


def spied(name: str, segment: int | None) -> Spy:
    """The text fed to a model of this kind with a spy, in segments of the rule's length or another."""
    model, rule = build(name)
    spy, memory, tokens, step = (
        Spy(model.config.layers),
        model.start(1, rule),
        torch.from_numpy(text())[None],
        segment or rule.segment,
    )
    with torch.no_grad():
        for spy.start in range(0, LENGTH, step):
            piece = tokens[:, spy.start : spy.start + step]
            _, memory = model.layers(piece, memory, torch.tensor([spy.start]), rule, attention=spy)
    return spy


def seen_by(name: str, stretch: range = range(20, 26), **options: Any) -> tuple[Observation, MemoryRule]:
    model, rule = build(name)
    return observe(model, text(), rule, stretch=stretch, **options), rule


@pytest.mark.parametrize("name", KINDS)
def test_observed_weights_equal_one_query_and_key_at_a_time(name: str) -> None:
    seen, rule = seen_by(name)
    spy = spied(name, 5 if rule.mask == "same-length" else None)  # where cutting a stream changes nothing
    assert seen.average.shape == (2, 1 if name == "head-split" else 2, rule.longest_distance + 1)
    L, H, R = seen.average.shape
    assert seen.positions == LENGTH - rule.mem_len
    zero = torch.zeros(H, dtype=torch.float64)
    for layer in range(L):
        shares = [spy.shares[layer, p] for p in range(rule.mem_len, LENGTH)]
        if seen.persistent is not None:
            np.testing.assert_allclose(seen.persistent[layer], torch.stack(shares).mean(0), rtol=1e-9)
        for d in range(R):
            weights = [spy.weights.get((layer, p, d), zero) for p in range(rule.mem_len, LENGTH)]
            np.testing.assert_allclose(
                seen.average[layer, :, d], torch.stack(weights).mean(0), rtol=1e-9, atol=1e-15
            )
            for row, p in enumerate(seen.stretch):
                np.testing.assert_allclose(
                    seen.weights[layer, :, row, d],
                    spy.weights.get((layer, p, d), zero),
                    rtol=1e-9,
                    atol=1e-15,
                )
                assert seen.seen[row, d] == ((layer, p, d) in spy.weights)
    assert (seen.persistent is not None) == (name == "all-attention")
    assert seen.terms is None


def test_figure_7_averages_the_softmax_of_each_term_alone() -> None:
    seen, rule = seen_by("transformer-xl-untied-pre-norm", terms=True)
    spy = spied("transformer-xl-untied-pre-norm", 7)
    assert seen.terms is not None
    assert list(seen.terms) == ["a", "b", "d"]
    for term, values in seen.terms.items():
        np.testing.assert_allclose(values.sum(-1), 1, rtol=1e-12)
        for layer in range(2):
            for d in range(rule.mem_len + 1):
                alone = torch.stack([spy.alone[term, layer, p, d] for p in range(rule.mem_len, LENGTH)])
                np.testing.assert_allclose(values[layer, :, d], alone.mean(0), rtol=1e-9)


def test_a_target_that_sees_nothing_counts_as_zeros() -> None:
    model, _ = build("transformer-xl")
    rule = MemoryRule(
        mem_len=0, segment=5, mask="full", include_self=False
    )  # as the first of each segment does
    seen = observe(model, text(), rule, stretch=range(9), terms=True)
    assert seen.terms is not None
    for average in (seen.average, *seen.terms.values()):
        np.testing.assert_allclose(average.sum(-1), 4 / 5, rtol=1e-12)
    assert not seen.seen[0].any()


def test_the_highest_fifth_of_what_precedes_each_target_is_marked() -> None:
    weights = np.array(
        [
            [0.9, 0.01, 0.02, 0.03, 0.01, 0.01, 0.0, 0.01, 0.0, 0.005, 0.005],  # two of ten
            [0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9],  # what has no weight is not marked
            [0.1, 0.3, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # four that are seen: one
            [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0],  # the nearest of equals
        ]
    )
    seen = np.ones(weights.shape, bool)
    seen[2, 5:] = False
    marked = highlighted(weights, seen)
    assert [row.nonzero()[0].tolist() for row in marked] == [[2, 3], [10], [1], [1, 2]]
    assert weights[0, 0] == 0.9, "the weights were changed"


def test_the_widest_head_has_the_largest_mean_distance() -> None:
    average = np.zeros((2, 2, 5))
    average[0, 0, 1] = average[0, 1, 3] = average[1, 0, 4] = (
        0.5  # half of the weight is of persistent vectors
    )
    average[1, 1, 2] = 1
    seen = Observation(1, average, None, None, range(1), np.zeros(0), np.zeros(0))
    assert seen.mean_distances.tolist() == [[1, 3], [4, 2]]
    assert (seen.widest(), seen.widest(layer=0), seen.widest(head=1), seen.widest(1, 1)) == (
        (1, 0),
        (0, 1),
        (0, 1),
        (1, 1),
    )


def test_what_cannot_be_observed_is_refused() -> None:
    model, rule = build("shaw")
    with pytest.raises(ConfigError, match=r"the model has shaw positions, whose scores have no terms"):
        observe(model, text(), rule, stretch=range(20, 22), terms=True)
    for stretch in (range(15, 20), range(29, 31), range(20, 20)):
        with pytest.raises(
            TextError, match=rf"targets {stretch.start} to {stretch.stop - 1} were asked for in 30 tokens"
        ):
            observe(model, text(), rule, stretch=stretch)
    model.blocks[0].query.weight.data[0, 0] = float("nan")
    with pytest.raises(ArtefactError, match="not finite"):
        observe(model, text(), rule, stretch=range(20, 22))


@pytest.mark.parametrize("name", ["adaptive-span", "head-split"])
def test_learned_spans_are_the_shares_of_the_maximum(name: str) -> None:
    model, _ = build(name)
    for span, shares in zip(model.spans(), ([0.0, 0.5], [0.25, 1.0]), strict=True):
        span.share.data = torch.tensor(shares, dtype=torch.float64)
    learned = learned_spans(model)
    assert learned.maximum == 16
    heads = slice(None if name == "adaptive-span" else 1)  # the first half of head-split looks at the context
    assert learned.spans == tuple(row[heads] for row in ((0.0, 8.0), (4.0, 16.0)))
    assert learned.longest_distances == tuple(
        row[heads] for row in ((4, 12), (8, 16))
    )  # z + ramp, and at most the maximum


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -0.1, 1.1])
def test_spans_that_no_training_leaves_are_refused(share: float) -> None:
    model, _ = build("adaptive-span")
    model.spans()[1].share.data[0] = share
    with pytest.raises(ArtefactError, match="not between 0 and 1 times"):
        learned_spans(model)
