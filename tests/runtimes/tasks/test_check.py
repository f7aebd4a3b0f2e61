"""The proof inside an artefact: wrong numbers fail it, a reference that fits no model is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import check
from runtimes.base.errors import ArtefactError, StreamError
from runtimes.contract.reference import load_reference, load_step_reference
from runtimes.contract.spec import ANSWERS, REFERENCE, load_spec
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


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays["tokens"].__setitem__((0, 0), -1),
        lambda arrays: arrays["tokens"].__setitem__((0, 0), 1000),
        lambda arrays: arrays["tokens"].__setitem__((-1, -1), 1000),  # never fed, only predicted
        lambda arrays: arrays["tokens"].__setitem__((-1, -1), -1),
        lambda arrays: arrays.update(tokens=arrays["tokens"][:, 1:]),
        lambda arrays: arrays.update(segments=arrays["segments"][:-1]),
        lambda arrays: arrays.update(segments=arrays["segments"][:0], restarts=arrays["restarts"][:0]),
        lambda arrays: arrays["segments"].__setitem__(slice(2), [0, arrays["segments"][:2].sum()]),
        lambda arrays: arrays.update(restarts=arrays["restarts"][:, :1]),
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
    with pytest.raises(ArtefactError, match=r"reference\.json does not hold a reference of this model"):
        load_reference(artefact, load_spec(artefact))


DAMAGED: list[Callable[[dict[str, Any]], Any]] = [
    lambda document: document.pop("last"),
    lambda document: document.update(more=1),
    lambda document: document.update(segments=3),
    lambda document: document.update(last=[[0.5]]),
    lambda document: document["tokens"][0].__setitem__(3, 1.0),
    lambda document: document["tokens"][0].__setitem__(3, float("nan")),
    lambda document: document["tokens"][0].__setitem__(3, 1 << 70),
    lambda document: document["tokens"][0].append(1),
    lambda document: document["restarts"][0].__setitem__(0, 1),
    lambda document: document["last"].update(dtype="float64"),
    lambda document: document["last"].update(file="weights.bin"),
    lambda document: document["last"].update(offset=-4),
    lambda document: document["last"].update(offset=1 << 80),
    lambda document: document["last"].update(shape=[1 << 40, 1 << 40]),
    lambda document: document["last"].update(shape=[-1, -1]),
    lambda document: document["log_probs"].update(shape=[4]),
]


@pytest.mark.parametrize("change", DAMAGED)
def test_a_damaged_reference_file_is_refused_in_one_sentence(
    change: Callable[[dict[str, Any]], Any], artefact: Path, reseal: Callable[..., None]
) -> None:
    document = json.loads((artefact / REFERENCE).read_text())
    change(document)
    (artefact / REFERENCE).write_text(json.dumps(document))
    reseal(artefact, REFERENCE)
    with pytest.raises(ArtefactError, match="does not hold a reference of this model; export the artefact"):
        load_reference(artefact, load_spec(artefact))


DAMAGED_STEPS: list[Callable[[dict[str, Any]], Any]] = [
    lambda document: document.pop("outputs"),
    lambda document: document.update(inputs=[]),
    lambda document: document.update(segments=3),
    lambda document: document.update(restarts=[]),
    lambda document: document["segments"].__setitem__(0, 0.5),
    lambda document: document["restarts"][0].__setitem__(0, 1),
    lambda document: document["inputs"].update(more=next(iter(document["inputs"].values()))),
    lambda document: next(iter(document["outputs"].values()))["shape"].append(1),
    lambda document: next(iter(document["outputs"].values())).update(offset=1 << 40),
]


def test_a_damaged_reference_of_a_step_is_refused(
    policy: Path, tmp_path: Path, reseal: Callable[..., None]
) -> None:
    folder = Path(shutil.copytree(policy, tmp_path / "policy"))
    whole = (folder / REFERENCE).read_text()
    for number, change in enumerate([lambda document: None, *DAMAGED_STEPS]):
        document = json.loads(whole)
        change(document)
        (folder / REFERENCE).write_text(json.dumps(document))
        reseal(folder, REFERENCE)
        with pytest.raises(ArtefactError, match="does not hold") if number else nullcontext():
            load_step_reference(folder, load_spec(folder))


def test_a_reference_with_damaged_answers_is_refused(artefact: Path, reseal: Callable[..., None]) -> None:
    whole = {name: (artefact / name).read_bytes() for name in (REFERENCE, ANSWERS)}
    for name, content, sentence in (
        (REFERENCE, b"[" * 200_000, "not valid JSON"),
        (REFERENCE, b'{"tokens": ' + b"9" * 100_000 + b"}", "not valid JSON"),
        (REFERENCE, b"[]", "does not hold a reference"),
        (ANSWERS, whole[ANSWERS][:-4], "does not hold"),
        (ANSWERS, whole[ANSWERS][:-4] + np.float32("nan").tobytes(), "not log-probabilities"),
        (ANSWERS, np.float32("inf").tobytes() + whole[ANSWERS][4:], "not log-probabilities"),
    ):
        (artefact / name).write_bytes(content)
        reseal(artefact, name)
        with pytest.raises(ArtefactError, match=sentence):
            load_reference(artefact, load_spec(artefact))
        (artefact / name).write_bytes(whole[name])
        reseal(artefact, name)
    assert check(artefact).passed
    (artefact / ANSWERS).unlink()
    with pytest.raises(ArtefactError, match=r"reference\.bin is missing"):
        check(artefact)


def test_a_reference_with_too_long_a_segment_is_refused(artefact: Path, reseal: Callable[..., None]) -> None:
    def join(arrays: Arrays) -> None:
        total = arrays["segments"].sum()
        arrays.update(segments=np.array([total]), restarts=arrays["restarts"][:1])

    rewrite(artefact, join, reseal)
    with pytest.raises(StreamError, match="this artefact takes 1 to 8"):
        check(artefact)
