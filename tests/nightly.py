"""Cases of which the default suite runs a part, and `make test-slow` the rest."""

from __future__ import annotations

from collections.abc import Iterable
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
