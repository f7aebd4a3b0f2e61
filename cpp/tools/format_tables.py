"""Writes the tables by which the readers in C++ and JavaScript verify `spec.json` and `reference.json`:
`src/format_tables.hpp` and `web/src/format-tables.js`.

    python cpp/tools/format_tables.py

They follow from the types of the records in Python (`runtimes/contract/spec.py: Spec`), so a new field of
`spec.json` is a line there. The types of the tables:

    {"integer": [least, most]}, {"number": [least, most]}, {"boolean": []}, {"null": []}
    {"text": []}, or {"text": [what it is, characters of its beginning, characters, least, most length]}
    {"choice": [texts]}, {"list": type}, {"map": [type of keys, type of values]}, {"any": [types]}
    {"object": {name: type}, "absent": {name: its value if it is not there}}
"""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from runtimes.base.ranges import Range
from runtimes.base.records import Word, json_text, limits, to_json, type_hints
from runtimes.base.sealed import SHA256
from runtimes.contract.model_facts import SELECTIVE_FROM, SIZES, ModelFacts
from runtimes.contract.precision import MEMORY_PRESETS, MemoryPrecision, Precision
from runtimes.contract.reference import ReferenceFile, StepReferenceFile
from runtimes.contract.rule import Mask, MemoryRule
from runtimes.contract.spec import (
    ANSWERS,
    FUSED,
    GRAPH_FILES,
    REFERENCE,
    ROUNDINGS,
    VOCAB,
    WEIGHTS,
    Spec,
    Target,
)
from runtimes.contract.spec import limits as limits_of
from runtimes.contract.tensors import (
    FORM_FACTS,
    GROUP_STEP,
    MAX_AXES,
    MAX_ROW_BYTES,
    MAX_STATES,
    MAX_VALUE,
    NAME,
    language_model_tensors,
)

ROOT = Path(__file__).parents[2]
HPP = ROOT / "cpp" / "src" / "format_tables.hpp"
JS = ROOT / "web" / "src" / "format-tables.js"
WIDTH = 105
NOTE = """\
// Written by cpp/tools/format_tables.py, which describes it: what may be in spec.json and reference.json, and
// what follows from a model.
"""
VOCAB_SIZE = 7919  # replaced by the name of the size
MODEL = {name: 1 for name in ("layers", "heads", "head_dim", "d_model", "d_ff", "persistent", "parameters")}


def described(hint: Any) -> dict[str, Any]:
    """The table of a type."""
    plain, found = limits(hint)
    origin, args = typing.get_origin(plain), get_args(plain)
    if dataclasses.is_dataclass(plain):
        return described_record(typing.cast(type, plain))
    if origin in (types.UnionType, typing.Union):
        return {"any": [described(arg) for arg in args]}
    if origin is Literal:
        return {"choice": list(args)}
    if origin is tuple:
        return {"list": described(args[0])}
    if origin is dict:
        return {"map": [described(arg) for arg in args]}
    for limit in found:
        if isinstance(limit, Word):
            return {"text": [limit.expected, limit.first, limit.rest, limit.least, limit.most]}
        assert isinstance(limit, Range)
        assert not limit.exclusive
        return {"integer" if plain is int else "number": [limit.least, limit.most]}
    assert plain is not int, "a whole number needs a range, because the languages have different ones"
    return {{float: "number", bool: "boolean", str: "text", type(None): "null"}[plain]: []}


def described_record(cls: type) -> dict[str, Any]:
    """The table of a dataclass as its file has it: sealed, if it has an identity."""
    hints, fields = type_hints(cls), {}
    absent = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name == "identity":
            fields["digest"] = {"text": [SHA256.expected, SHA256.first, SHA256.rest, 64, 64]}
            continue
        fields[field.name] = described(hints[field.name])
        if field.default_factory is not dataclasses.MISSING:
            absent[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            absent[field.name] = field.default
    return {"object": fields, "absent": absent}


def tables() -> dict[str, Any]:
    """Everything that the readers in other languages are told."""
    signatures = {}
    for name, cutoffs in (("plain", ()), ("selective", (1,))):
        facts: Any = {**MODEL, "positions": "", "sublayers": "feed-forward", "pre_norm": False, "reaches": ()}
        model = ModelFacts(**facts, vocab_size=VOCAB_SIZE, cutoffs=cutoffs)
        signatures[name] = [[named(tensor) for tensor in side] for side in language_model_tensors(model)]
    choices = itertools.product(get_args(Precision), get_args(MemoryPrecision), get_args(Target))
    return {
        "spec": described(Spec),
        "reference": described(ReferenceFile),
        "step_reference": described(StepReferenceFile),
        "sizes": SIZES,
        "selective_from": SELECTIVE_FROM,
        "language_model": signatures,
        "forms": {name: to_json(facts) for name, facts in FORM_FACTS.items()},
        "name": described(Annotated[str, NAME]),
        "group_step": GROUP_STEP,
        "max_axes": MAX_AXES,
        "max_value": MAX_VALUE,
        "max_states": MAX_STATES,
        "max_row_bytes": MAX_ROW_BYTES,
        "memory_types": {name: preset.dtype for name, preset in MEMORY_PRESETS.items()},
        "cuts_change_nothing": {mask: masked(mask).cuts_change_nothing for mask in get_args(Mask)},
        "limits": {" ".join(choice): limits_of(*choice) for choice in choices},
        "roundings": ROUNDINGS,
        "graph_files": GRAPH_FILES,
        "external_files": [FUSED, WEIGHTS],
        "needed": [REFERENCE, ANSWERS],
        "vocabulary": VOCAB,
    }


def masked(mask: Mask) -> MemoryRule:
    """A rule with a mask, to ask it about the mask."""
    return MemoryRule(mem_len=1, segment=1, mask=mask)


def named(tensor: Any) -> dict[str, Any]:
    """A tensor of a language model, with a name for the number of tokens."""
    shape = ["vocab_size" if size == VOCAB_SIZE else size for size in tensor.shape]
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": shape}


def written(value: Any, indent: str = "", name: str = "") -> str:
    """A named value as JSON, whose lines have at most WIDTH characters if they can."""
    line = name + json_text(value)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list | tuple):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [written(item, inner, f"{json_text(key)}: ") for key, item in value.items()]
    else:
        lines = [written(item, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{name}{begin}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{end}"


def sources() -> dict[Path, str]:
    """The text of each file."""
    text = written(tables())
    guard = "XL_EXPORT_FORMAT_TABLES_HPP"
    return {
        HPP: f"{NOTE}#ifndef {guard}\n#define {guard}\n\nnamespace xl_export::detail {{\n\n"
        f'inline constexpr char format_tables[] = R"json({text})json";\n\n'
        "}  // namespace xl_export::detail\n\n#endif\n",
        JS: f"{NOTE}/** @type {{any}} */\nexport const TABLES = {text};\n",
    }


if __name__ == "__main__":
    for path, text in sources().items():
        path.write_text(text)
