"""Cases of which the default suite runs a part, and `make test-slow` the rest."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every(count: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: one in `count` by default, beginning with the first; the others are slow.

    A case of several parameters is a tuple.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if i % count else ()
        )
        for i, case in enumerate(cases)
    ]


def matrix(*dimensions: Sequence[Any], together: int = 2) -> list[Any]:
    """Parameters of a test: the product of the dimensions, of which most rows are slow.

    The default rows have every pair of values of two dimensions, or with `together=1` every value.
    """

    def parts(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(row), together))

    def worth(row: tuple[int, ...]) -> tuple[int, int]:
        return len(parts(row) & missing), -sum(used[value] for value in enumerate(row))

    rows = list(itertools.product(*(range(len(values)) for values in dimensions)))
    missing, chosen = set().union(*map(parts, rows)), set[tuple[int, ...]]()
    used: Counter[tuple[int, int]] = Counter()
    while missing:
        chosen.add(best := max(rows, key=worth))
        missing -= parts(best)
        used.update(enumerate(best))
    return [
        pytest.param(
            *(values[at] for values, at in zip(dimensions, row, strict=True)),
            marks=() if row in chosen else pytest.mark.slow,
        )
        for row in rows
    ]
