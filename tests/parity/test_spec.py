"""Edited specs whose digest fits: every implementation reads the same ones, and refuses the others in one
sentence.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import UserError
from runtimes.contract.spec import SPEC, read_spec
from tests.parity.operations import Program, one_sentence
from tests.runtimes.contract.mutation_worker import at, paths

ROOT = Path(__file__).parents[2]
MARK = "\x01"  # begins a text that is written without its quotes
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 1 << 12, 1 << 24, (1 << 24) + 1, 1 << 53, 1 << 64),
    *(0.5, -0.5, 1e300, MARK + "1.0", MARK + "1e0", MARK + "1e400", MARK + "-0", MARK + "NaN", MARK + "01"),
    *("", "x", "../x", "é" * 300, MARK + '"\\ud800"', MARK + '"\\u0000"', "batch", "a.b", "float16"),
    *([], [1], [[]], [[1]], ["cuts"], [1, 1], [1, 8], {}, {"a": "b"}, {"a": 1}),
)
OPTIONAL = (
    *("without", "fixed_rows", "fixed_tokens", "moves_every", "drifts_from", "rounding", "not_compared"),
    *("mean_rounding", "original_difference", "equals_up_to", "trained_tokens"),
    *("ids", "present", "when"),
)
# What is done, the path of an object or list, a key of it, and another value for the key.
Edit = tuple[str, tuple[Any, ...], Any, Any]


def edits(document: dict[str, Any]) -> Iterator[Edit]:
    """Every value replaced, deleted and repeated, and every key added that some artefact has."""
    for path in [(), *paths(document)]:
        node = at(document, path)
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            yield from (("replace", path, key, value) for value in VALUES)
            yield "delete", path, key, None
            yield "repeat", path, key, None
        if isinstance(node, dict):
            for key in sorted({"surprise", "digest", "identity", *OPTIONAL} - node.keys()):
                yield from (("replace", path, key, value) for value in VALUES)


def edited(document: dict[str, Any], edit: Edit) -> str:
    """The text of an edited spec."""
    what, path, key, value = edit
    copied = copy.deepcopy(document)
    node = at(copied, path)
    if what == "replace":
        node[key] = value
    elif what == "delete":
        del node[key]
    elif isinstance(node, list):
        node.append(node[key])
    else:
        node[f'{MARK}"{key}"'] = node[key]  # the key is there twice
    return written(copied)


def written(document: Any) -> str:
    """The JSON of a document; marked texts are as they are."""
    if isinstance(document, dict):
        return "{" + ", ".join(f"{written(key)}: {written(value)}" for key, value in document.items()) + "}"
    if isinstance(document, list):
        return "[" + ", ".join(map(written, document)) + "]"
    if isinstance(document, str) and document.startswith(MARK):
        return document[1:]
    return json.dumps(document, ensure_ascii=False)


def resealed(text: str) -> bytes:
    """The bytes of a spec with a digest that fits."""
    head = text.encode()[:-1] + b", "
    return head + f'"digest": "{hashlib.sha256(head).hexdigest()}"}}'.encode()


class Readers:
    """The three readers of `spec.json`."""

    def __init__(self, cpp: Program, javascript: Program, folder: Path) -> None:
        self.programs = {"cpp": cpp, "javascript": javascript}
        self.folder = folder

    def verdicts(self, content: bytes) -> dict[str, str]:
        """The sentence of each reader that refuses a spec; an empty one if it reads it."""
        (self.folder / SPEC).write_bytes(content)
        try:
            read_spec(self.folder / SPEC)
            found = {"python": ""}
        except UserError as error:
            found = {"python": one_sentence(str(error))}
        for name, program in self.programs.items():
            answer = program.ask("spec", folder=str(self.folder))
            found[name] = one_sentence(answer["error"]) if "error" in answer else ""
        return found


@pytest.fixture(scope="module")
def readers(cpp: Program, javascript: Program, tmp_path_factory: pytest.TempPathFactory) -> Readers:
    return Readers(cpp, javascript, tmp_path_factory.mktemp("edited"))


RELEASED = sorted(
    path.parent for path in (*ROOT.glob("examples/*/*/spec.json"), *ROOT.glob("tests/data/*/spec.json"))
)


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
MODELS = ["memory of bytes", "bytes, groups of heads", "words, adaptive softmax", "cartpole"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, 200) for name in MODELS),
        *(pytest.param(name, 8, marks=SLOW) for name in (*MODELS, "policy of 2 graphs")),
    ],
)
def test_an_edited_spec_has_one_verdict(
    name: str,
    part: int,
    readers: Readers,
    model: Callable[[str], Path],
    request: pytest.FixtureRequest,
) -> None:
    """Of one edit in `part`."""
    if name == "cartpole":
        folder = ROOT / "examples" / "policy" / name
    else:
        make = request.getfixturevalue("module_artefact") if name.startswith("policy") else model
        folder = make(name)
    document = json.loads((folder / SPEC).read_text())
    del document["digest"]
    assert set(readers.verdicts(resealed(written(document))).values()) == {""}
    every = list(edits(document))
    wrong, refused = [], 0
    for number in np.random.default_rng(part).choice(len(every), len(every) // part, replace=False):
        verdicts = readers.verdicts(resealed(edited(document, every[number])))
        refused += all(verdicts.values())
        if len({bool(sentence) for sentence in verdicts.values()}) > 1:
            wrong.append((every[number], verdicts))
    assert wrong == []
    assert 0.5 * len(every) < refused * part < len(every)


@pytest.mark.parametrize(
    "content",
    [
        lambda text: b"\xef\xbb\xbf" + resealed(text),
        lambda text: resealed(text) + b"x",
        lambda text: resealed(text).replace(b'"digest"', b'"digest" : "", "digest"'),
        lambda text: resealed(text).replace(b"fp32", b"fp\xff2"),
        lambda text: b"[" + resealed(text) + b"]",
        lambda text: b"[" * 100_000,
        lambda text: b"",
        lambda text: b"null",
    ],
)
def test_what_is_no_sealed_object_is_refused_by_all(
    content: Callable[[str], bytes], readers: Readers, model: Callable[[str], Path]
) -> None:
    document = json.loads((model("ring") / SPEC).read_text())
    del document["digest"]
    assert all(readers.verdicts(content(written(document))).values())


def test_released_specs_are_read_by_all(readers: Readers) -> None:
    assert RELEASED
    for folder in RELEASED:
        assert set(readers.verdicts((folder / SPEC).read_bytes()).values()) == {""}, folder


def test_tolerances_follow_the_roundings_in_all(readers: Readers) -> None:
    document = json.loads((ROOT / "examples" / "policy" / "cartpole" / SPEC).read_text())
    del document["digest"]
    document |= {"rounding": 0.0078125, "mean_rounding": 0.00390625, "tolerance": 0.125}
    for mean_tolerance, read in ((0.0625, True), (0.125, False)):
        document["mean_tolerance"] = mean_tolerance
        verdicts = readers.verdicts(resealed(written(document)))
        assert {not sentence for sentence in verdicts.values()} == {read}, verdicts
