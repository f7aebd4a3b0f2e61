"""The proof inside an artefact: wrong numbers fail it, a reference that fits no model is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import check, evaluate
from runtimes.base.errors import ArtefactError, StreamError
from runtimes.contract.session import Session
from runtimes.contract.spec import REFERENCE

Arrays = dict[str, Any]


def rewrite(folder: Path, change: Callable[[Arrays], Any], reseal: Callable[..., None]) -> None:
    """Changes the arrays of the reference, as an exporter with a bug would: hashes and all."""
    with np.load(folder / REFERENCE) as stored:
        arrays: Arrays = dict(stored)
    change(arrays)
    np.savez(folder / REFERENCE, **arrays)
    reseal(folder, REFERENCE)


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
@pytest.mark.parametrize("name", ["log_probs", "last"])
@pytest.mark.parametrize("error", [0.001, np.nan, np.inf])
def test_one_wrong_answer_anywhere_fails_the_check(
    name: str, place: tuple[int, int], error: float, artefact: Path, reseal: Callable[..., None]
) -> None:
    def change(arrays: Arrays) -> None:
        arrays[name][place] += error

    rewrite(artefact, change, reseal)
    assert not check(artefact).passed


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("last"),
        lambda arrays: arrays.update(more=arrays["last"]),
        lambda arrays: arrays["tokens"].__setitem__((0, 0), -1),
        lambda arrays: arrays["tokens"].__setitem__((0, 0), 1000),
        lambda arrays: arrays["tokens"].__setitem__((-1, -1), 1000),  # never fed, only predicted
        lambda arrays: arrays["tokens"].__setitem__((-1, -1), -1),
        lambda arrays: arrays.update(tokens=arrays["tokens"].astype(np.int32)),
        lambda arrays: arrays.update(tokens=arrays["tokens"][:, 1:]),
        lambda arrays: arrays.update(segments=arrays["segments"][:-1]),
        lambda arrays: arrays.update(segments=arrays["segments"][:, None]),
        lambda arrays: arrays.update(segments=arrays["segments"].sum(), restarts=arrays["restarts"][0]),
        lambda arrays: arrays.update(segments=arrays["segments"][:0], restarts=arrays["restarts"][:0]),
        lambda arrays: arrays["segments"].__setitem__(slice(2), [0, arrays["segments"][:2].sum()]),
        lambda arrays: arrays.update(restarts=arrays["restarts"].astype(np.int8)),
        lambda arrays: arrays.update(log_probs=arrays["log_probs"].astype(np.float64)),
        lambda arrays: arrays.update(log_probs=arrays["log_probs"][0]),
        lambda arrays: arrays.update({name: arrays[name][:0] for name in ("tokens", "log_probs", "last")}),
        lambda arrays: arrays.update(
            {name: arrays[name][:0] for name in ("tokens", "log_probs", "last")},
            restarts=arrays["restarts"][:, :0],
        ),
    ],
)
def test_a_reference_of_other_shapes_types_or_tokens_is_refused(
    change: Callable[[Arrays], Any], artefact: Path, reseal: Callable[..., None]
) -> None:
    rewrite(artefact, change, reseal)
    with pytest.raises(ArtefactError, match=r"reference\.npz does not hold"):
        check(artefact)


def test_a_reference_with_too_long_a_segment_is_refused(artefact: Path, reseal: Callable[..., None]) -> None:
    def join(arrays: Arrays) -> None:
        total = arrays["segments"].sum()
        arrays.update(segments=np.array([total]), restarts=arrays["restarts"][:1])

    rewrite(artefact, join, reseal)
    with pytest.raises(StreamError, match="this artefact takes 1 to 8"):
        check(artefact)


@pytest.mark.parametrize("segment", [0, -1, 9])
def test_a_segment_that_no_step_can_take_is_refused_by_evaluate(
    segment: int, sessions: dict[str, Session], tokens: np.ndarray
) -> None:
    with pytest.raises(StreamError, match="1 to 8"):
        evaluate(sessions["ring"], tokens[:50], segment=segment)
