"""The pages on the format name exactly the fields that there are, and are enough to write a reader."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from runtimes.base.sealed import FileFacts
from runtimes.contract.model_facts import ModelFacts
from runtimes.contract.precision import PRESETS, Measured
from runtimes.contract.reference import Reference, StoredArray
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Spec, load_spec, tolerances
from runtimes.contract.tensors import TensorSpec
from runtimes.contract.vocabulary import SpecialTokens
from runtimes.contract.vocabulary.word import WORD_OPTIONS
from tests.docs.pages import FORMAT, ROOT

PAGE = FORMAT
QUOTED = re.compile(r"`([^`\n]+)`")
TABLES: dict[str, tuple[type, set[str]]] = {  # what begins a section, its record, and what else its table has
    "## spec.json": (Spec, {"digest"}),
    "**`model`**": (ModelFacts, set()),
    "**`rule`**": (MemoryRule, set()),
    "**`inputs` and `outputs`**": (TensorSpec, set()),
    "**`files`**": (FileFacts, set()),
    "**`measured`**": (Measured, set()),
    "**`special`**": (SpecialTokens, set()),
    "## reference.json and reference.bin": (Reference, set()),
    "`log_probs` and `last` are objects": (StoredArray, set()),
}


def table(beginning: str) -> list[list[str]]:
    """The cells of the first table after a beginning of a line, row by row, without its head."""
    after = PAGE.split(f"\n{beginning}", 1)[1]
    lines = after[after.index("\n|") + 1 :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("beginning", TABLES)
def test_each_table_has_exactly_the_fields_of_its_record(beginning: str) -> None:
    record, more = TABLES[beginning]
    named = [name for cells in table(beginning) for name in QUOTED.findall(cells[0])]
    assert len(named) == len(set(named))
    fields = {field.name for field in dataclasses.fields(record)} - {"identity"}
    assert set(named) == fields | more


def test_the_page_names_the_options_of_words() -> None:
    kinds = {cells[0].strip("`"): cells[1] for cells in table("## vocab.json")}
    assert set(kinds) == {"byte", "char", "word", "subword", "ids"}
    assert set(QUOTED.findall(kinds["word"])) == {"symbols", *WORD_OPTIONS}


def test_the_tolerances_are_those_of_check() -> None:
    stated = {
        precision: (float(cells[1]), float(cells[2]))
        for cells in table("`spec.json` has both limits.")
        for precision in QUOTED.findall(cells[0])
    }
    assert stated == {name: (preset.tolerance, preset.mean_tolerance) for name, preset in PRESETS.items()}


@pytest.mark.parametrize(
    ("precision", "memory", "target", "answers", "limits"),
    [
        ("int4", "fp32", "tensorrt", "stored-weights", (5e-2, 1e-2)),
        ("int4", "fp32", "onnxruntime", "stored-weights", (0.5, 5e-2)),
        ("fp32", "fp16", "onnxruntime", "exported", (5e-2, 1e-2)),
        ("fp32", "int8", "onnxruntime", "memory-in-bytes", (2e-2, 2e-3)),
        ("fp16", "int8", "onnxruntime", "memory-in-bytes", (5e-2, 1e-2)),
    ],
)
def test_the_limits_depend_on_target_and_answers(
    precision: Any, memory: Any, target: Any, answers: Any, limits: tuple[float, float]
) -> None:
    assert tolerances(precision, memory, target, answers) == limits
    assert "has the limits 2e-2 and 2e-3" in PAGE


def test_every_artefact_has_the_digest_that_the_page_describes(artefacts: dict[str, Path]) -> None:
    folders = [*artefacts.values(), *(path.parent for path in ROOT.glob("examples/*/*/spec.json"))]
    for folder in folders:
        content = (folder / "spec.json").read_bytes()
        head = content.rpartition(b'"digest"')[0]
        assert hashlib.sha256(head).hexdigest() == json.loads(content)["digest"], folder
        assert hashlib.sha256(content).hexdigest() == load_spec(folder).identity


def test_the_graphs_say_what_spec_json_says(artefacts: dict[str, Path]) -> None:
    """Read by the package onnx; the keys are those of the page, and the values those of the folder."""
    keys = {key for cells in table("**Facts in the graph.**") for key in QUOTED.findall(cells[0])}
    for folder in artefacts.values():
        spec = json.loads((folder / "spec.json").read_text())
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
