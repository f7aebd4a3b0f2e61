"""Ranges and counts as messages show them."""

from __future__ import annotations

import pytest

from runtimes.base.ranges import Range, counted


@pytest.mark.parametrize(
    ("accepted", "words"),
    [
        (Range(1, 8, whole=True), "a whole number from 1 to 8"),
        (Range(1, 1, whole=True), "1"),
        (Range(0, 1, exclusive=True), "a number above 0 and at most 1"),
        (Range(0.5), "a number of at least 0.5"),
        (Range(), "a finite number"),
    ],
)
def test_a_range_in_words(accepted: Range, words: str) -> None:
    assert accepted.expected == words


def test_a_count_has_the_number_of_its_noun() -> None:
    assert [counted(count, "token") for count in (0, 1, 2000)] == ["0 tokens", "1 token", "2,000 tokens"]
