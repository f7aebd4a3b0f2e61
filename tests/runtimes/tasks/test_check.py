"""The proof inside an artefact: wrong numbers fail it. tests/parity refuses references that fit no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtimes import check
from runtimes.contract.spec import ANSWERS, REFERENCE
from tests.runtimes.tasks.references import Arrays, read_reference, write_reference


def rewrite(folder: Path, change: Callable[[Arrays], Any], reseal: Callable[..., None]) -> None:
    """Changes the arrays of the reference, as an exporter with a bug would: hashes and all."""
    arrays = read_reference(folder)
    change(arrays)
    write_reference(folder, arrays)
    reseal(folder, REFERENCE, ANSWERS)


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
@pytest.mark.parametrize("name", ["log_probs", "last"])
def test_one_wrong_answer_anywhere_fails_the_check(
    name: str, place: tuple[int, int], artefact: Path, reseal: Callable[..., None]
) -> None:
    def change(arrays: Arrays) -> None:
        arrays[name][place] += 0.001

    rewrite(artefact, change, reseal)
    assert not check(artefact).passed
