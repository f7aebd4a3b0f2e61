"""The pages on the format name exactly the fields that there are, and are enough to write a reader.

What they say of the digest is computed here by an implementation that shares nothing with the project: it
never converts a number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from runtimes.base.sealed import FileFacts, identity_of
from runtimes.contract.model_facts import ModelFacts
from runtimes.contract.precision import MEAN_TOLERANCES, TOLERANCES, Measured
from runtimes.contract.reference import ReferenceFile, StoredArray
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import ADDED_FIELDS, Spec, load_spec
from runtimes.contract.tensors import ListedTensor, StateFacts
from runtimes.contract.vocabulary import SpecialTokens
from runtimes.contract.vocabulary.word import WORD_OPTIONS
from tests.docs.pages import FORMAT, ROOT

PAGE = FORMAT
QUOTED = re.compile(r"`([^`\n]+)`")
TABLES: dict[str, tuple[type, set[str]]] = {  # what begins a section, its record, and what else its table has
    "## spec.json": (Spec, {"digest"}),
    "**`model`**": (ModelFacts, set()),
    "**`rule`**": (MemoryRule, set()),
    "**`state`**": (StateFacts, set()),
    "**`inputs` and `outputs`**": (ListedTensor, set()),
    "**`files`**": (FileFacts, set()),
    "**`measured`**": (Measured, set()),
    "**`special`**": (SpecialTokens, set()),
    "## reference.json and reference.bin": (ReferenceFile, set()),
    "`log_probs` and `last` are objects": (StoredArray, set()),
}


def table(beginning: str) -> list[list[str]]:
    """The cells of the first table after a beginning of a line, row by row, without its head."""
    after = PAGE.split(f"\n{beginning}", 1)[1]
    lines = after[after.index("\n|") + 1 :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("beginning", TABLES)
def test_each_table_has_the_fields_of_its_record_and_no_other(beginning: str) -> None:
    record, more = TABLES[beginning]
    named = [name for cells in table(beginning) for name in QUOTED.findall(cells[0])]
    assert len(named) == len(set(named))
    assert set(named) == {field.name for field in dataclasses.fields(record)} | more


def test_the_page_names_added_fields_and_the_options_of_words() -> None:
    added = PAGE.split("Some fields were added later: ", 1)[1].split("They are", 1)[0]
    assert set(QUOTED.findall(added)) == set(ADDED_FIELDS)
    kinds = {cells[0].strip("`"): cells[1] for cells in table("## vocab.json")}
    assert set(kinds) == {"byte", "char", "word", "subword", "ids"}
    assert set(QUOTED.findall(kinds["word"])) == {"symbols", *WORD_OPTIONS}


def test_the_tolerances_are_those_of_check() -> None:
    stated = {
        precision: (float(cells[1]), float(cells[2]))
        for cells in table("The limits are constants")
        for precision in QUOTED.findall(cells[0])
    }
    assert stated == {name: (TOLERANCES[name], MEAN_TOLERANCES[name]) for name in TOLERANCES}


@pytest.mark.parametrize(
    ("target", "answers", "limits"),
    [
        ("tensorrt", "stored-weights", (5e-2, 1e-2)),
        ("tensorrt", "exported", (0.5, 2e-2)),
        ("onnxruntime", "stored-weights", (0.5, 5e-2)),
    ],
)
def test_the_limits_depend_on_target_and_answers(
    target: Any, answers: Any, limits: tuple[float, float]
) -> None:
    artefact = load_spec(ROOT / "tests/data/version-0.1/int4")
    assert artefact.precision == "int4"
    spec = dataclasses.replace(artefact, target=target, answers=answers)
    assert (spec.tolerance, spec.mean_tolerance) == limits


@pytest.mark.parametrize(("precision", "limits"), [("fp32", (2e-2, 2e-3)), ("fp16", (5e-2, 1e-2))])
def test_memory_in_bytes_has_limits_of_its_own(precision: Any, limits: tuple[float, float]) -> None:
    artefact = load_spec(ROOT / "tests/data/version-0.1/int4")
    changed = {"precision": precision, "memory_precision": "int8", "answers": "memory-in-bytes"}
    spec = dataclasses.replace(artefact, **changed)
    assert (spec.tolerance, spec.mean_tolerance) == limits
    assert "has the limits 2e-2 and 2e-3" in PAGE


# Independent of the project: a parser of JSON that keeps numbers, true, false and null as they are written.
LITERAL = re.compile(r"[-+.\w]+")


def parsed(text: str, at: int = 0) -> tuple[Any, int]:
    """A value and where it ends: a dict, a list, a one-tuple with a string, or the text of a literal."""
    at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
    if text[at] == '"':
        end = at + 1
        while text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        return (json.loads(text[at : end + 1]),), end + 1
    if text[at] not in "{[":
        literal = LITERAL.match(text, at)
        assert literal is not None
        return literal[0], literal.end()
    entries: list[Any] = []
    close, opener, at = "}" if text[at] == "{" else "]", text[at], at + 1
    while (rest := text[at:].lstrip(" \t\r\n,:"))[0] != close:
        entry, at = parsed(text, len(text) - len(rest))
        entries.append(entry)
    end = len(text) - len(rest) + 1
    return (
        dict(zip((k for (k,) in entries[::2]), entries[1::2], strict=True)) if opener == "{" else entries
    ), end


def written(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield (
            "{"
            + ", ".join(
                "".join(written((key,))) + ": " + "".join(written(value[key])) for key in sorted(value)
            )
            + "}"
        )
    elif isinstance(value, list):
        yield "[" + ", ".join("".join(written(entry)) for entry in value) + "]"
    elif isinstance(value, str):
        yield value
    else:
        short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
        units = value[0].encode("utf-16-be", "surrogatepass")
        codes = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
        yield (
            '"'
            + "".join(short.get(chr(c)) or (chr(c) if 0x20 <= c <= 0x7E else f"\\u{c:04x}") for c in codes)
            + '"'
        )


def canonical(text: str) -> tuple[str, str]:
    """The text over which a digest is taken, and the digest that the document states."""
    document, _ = parsed(text)
    (digest,) = document.pop("digest")
    return "".join(written(document)), digest


def test_the_example_of_a_digest_is_right() -> None:
    blocks = re.findall(r"```(?:json|text)\n(.*?)```", PAGE.split("<!-- digest example -->", 1)[1], re.DOTALL)
    text, digest = canonical(blocks[0])
    assert text == blocks[1].strip()
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == digest
    document = json.loads(blocks[0])
    assert document.pop("digest") == identity_of(document)


def test_every_artefact_has_the_digest_that_the_page_describes(artefacts: dict[str, Path]) -> None:
    folders = [*artefacts.values(), *(path.parent for path in ROOT.glob("examples/*/*/spec.json"))]
    folders += [path.parent for path in ROOT.glob("tests/data/version-0.1/*/spec.json")]
    assert len(folders) >= 3 + 2 + 6
    for folder in folders:
        text, digest = canonical((folder / "spec.json").read_text(encoding="utf-8"))
        assert hashlib.sha256(text.encode("ascii")).hexdigest() == digest, folder


def test_the_graphs_say_what_spec_json_says(artefacts: dict[str, Path]) -> None:
    """Read by the package onnx; the keys are those of the page, and the values those of the folder."""
    keys = {key for cells in table("**Facts in the graph.**") for key in QUOTED.findall(cells[0])}
    for folder in artefacts.values():
        spec = json.loads((folder / "spec.json").read_text())
        spec = {key: default for key, default in ADDED_FIELDS.items() if key != "measured"} | spec
        vocabulary = json.loads((folder / "vocab.json").read_text())["kind"]
        for name in sorted({"step.onnx", "fused.onnx"} & set(spec["files"])):
            stated = {
                entry.key: entry.value
                for entry in onnx.load(folder / name, load_external_data=False).metadata_props
            }
            assert set(stated) == keys
            assert stated.pop("xl_export.vocabulary") == vocabulary
            for key, value in stated.items():
                field = spec[key.removeprefix("xl_export.")]
                assert (value if isinstance(field, str) else json.loads(value)) == field
