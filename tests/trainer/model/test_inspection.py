"""What heads attend to, against one query and one key at a time; and learned spans against shares set by
hand."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import product
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
from trainer.model.naive import naive_attention

LENGTH = 26  # tokens; the rules here remember at most 16
XL = "transformer-xl-untied-pre-norm"
KINDS = [XL, "all-attention", "head-split", pytest.param("adaptive-span-full", marks=pytest.mark.slow)]


def text(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 70, length)


@cache
def spied(name: str) -> dict[str, np.ndarray]:
    """The naive weights [L, LENGTH, H, R] of a model of this kind on the text, by distance: all of them, and
    those of each term alone. In other segments than `observe` has, where that changes nothing.
    """
    model, rule = build(name)
    R = rule.longest_distance + 1
    found: dict[str, list[Tensor]] = defaultdict(list)

    def spy(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        visible: Tensor,
        terms: Terms = NO_TERMS,
        persistent: tuple[Tensor, Tensor] | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        (T, H), J = query.shape[1:3], key.shape[1]

        def note(name: str, query: Tensor, key: Tensor, terms: Terms, own: Tensor | None = None) -> None:
            """The answers for values that are unit vectors are the weights."""
            unit = torch.eye(J).to(query)[None, :, None].expand(1, J, H, J)
            nothing = None if own is None else (own, own.new_zeros(H, own.shape[1], J))
            by_key = naive_attention(query, key, unit, visible=visible, terms=terms, persistent=nothing)[0]
            by_distance = query.new_zeros(T, H, R)
            for i, d in product(range(T), range(R)):
                if d <= J - T + i:
                    by_distance[i, :, d] = by_key[i, :, J - T + i - d]
            found[name].append(by_distance)

        note("all", query, key, terms, None if persistent is None else persistent[0])
        if terms.v is not None:
            position = Terms(position=terms.position)
            note("a", query, key, NO_TERMS)
            note("b", query, torch.zeros_like(key), position)
            note("d", terms.v.expand_as(query), torch.zeros_like(key), position)
        return naive_attention(query, key, value, visible=visible, terms=terms, persistent=persistent)

    memory = model.start(1, rule)
    step = 5 if rule.mask == "same-length" else rule.segment
    with torch.no_grad():
        for start in range(0, LENGTH, step):
            piece = torch.from_numpy(text()[start : start + step])[None]
            _, memory = model.layers(piece, memory, torch.tensor([start]), rule, attention=spy)
    L = model.config.layers  # attention is called once for each layer, in order
    return {
        name: torch.stack([torch.cat(pieces[layer::L]) for layer in range(L)]).numpy()
        for name, pieces in found.items()
    }


def seen_by(name: str, stretch: range = range(20, 25), **options: Any) -> tuple[Observation, MemoryRule]:
    model, rule = build(name)
    return observe(model, text(), rule, stretch=stretch, **options), rule


@pytest.mark.parametrize("name", KINDS)
def test_observed_weights_equal_one_query_and_key_at_a_time(name: str) -> None:
    seen, rule = seen_by(name)
    assert seen.average.shape == (2, 1 if name == "head-split" else 2, rule.longest_distance + 1)
    weights = spied(name)["all"]
    counted = weights[:, rule.mem_len :]
    np.testing.assert_allclose(seen.average, counted.mean(1), rtol=1e-9, atol=1e-15)
    targets = weights[:, seen.stretch.start : seen.stretch.stop].transpose(0, 2, 1, 3)
    np.testing.assert_allclose(seen.weights, targets, rtol=1e-9, atol=1e-15)
    if seen.persistent is not None:
        np.testing.assert_allclose(seen.persistent, 1 - counted.sum(-1).mean(1), rtol=1e-9)
    assert (seen.persistent is not None) == (name == "all-attention")
    assert seen.terms is None


def test_figure_7_averages_the_softmax_of_each_term_alone() -> None:
    seen, rule = seen_by(XL, terms=True)
    assert seen.terms is not None
    assert list(seen.terms) == ["a", "b", "d"]
    for term, values in seen.terms.items():
        np.testing.assert_allclose(values.sum(-1), 1, rtol=1e-12)
        np.testing.assert_allclose(values, spied(XL)[term][:, rule.mem_len :].mean(1), rtol=1e-9)


def test_a_target_that_sees_nothing_counts_as_zeros() -> None:
    model, _ = build("transformer-xl")
    rule = MemoryRule(mem_len=0, segment=5, mask="full", include_self=False)  # each segment's first sees none
    seen = observe(model, text(30), rule, stretch=range(9), terms=True)
    assert seen.terms is not None
    for average in (seen.average, *seen.terms.values()):
        np.testing.assert_allclose(average.sum(-1), 4 / 5, rtol=1e-12)
    assert seen.seen.sum(-1).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


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
    # Half of the weight is on persistent vectors.
    average[0, 0, 1] = average[0, 1, 3] = average[1, 0, 4] = 0.5
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
    for stretch in (range(15, 20), range(25, 27), range(20, 20)):
        words = f"targets {stretch.start} to {stretch.stop - 1} were asked for in {LENGTH} tokens"
        with pytest.raises(TextError, match=words):
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
    # z + ramp, and at most the maximum
    assert learned.longest_distances == tuple(row[heads] for row in ((4, 12), (8, 16)))


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -0.1, 1.1])
def test_spans_that_no_training_leaves_are_refused(share: float) -> None:
    model, _ = build("adaptive-span")
    model.spans()[1].share.data[0] = share
    with pytest.raises(ArtefactError, match="not between 0 and 1 times"):
        learned_spans(model)
