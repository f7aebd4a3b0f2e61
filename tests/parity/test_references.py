"""A reference that does not fit its artefact is refused by the check of every implementation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import check
from runtimes.base.errors import UserError
from runtimes.contract.spec import ANSWERS, REFERENCE, SPEC
from tests.parity.operations import Program, one_sentence
from tests.runtimes.tasks.references import Arrays, read_reference, write_reference
from tests.sealing import sealed

# The arrays of a language model's reference.
ARRAYS: list[Callable[[Arrays], Any]] = [
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
    lambda arrays: arrays.update(segments=arrays["segments"].sum()[None], restarts=arrays["restarts"][:1]),
    lambda arrays: arrays["last"].__setitem__((0, 0), np.nan),
    lambda arrays: arrays["log_probs"].__setitem__((0, 0), np.inf),
]
# Its file.
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
# The file of any other step.
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
FILES = [b"[" * 200_000, b'{"tokens": ' + b"9" * 100_000 + b"}", b"[]", b"null", b""]


def change_arrays(change: Callable[[Arrays], Any], folder: Path) -> None:
    arrays = read_reference(folder)
    change(arrays)
    write_reference(folder, arrays)


def change_document(change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    document = json.loads((folder / REFERENCE).read_text())
    change(document)
    (folder / REFERENCE).write_text(json.dumps(document))


def change_file(content: bytes, folder: Path) -> None:
    (folder / REFERENCE).write_bytes(content)


def cut_answers(folder: Path) -> None:
    (folder / ANSWERS).write_bytes((folder / ANSWERS).read_bytes()[:-4])


def remove_answers(folder: Path) -> None:
    (folder / ANSWERS).unlink()


def checked(entry_point: str | Program, folder: Path) -> str | bool:
    """Whether the check of an artefact passed, or why it was refused."""
    if isinstance(entry_point, Program):
        entry_point.ask("close")
        for op in ("open", "check"):
            answer = entry_point.ask(op, model=str(folder))
            if "error" in answer:
                return str(answer["error"])
        return bool(answer["passed"])
    try:
        return check(folder).passed
    except UserError as error:
        return one_sentence(str(error))


@pytest.mark.parametrize("entry_point", ["python", "cpp", "javascript"])
@pytest.mark.parametrize("kind", ["ring", "policy"])
def test_a_reference_that_does_not_fit_is_refused(
    kind: str, entry_point: str, artefacts: dict[str, Path], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    artefact = artefacts[kind] if kind in artefacts else request.getfixturevalue(kind)
    reader = entry_point if entry_point == "python" else request.getfixturevalue(entry_point)
    documents = DAMAGED if kind == "ring" else DAMAGED_STEPS
    changes: list[Callable[[Path], object]] = [
        *(partial(change_arrays, change) for change in ARRAYS if kind == "ring"),
        *(partial(change_document, change) for change in documents),
        *(partial(change_file, content) for content in FILES),
        cut_answers,
        remove_answers,
    ]
    assert checked(reader, artefact) is True
    accepted = []
    for number, change in enumerate(changes):
        folder = Path(shutil.copytree(artefact, tmp_path / str(number)))
        change(folder)
        names = [name for name in (REFERENCE, ANSWERS) if (folder / name).exists()]
        (folder / SPEC).write_bytes(sealed(json.loads((folder / SPEC).read_text()), folder, *names))
        verdict = checked(reader, folder)
        if isinstance(verdict, bool) or ("reference" not in verdict and "segment" not in verdict):
            accepted.append((number, change, verdict))
    assert accepted == []
